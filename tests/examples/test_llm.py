"""Room: the example of a containerised job: what its spec and its site make of it, as a preview."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.examples.programs import ROOT
from worldsize.launch import shell, yamlfile
from worldsize.recipes.llm import zero
from worldsize.recipes.llm.config import LLMConfig

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLE = ROOT / "examples" / "llm"


def preview(home: Path, *options: str, spec: str | None = None) -> str:
    """The script of the example, submitted from a home folder; `spec`: another text of job.yaml."""
    job = home / "job.yaml"
    job.write_text((EXAMPLE / "job.yaml").read_text(encoding="utf-8") if spec is None else spec, encoding="utf-8")
    argv = [sys.executable, "-m", "worldsize", "submit", "-c", "job.yaml", "--preview", *options]
    done = shell.call(argv, {"PATH": "/nowhere", "HOME": str(home)}, timeout=60, cwd=home)
    assert done.code == 0, done.err
    return done.out


@pytest.fixture
def text(tmp_path: Path) -> str:
    """The script as it stands in the example."""
    return preview(tmp_path, "--profile", str(EXAMPLE / "profile.yaml"))


def test_the_site_gives_variables_and_addresses(text: str) -> None:
    """NCCL's and UCX's under today's names, GPUs in one form, the suffix of the fast network."""
    variables = (
        "NCCL_IB_TIMEOUT=22",
        "NCCL_IB_RETRY_CNT=10",
        "UCX_RC_TIMEOUT=4s",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
    )
    directives = ("--gres=gpu:4", "--output=logs/%j_%N_log.out")
    for line in (*(f"export {each}" for each in variables), *(f"#SBATCH {each}" for each in directives)):
        assert line in text.splitlines()
    assert "--gpus-per-node" not in text
    assert "--address-suffix=i" in text


def test_the_container_has_what_it_is_given(text: str, tmp_path: Path) -> None:
    """Binds and variables as they stand, the home, GPUs, the working folder; the ranks' program goes in."""
    words = text[text.index("apptainer exec") : text.index(" &\nstep=")].replace("\\\n", " ").split()
    bound = [words[at + 1] for at, word in enumerate(words) if word == "--bind"]
    assert {"/path/to/project:/workspace", "/path/to/cache/transformers_cache:/.hf_cache",
            "/path/to/cache/pretrained_weights:/pretrained", "/path/to/cache/datasets:/datasets"} < set(bound)  # fmt: skip
    assert any(bind.split(":")[0] == str(tmp_path) for bind in bound)
    assert "--nv" in words
    assert words[words.index("--pwd") + 1] == "/workspace"
    assert "HF_HOME=/.hf_cache" in words
    assert "--launcher=torchrun" in words
    assert words[words.index("--") + 1 :][:2] == ["train.py", "--output_dir=/workspace/.cache/models"]


def test_pythonpath_is_there_only_when_asked_for(text: str, tmp_path: Path) -> None:
    """The host's is taken away."""
    assert "-u PYTHONPATH" in text
    assert "PYTHONPATH=" not in text
    asked = (EXAMPLE / "job.yaml").read_text(encoding="utf-8").replace("# PYTHONPATH", "PYTHONPATH")
    found = preview(tmp_path, "--profile", str(EXAMPLE / "profile.yaml"), spec=asked)
    assert "-u PYTHONPATH" not in found
    assert "PYTHONPATH=/workspace" in found


SEED = """
--output_dir /workspace/.cache/models --init_ckpt /pretrained/llama-2-7b-hf --data_path /datasets/prompt.jsonl
--max_seq_len 2048 --train_steps 10 --eval_steps 10 --save_steps 1000 --log_steps 1 --pipe_parallel_size 8
--model_parallel_size 1 --use_flash_attn true --use_fused_ops false --deepspeed_config ./configs/llama.json
"""
"""What FMEngine's script gives its program."""


@pytest.fixture
def settings() -> dict[str, Any]:
    """What job.yaml gives its program, by name."""
    words = yamlfile.load(EXAMPLE / "job.yaml")["program"][1:]
    return dict(word.removeprefix("--").split("=", 1) for word in words)


def test_the_job_has_the_flags_of_the_script_that_it_replaces(settings: dict[str, Any]) -> None:
    """All of them, with their values."""
    words = SEED.split()
    wanted = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    assert settings == wanted


def test_its_json_is_taken_whole_by_the_eight_stages(settings: dict[str, Any]) -> None:
    """Batch, optimizer, schedule, clipping and precision; nothing in it is without use there."""
    path = {"deepspeed_config": str(EXAMPLE / settings["deepspeed_config"])}
    config, taken = zero.apply(LLMConfig.of({**settings, **path}), 8)
    found = (config.global_batch, config.micro_batch, config.precision, config.strategy, config.lr_schedule)
    assert found == (64, 1, "bf16", "fsdp", "linear")
    assert (config.lr, config.beta1, config.beta2, config.weight_decay, config.clip) == (2e-5, 0.9, 0.95, 0.1, 1.0)
    assert (config.warmup_steps, taken.unused) == (20, [])


def test_the_standard_library_is_a_job_too(tmp_path: Path) -> None:
    """Two ranks on each of two nodes, in the image, with the settings that stdlib.py wrote."""
    spec = (EXAMPLE / "stdlib.yaml").read_text(encoding="utf-8")
    text = preview(tmp_path, "--profile", str(EXAMPLE / "profile.yaml"), spec=spec)
    assert {"#SBATCH --nodes=2", "#SBATCH --job-name=stdlib"} <= set(text.splitlines())
    words = text[text.index("apptainer exec") : text.index(" &\nstep=")].replace("\\\n", " ").split()
    assert "/path/to/project" in {words[at + 1].split(":")[0] for at, word in enumerate(words) if word == "--bind"}
    assert words[words.index("--") + 1 :][:3] == ["train.py", "-c", "work/pretrain.yaml"]
    assert "--nproc-per-node=2" in words
