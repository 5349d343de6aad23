"""`worldsize llm`: the seed's command line, on CPU, under every launcher."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from tests.examples.programs import ROOT
from tests.integration import slurmjob
from tests.launch.container import image
from tests.recipes.llm import folders
from worldsize.cli.main import commands
from worldsize.launch import env, shell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worldsize.recipes.llm.config import LLMConfig
    from worldsize.testing.slurm import Cluster

PROGRAM = str(ROOT / "examples" / "llm" / "train.py")
OURS = (sys.executable, "-m", "worldsize")


JSON = {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": "auto", "steps_per_print": 2000,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.99], "weight_decay": 0.05}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": "auto"}},
    "gradient_clipping": 0.5, "zero_optimization": {"stage": 1},
}  # fmt: skip
SAME = (
    "--global_batch", "8", "--micro_batch", "1", "--lr", "1e-3", "--beta1", "0.8", "--beta2", "0.99", "--weight_decay", "0.05",
    "--lr_schedule", "linear", "--warmup_steps", "2", "--warmup_shape", "log", "--min_lr_share", "0", "--clip", "0.5",
)  # fmt: skip
"""What the JSON says, by our own flags."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of transformers and a file of JSON lines."""
    found = tmp_path_factory.mktemp("llm")
    folders.folder(found / "tiny", num_hidden_layers=8)
    records = ({"prompt": f"{number}?", "completion": f" {number}"} for number in range(200))
    folders.lines(found / "dataset.train.jsonl", records)
    (found / "llama.json").write_text(json.dumps(JSON))
    (found / "bf16.json").write_text(json.dumps({**JSON, "bf16": {"enabled": True}}))
    return found


def seed_flags(folder: Path, run: Path, *, pipe: int, model: int) -> list[str]:
    """Those of the seed, in its order and spelling."""
    return [
        "--output_dir", str(run), "--init_ckpt", str(folder / "tiny"),
        "--data_path", str(folder / "dataset.train.jsonl"), "--max_seq_len", "128", "--train_steps", "4",
        "--eval_steps", "10", "--save_steps", "1000", "--log_steps", "10", "--pipe_parallel_size", str(pipe),
        "--model_parallel_size", str(model), "--use_flash_attn", "true", "--use_fused_ops", "false",
        "--deepspeed_config", str(folder / "llama.json"),
    ]  # fmt: skip


