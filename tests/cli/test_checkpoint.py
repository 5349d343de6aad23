from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from click.testing import CliRunner

from tests.checkpoint.states import facts, odd, path_of, save_once
from tests.checkpoint.trained import trained
from worldsize.checkpoint.manifest import TRAIN
from worldsize.checkpoint.owner import claim
from worldsize.checkpoint.retain import Keep, mark_best
from worldsize.cli.checkpoint import command
from worldsize.errors import CheckpointError, ConfigError
from worldsize.runtime.comm import Alone

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with two checkpoints, the first marked as best."""
    for step in (90, 100):
        save_once(tmp_path / "run", Alone(), odd(step), step, keep=Keep(last=9))
    mark_best(tmp_path / "run", 90)
    return tmp_path / "run"


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real training of fsdp on two ranks."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    trained(folder, "fsdp")
    return folder


def call(*words: object) -> Result:
    """What the command printed, and its exit code."""
    return CliRunner().invoke(command, [str(word) for word in words])


def test_ls(run_dir: Path) -> None:
    """One line a checkpoint, oldest first, with what wrote it; the best and the newest marked."""
    head, first, second = call("ls", run_dir).output.splitlines()
    assert head.split() == ["step", "epochs", "samples", "size", "committed", "attempt", "layout"]
    assert first.split()[:3] == ["90", "9", "360"]
    assert first.split()[-3:] == ["0", "x", "best"]
    assert second.split()[-3:] == ["1", "x", "newest"]


def test_ls_names_what_is_no_checkpoint(run_dir: Path) -> None:
    """Every folder beside the checkpoints with the reason why it is none."""
    folder = path_of(run_dir, 90).parent
    for name in (
        ".step-00000110.abc-1.tmp",
        ".step-00000080.abc-1.old",
        ".step-00000070.x.gone",
        "step-00000007",
        "mine",
    ):
        (folder / name).mkdir()
    (path_of(run_dir, 100) / "manifest.json").write_text("{")
    lines = call("ls", run_dir).output.splitlines()
    assert lines[2] == "no checkpoints:"
    whys = dict(line.strip().split("  ", 1) for line in lines[3:])
    assert whys.keys() == {entry.name for entry in folder.iterdir() if entry.is_dir()} - {"step-00000090"}
    assert "being written when its attempt ended" in whys[".step-00000110.abc-1.tmp"]
    assert "replaced" in whys[".step-00000080.abc-1.old"]
    assert "deleted" in whys[".step-00000070.x.gone"]
    assert "no manifest.json" in whys["step-00000007"]
    assert "name" in whys["mine"]
    assert "damaged" in whys["step-00000100"]


def test_a_writer_that_lives_is_told(run_dir: Path) -> None:
    """While the owner of the run is alive, what is being written is not called left over."""
    claim(run_dir, run_id="r")
    (path_of(run_dir, 90).parent / ".step-00000110.abc-1.tmp").mkdir()
    assert "is being written by attempt 2 (pid" in call("ls", run_dir).output


def test_ls_for_programs(run_dir: Path) -> None:
    """The same as JSON."""
    found = json.loads(call("ls", run_dir, "--json").output)
    rows = found["checkpoints"]
    assert [(row["step"], row["best"], row["newest"]) for row in rows] == [(90, True, False), (100, False, True)]
    assert rows[0]["bytes"] == sum(
        f.stat().st_size for f in path_of(run_dir, 90).iterdir() if f.name != "manifest.json"
    )
    assert found["others"] == {}


def test_ls_of_nothing(tmp_path: Path) -> None:
    """A run without checkpoints says so; what is no run is an error with what was found."""
    (tmp_path / "checkpoints").mkdir()
    assert call("ls", tmp_path).output == f"no committed checkpoint in {tmp_path}\n"
    assert "no such folder" in str(call("ls", tmp_path / "x").exception)
    assert "no run.json" in str(call("ls", tmp_path.parent).exception)


def test_show(run_dir: Path) -> None:
    """A run folder shows its newest checkpoint, RUN@STEP that of a step, a checkpoint itself."""
    assert call("show", run_dir).output.splitlines()[1].split() == ["step", "100"]
    shown = call("show", path_of(run_dir, 90)).output
    assert shown == call("show", f"{run_dir}@90").output
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in shown.splitlines())
    assert (rows["samples seen"], rows["layout"], rows["best"]) == ("360", "x", "yes")
    assert rows["keep"].startswith("3 tensors, 31 values, ")


def test_show_tensors(run_dir: Path) -> None:
    """A row for each tensor: dtype, size, pieces, shape, name."""
    lines = call("show", run_dir, "--tensors").output.splitlines()
    assert lines[-len(odd()) - 1].split() == ["dtype", "size", "pieces", "shape", "tensor"]
    assert ["complex64", "16", "B", "1", "[2]", "model/complex"] in [line.split() for line in lines]
    found = json.loads(call("show", run_dir, "--tensors", "--json").output)
    assert found["tensors"]["model/half"] == {"shape": [3], "dtype": "bfloat16", "bytes": 6, "pieces": 1}
    assert found["step"] == 100


def test_show_of_a_training(trained_run: Path) -> None:
    """Of a real training: hyperparameters, kept values, ties, and how much each part is."""
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in call("show", trained_run).output.splitlines())
    assert rows["layout"] == "fsdp, 2 ranks, fp32"
    assert rows["tied"] == "model/net/tied.weight = model/net/emb.weight"
    assert rows["kept seen"] == "4"
    assert "lr=0.0001" in rows["optimizer 0, group 0"]
    assert "weight_decay=0.0" in rows["optimizer 0, group 1"]
    assert {"model/net", "optim/0", "average/net"} <= rows.keys()


def test_verify(run_dir: Path) -> None:
    """Exit code 0 where all is well; 1 and the file's name where not."""
    good = call("verify", run_dir)
    assert good.exit_code == 0
    assert [line.partition(" files")[0] for line in good.output.splitlines()] == [
        "step-00000090  ok: 10 tensors, 3", "step-00000100  ok: 10 tensors, 3",
    ]  # fmt: skip
    (path_of(run_dir, 90) / TRAIN).write_text("x")
    bad = call("verify", run_dir)
    assert bad.exit_code == 1
    assert "step-00000090  DAMAGED" in bad.output
    assert TRAIN in bad.output
    assert call("verify", path_of(run_dir, 100)).exit_code == 0
    assert [bool(row["problems"]) for row in json.loads(call("verify", run_dir, "--json").output)] == [True, False]


