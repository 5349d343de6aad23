from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from click.testing import CliRunner

from tests.checkpoint.states import facts, odd, path_of, save_once
from worldsize.checkpoint.manifest import TRAIN
from worldsize.checkpoint.retain import Keep, mark_best
from worldsize.cli.checkpoint import command
from worldsize.errors import CheckpointError
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


def call(*words: object) -> Result:
    """What the command printed, and its exit code."""
    return CliRunner().invoke(command, [str(word) for word in words])


def test_ls(run_dir: Path) -> None:
    """One line a checkpoint, oldest first, the best marked, an unreadable one told."""
    (path_of(run_dir, 100) / "manifest.json").write_text("{")
    first, second = call("ls", run_dir).output.splitlines()
    assert first.startswith("step-00000090  epoch 9")
    assert first.endswith("best")
    assert second.startswith("step-00000100  UNREADABLE")


def test_ls_of_nothing(tmp_path: Path) -> None:
    """A folder without checkpoints says so."""
    assert call("ls", tmp_path).output == f"no committed checkpoint in {tmp_path}\n"


def test_show(run_dir: Path) -> None:
    """A run folder shows its newest checkpoint, a checkpoint itself."""
    assert "step             100" in call("show", run_dir).output
    shown = call("show", path_of(run_dir, 90)).output
    assert "samples seen     360" in shown
    assert '{"strategy": "x"}' in shown


def test_verify(run_dir: Path) -> None:
    """Exit code 0 where all is well; 1 and the file's name where not."""
    good = call("verify", run_dir)
    assert (good.exit_code, good.output) == (0, "step-00000090  ok\nstep-00000100  ok\n")
    (path_of(run_dir, 90) / TRAIN).write_text("x")
    bad = call("verify", run_dir)
    assert bad.exit_code == 1
    assert "step-00000090  DAMAGED" in bad.output
    assert TRAIN in bad.output
    assert call("verify", path_of(run_dir, 100)).exit_code == 0


def test_verify_of_nothing(tmp_path: Path) -> None:
    """Verifying what is no run is an error, not a success."""
    assert isinstance(call("verify", tmp_path).exception, CheckpointError)


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
for word in ("ls", "show", "verify"):
    assert CliRunner().invoke(command, [word, {str(run_dir)!r}]).exit_code == 0
import worldsize.checkpoint.owner, worldsize.checkpoint.retain
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