def losses(run: Path) -> dict[int, float]:
    """Of each step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def called(folder: Path, *argv: str) -> Any:
    """The command, in its own home."""
    given = {**env.read(), "HOME": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return shell.call(argv, given, timeout=300, cwd=folder)


EXACT = ("--precision", "fp32", "--cache_dir", "cache")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[int, float]:
    """What one process does that knows nothing of DeepSpeed."""
    run = folder / "alone"
    words = seed_flags(folder, run, pipe=1, model=1)[:-2]
    done = called(folder, *OURS, "llm", "train", *words, *SAME, *EXACT)
    assert done.code == 0, done.err
    return losses(run)


DEEPSPEED = str(Path(sys.executable).parent / "deepspeed")
STARTS = {
    "deepspeed": (DEEPSPEED, "--num_gpus", "2", "--num_nodes", "1", PROGRAM),
    "worldsize": (*OURS, "run", "--nproc-per-node", "2", PROGRAM),
    "command": (*OURS, "run", "--nproc-per-node", "2", "-m", "worldsize", "llm", "train"),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PROGRAM),
}


@pytest.mark.parametrize(
    "start",
    [
        "command 1x2",
        *(pytest.param(f"{name} {sizes}", marks=pytest.mark.matrix) for name, sizes in (
            ("deepspeed", "1x2"), ("deepspeed", "1x1"), ("worldsize", "2x1"), ("worldsize", "1x2"), ("command", "2x1"),
            ("torchrun", "2x1"), ("torchrun", "1x2"))),
    ],
)  # fmt: skip
def test_the_seeds_flags(folder: Path, alone: dict[int, float], tmp_path: Path, start: str) -> None:
    """Two stages, two tensor parts or DeepSpeed itself, as the JSON says: the curve of one process."""
    launcher, sizes = start.split()
    pipe, model = map(int, sizes.split("x"))
    words = seed_flags(folder, tmp_path / "run", pipe=pipe, model=model)
    done = called(folder, *STARTS[launcher], *words, *EXACT)
    assert done.code == 0, done.err
    assert losses(tmp_path / "run") == pytest.approx(alone, rel=1e-5)


@pytest.mark.slurm
@pytest.mark.matrix
@pytest.mark.parametrize("place", ["host", pytest.param("container", marks=pytest.mark.container)])
def test_eight_stages_over_two_nodes(
    slurm: Cluster, folder: Path, alone: dict[int, float], tmp_path: Path, place: str
) -> None:
    """Four ranks on each of two nodes of a real Slurm, one layer a rank (B082); on the nodes or in an image there."""
    words = seed_flags(folder, tmp_path / "run", pipe=8, model=1)
    binds = [*image.binds(), str(folder), str(tmp_path)]
    root = str(image.make(tmp_path / "image"))
    box = {"image": root, "runtime": "charliecloud", "python": sys.executable, "binds": binds}
    (tmp_path / "job.yaml").write_text(json.dumps({"container": box} if place == "container" else {}))
    options = ("--nodes", "2", "--nproc-per-node", "4", "--launcher", "torchrun", "--chdir", str(folder))
    places = ("--job-dir", str(tmp_path / "job"), "--env", "OMP_NUM_THREADS=1")
    argv = (*OURS, "submit", "-c", str(tmp_path / "job.yaml"), PROGRAM, *options, *places, "--", *words, *EXACT)
    done = shell.call(argv, {**slurm.env, "HOME": str(tmp_path)}, timeout=120, cwd=folder)
    assert done.code == 0, done.err
    job = slurmjob.Job(slurm, done.out.strip(), tmp_path / "job", tmp_path / "run")
    assert job.ends() == "COMPLETED", job.log
    assert losses(tmp_path / "run") == pytest.approx(alone, rel=1e-5)


@pytest.fixture(scope="module")
def piped(folder: Path) -> Any:
    """The seed's own line: DeepSpeed's launcher, two stages."""
    words = seed_flags(folder, folder / "piped", pipe=2, model=1)
    done = called(folder, *STARTS["deepspeed"], *words, *EXACT)
    assert done.code == 0, done.err
    return done


def test_the_seeds_line_has_the_curve_of_one_process(piped: Any, folder: Path, alone: dict[int, float]) -> None:
    """With batch, optimizer, schedule and clipping of its JSON."""
    del piped
    assert losses(folder / "piped") == pytest.approx(alone, rel=1e-5)


def test_what_a_pipeline_does_not_take_of_the_json_is_said_once(piped: Any) -> None:
    """By name, and by one of the ranks."""
    told = [line for line in piped.out.splitlines() if "without effect" in line]
    assert len(told) == 1
    assert told[0].endswith("llama.json without effect here: steps_per_print")


@pytest.mark.matrix
@pytest.mark.parametrize("sizes", ["2x1", "1x2", "1x1"])
def test_the_precision_of_the_json_is_taken(
    folder: Path, alone: dict[int, float], tmp_path: Path, sizes: str
) -> None:
    """bf16 in a pipeline, in tensor parts and under DeepSpeed: near the curve of float32, and not on it."""
    pipe, model = map(int, sizes.split("x"))
    words = (*seed_flags(folder, tmp_path / "run", pipe=pipe, model=model)[:-1], str(folder / "bf16.json"))
    done = called(folder, *STARTS["worldsize"], *words, "--cache_dir", "cache")
    assert done.code == 0, done.err
    found = losses(tmp_path / "run")
    assert found == pytest.approx(alone, rel=2e-2)
    assert found != pytest.approx(alone, rel=1e-6)


@pytest.mark.slurm
@pytest.mark.matrix
def test_plain_srun_starts_it(slurm: Cluster, folder: Path, alone: dict[int, float], tmp_path: Path) -> None:
    """One rank on each of two nodes, from Slurm's own variables."""
    words = seed_flags(folder, tmp_path / "run", pipe=2, model=1)
    argv = ("srun", "-N2", "-n2", sys.executable, "-u", PROGRAM, *words, *EXACT)
    done = shell.call(argv, {**slurm.env, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}, timeout=240, cwd=folder)
    assert done.code == 0, done.err
    assert losses(tmp_path / "run") == pytest.approx(alone, rel=1e-5)


