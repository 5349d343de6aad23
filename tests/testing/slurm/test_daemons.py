"""Only what was started is signalled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from worldsize.testing.slurm.daemons import Daemons, Record, identify, read, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ENV = {"PATH": os.defpath}
OWNER = """
import sys, time
from pathlib import Path
from worldsize.testing.slurm.daemons import Daemons, until
daemons = Daemons(Path(sys.argv[1]), outlive=sys.argv[2] == "True")
daemons.start("sleep", ("sleep", "100"), {"PATH": sys.argv[3]})
assert until(lambda: "sleep" in daemons.running(), 10)
print("up", flush=True)
time.sleep(100)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as a cluster makes it."""
    for name in ("run", "log"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture(params=[True, False], ids=["outlive", "bound"])
def daemons(folder: Path, request: pytest.FixtureRequest) -> Iterator[Daemons]:
    """Both kinds."""
    made = Daemons(folder, outlive=request.param)
    yield made
    made.stop(made.running().values())
    made.close()


def started(daemons: Daemons, *argv: str) -> Record:
    """A process of that name, recorded."""
    daemons.start("one", argv, ENV)
    assert until(lambda: "one" in daemons.running(), 10.0)
    return daemons.running()["one"]


def test_a_process_is_recorded_until_it_is_stopped(daemons: Daemons, folder: Path) -> None:
    """Its id and start are those of /proc; its words are in the log; SIGKILL ends it whatever it traps."""
    record = started(daemons, "sh", "-c", "trap '' TERM; echo hello; while :; do sleep 0.1; done")
    assert identify(record.pid) == replace(record, name=f"process {record.pid}")
    assert until(lambda: (folder / "log" / "one.out").read_text() == "hello\n", 10.0)
    daemons.stop([record])
    assert not record.alive
    assert daemons.running() == {}


def test_a_number_that_was_given_again_is_left_alone(daemons: Daemons) -> None:
    """A record with another start is of another process: nothing is sent."""
    record = started(daemons, "sleep", "100")
    earlier = replace(record, start=record.start - 1)
    assert not earlier.alive
    earlier.send(signal.SIGKILL)
    daemons.stop([earlier])
    assert record.alive


def test_a_zombie_is_gone() -> None:
    """Nobody has reaped it yet, and still it does not run."""
    with subprocess.Popen(["true"]) as process:
        assert until(
            lambda: not Record("x", process.pid, (identify(process.pid) or Record("", 0, 0)).start).alive, 10.0
        )


@pytest.mark.parametrize("outlive", [True, False])
def test_who_outlives_its_owner(folder: Path, outlive: bool) -> None:
    """A bound process ends with a SIGKILLed owner; one that is to outlive it goes on."""
    argv = [sys.executable, "-c", OWNER, str(folder), str(outlive), os.defpath]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        owner.kill()
    record = read(folder / "run" / "sleep.record")
    assert record is not None
    assert until(lambda: not record.alive, 0.5 if outlive else 10.0) is not outlive
    record.send(signal.SIGKILL)


def test_a_record_half_written_is_none(tmp_path: Path) -> None:
    """Empty for a moment, or not there at all."""
    (tmp_path / "x.record").touch()
    assert read(tmp_path / "x.record") is None
    assert read(tmp_path / "y.record") is None
