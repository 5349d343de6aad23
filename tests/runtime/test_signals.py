"""A stop that is asked for before there is a Run."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.launch.commands import STARTED, finish, script, start, until
from worldsize.checkpoint import manifest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.launch.commands import Ended

UP = "open(sys.argv[1] + '/up' + os.environ['RANK'], 'w').close()\n"
OURS = """
import worldsize as ws, torch
def train(before_run):
    Run = ws.Run
    exec(before_run)
    run = Run(sys.argv[1] + "/run", global_batch=4, micro_batch=2, duration="2ep", device="cpu")
    model = run.model(lambda: torch.nn.Linear(1, 1))
    run.optimizer(lambda m: torch.optim.SGD(m.parameters(), 0.1), model)
    for step in run.steps(torch.utils.data.TensorDataset(torch.ones(8, 1))):
        for (x,) in step.micro_batches: step.backward(model(x)[:, 0])
        step.update()
"""


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.communicate()


def stopped(folder: Path, text: str, number: int = signal.SIGTERM, rest: float = 0.0) -> Ended:
    """How two ranks of a program end that are asked to stop so many seconds after both have come up."""
    process = start("-n", "2", "--grace", "20s", script(folder, text), folder)
    until(lambda: all((folder / f"up{rank}").exists() for rank in range(2)), 60)
    time.sleep(rest)
    process.send_signal(number)
    return finish(process)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_program_that_is_about_to_make_a_run_leaves_with_75(tmp_path: Path, name: str) -> None:
    """B041: naming ws.Run is enough; while data is prepared nothing can be lost, and the code says 'start me again'."""
    text = f"import worldsize as ws\nws.Run\n{UP}time.sleep(600)"
    ended = stopped(tmp_path, text, getattr(signal, name))
    assert (ended.code, ended.took < 15) == (75, True)


def test_a_stop_while_the_ranks_meet_ends_all_of_them(tmp_path: Path) -> None:
    """B041: rank 0 waits for the others in native code, and rank 1 would not come: neither is waited for, nor killed."""
    text = OURS + f"train({UP!r} + 'time.sleep(600 * int(os.environ[\"RANK\"]))')"
    ended = stopped(tmp_path, text, rest=3.0)
    assert (ended.code, ended.took < 15) == (75, True)
    assert ended.err.splitlines()[-1].startswith("worldsize: stopped on request")


def test_what_was_committed_before_stays(tmp_path: Path) -> None:
    """A start that is stopped before its first step neither loses nor adds a checkpoint; the next one has it."""
    assert finish(start("-n", "2", script(tmp_path, OURS + "train('')"), tmp_path), 120).code == 0
    before = manifest.committed(tmp_path / "run")
    assert stopped(tmp_path, OURS + f"train({UP!r} + 'time.sleep(600)')").code == 75
    assert manifest.committed(tmp_path / "run") == before != []
    ended = finish(start(script(tmp_path, OURS + "train('')"), tmp_path), 120)
    assert "nothing to do: finished at step 4" in ended.err


def test_a_program_that_makes_no_run_ends_as_under_torchrun(tmp_path: Path) -> None:
    """To import worldsize, for its reports say, changes nothing about signals."""
    ended = stopped(tmp_path, f"import worldsize as ws\nws.committed('here', 1)\n{UP}time.sleep(600)")
    assert (ended.code, ended.err) == (143, "worldsize: stopped by SIGTERM\n")


def test_a_program_keeps_its_own_handlers(tmp_path: Path) -> None:
    """What it does about SIGTERM goes on being done until it makes a Run."""
    text = f"signal.signal(15, lambda *_: sys.exit(3))\nimport worldsize as ws\nws.Run\n{UP}time.sleep(600)"
    assert stopped(tmp_path, text).code == 3