def read(words: Sequence[str], folder: Path | None = None) -> LLMConfig:
    """What the command would train with, its options given so, or a file with the same names in this folder."""
    seen: list[LLMConfig] = []
    if folder is not None:
        pairs = zip(words[::2], words[1::2], strict=True)
        (folder / "llm.yaml").write_text("".join(f"{name.removeprefix('--')}: {value}\n" for name, value in pairs))
        words = ("-c", str(folder / "llm.yaml"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worldsize.recipes.llm.train.train", seen.append)
        done = CliRunner().invoke(commands, ["llm", "train", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return seen[0]


def test_each_flag_may_have_dashes(folder: Path, tmp_path: Path) -> None:
    """On the command line and in YAML: the same settings."""
    words = seed_flags(folder, tmp_path / "run", pipe=2, model=1)
    names, values = words[::2], words[1::2]
    assert len(names) == 13
    dashed = [word for name, value in zip(names, values, strict=True) for word in (_dashed(name), value)]
    assert set(dashed[::2]).isdisjoint(names)
    wanted = read(words)
    assert read(dashed) == wanted == read(words, tmp_path) == read(dashed, tmp_path)
    assert wanted.model_fields_set == {name.removeprefix("--") for name in names}


def _dashed(flag: str) -> str:
    return f"--{flag.removeprefix('--').replace('_', '-')}"


@pytest.mark.parametrize(("there", "here"), [("train-steps", "--train_steps"), ("train_steps", "--train-steps")])
def test_an_option_wins_however_both_are_spelt(tmp_path: Path, there: str, here: str) -> None:
    """What the file says of it is left alone."""
    places = "".join(f"{name}: x\n" for name in ("output_dir", "init_ckpt", "data_path"))
    (tmp_path / "llm.yaml").write_text(f"{there}: 7\n{places}", encoding="utf-8")
    assert read(("-c", str(tmp_path / "llm.yaml"), here, "9")).train_steps == 9


def test_yaml_with_dashes_trains_the_same(folder: Path, alone: dict[int, float], tmp_path: Path) -> None:
    """And options win, as here over the precision."""
    words = [*seed_flags(folder, tmp_path / "run", pipe=1, model=1)[:-2], *SAME, "--cache_dir", "cache"]
    pairs = zip(words[::2], words[1::2], strict=True)
    text = "".join(f"{_dashed(name)[2:]}: {value}\n" for name, value in pairs)
    (tmp_path / "llm.yaml").write_text(f"{text}precision: fp64\n", encoding="utf-8")
    done = called(folder, *OURS, "llm", "train", "-c", str(tmp_path / "llm.yaml"), "--precision", "fp32")
    assert done.code == 0, done.err
    assert losses(tmp_path / "run") == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--train_steps", "2"), "--output_dir is missing"),
        (("--use_flash_attn", "maybe"), "use_flash_attn"),
        (("--train_steps", "2", "--epochs", "1"), "train_steps and epochs exclude each other. Found: 2 and 1"),
        (("--output_dir", "a", "--init_ckpt", "none", "--data_path", "d"), "none is no folder of a model"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, words: tuple[str, ...], found: str) -> None:
    """What was set, what was found, what to do; code 2."""
    done = called(tmp_path, *OURS, "llm", "train", *words)
    assert (done.code, len(done.err.splitlines())) == (2, 1), done.err
    assert found in done.err


def test_a_rank_says_it_once(folder: Path, tmp_path: Path) -> None:
    """A data file with a bad line: one line with file, line and column, whichever rank came first (B076)."""
    path = folders.lines(tmp_path / "bad.jsonl", [{"text": "a"}])
    path.write_text(path.read_text() + '{"text": "b\n')
    words = (*seed_flags(folder, tmp_path / "run", pipe=1, model=1), "--data_path", str(path))
    done = called(folder, *STARTS["worldsize"], *words, *EXACT)
    assert done.code == 1
    assert "bad.jsonl:2:" in done.err.splitlines()[-1]
    assert "Traceback" not in done.err
