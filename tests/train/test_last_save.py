"""A training that fails while a save is under way: what was begun is committed before the process ends, or not waited for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from worldsize.checkpoint import manifest
from worldsize.checkpoint.manifest import FOLDER
from worldsize.runtime import env

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import worldsize as ws
from worldsize.errors import ConfigError
from tests.train import small
from worldsize.checkpoint import disk, save

folder, how, save._PATIENCE_S = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
fast, finish = disk.Recorder.write, save.Checkpointer.finish

def write(self, data):
    (folder / "saving").touch()
    time.sleep(0.02)
    return fast(self, data)

def told(self):
    print("waits", flush=True)
    finish(self)

def wait(name):
    while not (folder / name).exists():
        time.sleep(0.01)

disk.Recorder.write, save.Checkpointer.finish = write, told
run = small.make(folder, saving=ws.Saving(every="2st"), duration="4ep")
model, _ = small.parts(run)
for step in small.steps(run, model):
    if step.index == 2:
        wait("saving")
        if how == "silent" and run.comm.rank == 1:
            (folder / "silent").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "silent":
            wait("silent")
        if how == "exit":
            sys.exit(7)
        if how == "break":
            break
        raise ConfigError("of no use") if how == "ours" else ValueError("of no use")
"""


def environment() -> dict[str, str]:
    """The program imports from this folder of tests."""
    return {**env.read(), "PYTHONPATH": f"{Path(__file__).parents[2]}:{env.read().get('PYTHONPATH', '')}"}


def program(tmp_path: Path) -> Path:
    """The script."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return path


@pytest.mark.parametrize(("how", "code"), [("theirs", 1), ("ours", 2), ("exit", 1), ("break", 1)])
def test_what_was_being_saved_is_committed(tmp_path: Path, how: str, code: int) -> None:
    """Whichever way it ends, with its own code, waited for once, and nothing half is left."""
    words = [str(program(tmp_path)), str(tmp_path / "run"), how, "30"]
    done = subprocess.run(
        [sys.executable, *words], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.count("waits") == 1
    assert [manifest.step_of(path) for path in manifest.committed(tmp_path / "run")] == [2], done.stderr
    assert [path.name for path in (tmp_path / "run" / FOLDER).iterdir() if path.name.startswith(".")] == []


def test_who_is_silent_is_not_waited_for(tmp_path: Path) -> None:
    """A rank that fails ends although another, stopped, never does its part of the save."""
    words = [str(program(tmp_path)), str(tmp_path / "run"), "silent", "2"]
    launch = [sys.executable, "-m", "worldsize", "run", "--nproc-per-node", "2", "--max-restarts", "0", *words]
    done = subprocess.run(launch, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert "ValueError: of no use" in done.stderr
    assert manifest.committed(tmp_path / "run") == []
