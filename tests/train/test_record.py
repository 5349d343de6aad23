"""The lines of steps: in their order, whole, and without waiting for a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from worldsize.runtime.comm import Alone
from worldsize.train.arriving import Arrivals
from worldsize.train.record import StepRecorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Log:
    """Takes lines, as a tracker and as a display."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log(self, index: int, row: dict[str, float]) -> None:
        """A line."""
        self.lines.append((index, row))

    def show(self, index: int, row: dict[str, float]) -> None:
        """The same line."""
        assert self.lines[-1] == (index, row)


@dataclass
class Late:
    """Numbers of a device that has come so far: `done` steps."""

    number: int
    device: dict[str, int]
    waited: list[int]

    @property
    def there(self) -> bool:
        """Whether it has."""
        return self.number < self.device["done"]

    def read(self) -> list[float]:
        """Notes where the host would have waited."""
        if not self.there:
            self.waited.append(self.number)
        return [float(self.number)]


@dataclass
class Device:
    """Sends numbers as they are computed."""

    state: dict[str, int] = field(default_factory=lambda: {"done": 0})
    waited: list[int] = field(default_factory=list)
    sent: int = 0

    def send(self, numbers: Sequence[Tensor]) -> Late:
        """One more step."""
        assert len(numbers) == 1
        self.sent += 1
        return Late(self.sent - 1, self.state, self.waited)


@dataclass
class Made:
    """A step that was made."""

    index: int
    epoch: int = 0
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    grad_norm: Tensor | None = None
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)


def recorder() -> tuple[StepRecorder, Device, Log]:
    """With four steps taken, of which the device has made two."""
    log, device = Log(), Device()
    made = StepRecorder(cast("Any", log), cast("Any", log))
    made._arrivals = cast("Any", device)
    for index in range(4):
        made.take(cast("Any", Made(index)), 8 * index, [])
    device.state["done"] = 2
    return made, device, log


def test_a_line_a_second_waits_for_nothing() -> None:
    """What has arrived is written, the rest with the next lines."""
    made, device, log = recorder()
    made.flush(None)
    assert [index for index, _ in log.lines] == [0, 1]
    device.state["done"] = 4
    made.flush(None)
    assert [(index, row["loss"]) for index, row in log.lines] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]
    assert log.lines[2][1] == {"epoch": 0, "samples": 16, "loss": 2.0}
    assert not device.waited


def test_a_second_passes_between_two_times_that_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is written in between; what has arrived by then needs no other rank."""
    made, _, log = recorder()
    now = 100.0
    monkeypatch.setattr("worldsize.train.record.time.monotonic", lambda: now)
    assert (made.due(), made.due()) == (True, False)
    assert [index for index, _ in log.lines] == [0, 1]
    made.flush(None)
    now = 101.0
    assert made.due()


def test_what_is_summed_later_than_its_line_was_written_is_not_lost() -> None:
    """It has a line of its own; where this rank knows of it, the line waits."""
    made, device, log = recorder()
    device.state["done"] = 5
    made.take(cast("Any", Made(4, sums={"score": (6.0, 2.0)})), 32, [])
    assert made.due()
    assert not log.lines
    made.flush(Alone())
    assert [row.get("score") for _, row in log.lines] == [None, None, None, None, 3.0]
    made._sums["late"] = (1.0, 4.0)
    made.flush(Alone())
    assert log.lines[-1] == (4, {"late": 0.25})


def test_before_what_a_program_logs_all_is_written() -> None:
    """So that steps are in order, though the host waits."""
    made, device, log = recorder()
    made.write()
    assert [index for index, _ in log.lines] == [0, 1, 2, 3]
    assert device.waited == [2, 3]


def test_numbers_of_the_host_are_there_at_once() -> None:
    """As they were when they were sent."""
    found = Arrivals().send([torch.tensor(0.25), torch.tensor(3.0, dtype=torch.float64)])
    assert found.there
    assert found.read() == [0.25, 3.0]


@pytest.mark.gpu(count=1)
def test_numbers_of_a_device_arrive_while_it_works_on() -> None:
    """They are those of when they were sent; places are used again."""
    arrivals, number = Arrivals(), torch.ones((), device="cuda")
    first = arrivals.send([number])
    torch.cuda._sleep(1_000_000_000)
    number.fill_(2.0)
    second = arrivals.send([number])
    assert first.read() == [1.0]
    assert not second.there
    assert second.read() == [2.0]
    assert arrivals.send([number]).read() == [2.0]
    assert len(arrivals._free[1]) == 2