def test_verify_of_nothing(tmp_path: Path) -> None:
    """Verifying what is no run is an error, not a success."""
    assert isinstance(call("verify", tmp_path).exception, CheckpointError)


def test_diff(run_dir: Path) -> None:
    """0 where nothing differs, 1 where something does, 2 where that cannot be told."""
    same = call("diff", run_dir, f"{run_dir}@100")
    assert (same.exit_code, same.output.splitlines()[2]) == (0, "equal: 10 tensors, progress, hyperparameters")
    other = call("diff", f"{run_dir}@90", f"{run_dir}@100")
    assert other.exit_code == 1
    assert "model/weight" in other.output
    assert other.output.splitlines()[-1].split() == ["90", "100", "step"]
    assert json.loads(call("diff", f"{run_dir}@90", run_dir, "--json").output)["different"] is True
    (path_of(run_dir, 90) / TRAIN).write_text("x")
    for words in ((f"{run_dir}@90", run_dir), (run_dir, f"{run_dir}@7"), (run_dir, run_dir / "x")):
        trouble = call("diff", *words).exception
        assert isinstance(trouble, CheckpointError)
        assert trouble.exit_code == 2


def test_export(trained_run: Path, tmp_path: Path) -> None:
    """All three forms from the command line, and what does not go together."""
    done = call("export", trained_run, tmp_path / "hf", "--max-shard-size", "500B")
    assert isinstance(done.exception, ConfigError)
    done = call("export", trained_run, tmp_path / "hf", "--max-shard-size", "500")
    assert done.output.startswith("step-00000004: 11 tensors (1 tied to others), 1.3 kB -> ")
    assert (tmp_path / "hf" / "model.safetensors.index.json").is_file()
    assert call("export", trained_run, tmp_path / "x.pt", "--to", "torch", "--optimizer").exit_code == 0
    assert torch.load(tmp_path / "x.pt", weights_only=True).keys() == {"model", "optimizer"}
    assert call("export", f"{trained_run}@4", tmp_path / "ds", "--to", "deepspeed").exit_code == 0
    assert (tmp_path / "ds" / "latest_universal").read_text() == "step-00000004"
    for words in (
        ("--optimizer",),
        ("--to", "torch", "--max-shard-size", "1GB"),
        ("--to", "deepspeed", "--dtype", "bf16"),
    ):
        assert isinstance(call("export", trained_run, tmp_path / "y", *words).exception, ConfigError)


def test_import(run_dir: Path, tmp_path: Path) -> None:
    """The weights of a checkpoint go into a file, and a file into a new run."""
    done = call("import", run_dir, "--to", tmp_path / "x.pt")
    assert done.exit_code == 0
    assert done.output.startswith("7 tensors, ")
    assert torch.equal(torch.load(tmp_path / "x.pt", weights_only=True)["weight"], odd(100)["model/weight"])
    assert call("import", tmp_path / "x.pt", "--to", tmp_path / "new").exit_code == 0
    assert (tmp_path / "new" / "initial.pt").is_file()


def test_import_needs_trust(tmp_path: Path) -> None:
    """A pickle is refused without --trust."""
    torch.save({"state_dict": {"w": torch.ones(1)}, "x": facts}, tmp_path / "x.ckpt")
    assert isinstance(call("import", tmp_path / "x.ckpt", "--to", tmp_path / "y.pt").exception, CheckpointError)
    assert call("import", tmp_path / "x.ckpt", "--to", tmp_path / "y.pt", "--trust").exit_code == 0


def test_looking_needs_no_torch(run_dir: Path) -> None:
    """ls, show and verify never import torch."""
    code = f"""
import sys
from click.testing import CliRunner
from worldsize.cli.checkpoint import command
for words in (["ls"], ["show", "--tensors"], ["verify"]):
    assert CliRunner().invoke(command, [*words, {str(run_dir)!r}]).exit_code == 0
import worldsize.checkpoint.owner, worldsize.checkpoint.retain
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
