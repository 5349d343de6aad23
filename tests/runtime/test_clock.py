"""Where a rank's time goes."""

from __future__ import annotations

import time
from collections import deque

import pytest
import torch
from torch.autograd import Variable

from worldsize.runtime.clock import COLLECTIVES, COMPUTE, DATA, OTHER, PHASES, SAVE, Clock, DeviceClock


def spend(clock: Clock, phase: int, seconds: float) -> None:
    """Be in a phase for so long."""
    clock.enter(phase)
    time.sleep(seconds)
    clock.enter(OTHER)


def test_time_is_that_of_the_phase_one_is_in() -> None:
    """And all phases together are all the time there was."""
    clock, began = Clock(), time.perf_counter()
    clock.start()
    spend(clock, DATA, 0.02)
    spend(clock, COMPUTE, 0.04)
    clock.step()
    whole, spent = time.perf_counter() - began, clock.read()
    assert spent.phases[DATA] >= 0.02
    assert spent.phases[COMPUTE] >= 0.04
    assert sum(spent.phases) == pytest.approx(whole, abs=0.01)


def test_a_step_is_longer_than_its_own_work() -> None:
    """By the waiting for others; a save belongs to neither."""
    clock = Clock()
    clock.start()
    spend(clock, COMPUTE, 0.02)
    spend(clock, COLLECTIVES, 0.03)
    spend(clock, SAVE, 0.05)
    clock.step()
    spent = clock.read()
    assert spent.steps[0] - spent.own[0] == pytest.approx(spent.phases[COLLECTIVES])
    assert spent.steps[0] == pytest.approx(sum(spent.phases) - spent.phases[SAVE])


def test_what_comes_before_the_first_step_is_no_ones() -> None:
    """Nor is what was read already."""
    clock = Clock()
    spend(clock, DATA, 0.02)
    clock.start()
    clock.step()
    assert clock.read().phases[DATA] == 0.0
    assert clock.read().steps == []


class Late(torch.nn.Module):
    """Waits after the last gradient, as a wrapper that exchanges them does."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = torch.nn.Parameter(torch.ones(3)), seconds
        self.weight.register_hook(self._queue)

    def _queue(self, _gradient: torch.Tensor) -> None:
        Variable._execution_engine.queue_callback(lambda: time.sleep(self.seconds))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A product."""
        return x * self.weight


def test_waiting_for_gradients_to_be_exchanged_is_told_from_making_them() -> None:
    """The end of a backward pass, after the last gradient."""
    clock, model = Clock(), Late(0.05)
    clock.start()
    clock.enter(COMPUTE)
    losses = model(torch.ones(3))
    clock.backward(losses)
    losses.sum().backward()
    clock.sent()
    clock.step()
    spent = clock.read()
    assert spent.phases[COLLECTIVES] >= 0.05
    assert clock.phase == COMPUTE


def test_of_many_backward_passes_some_are_looked_at() -> None:
    """A twentieth of a second apart; the others are taken to be like these."""
    clock, model = Clock(), Late(0.01)
    clock.start()
    for _ in range(20):
        clock.enter(COMPUTE)
        losses = model(torch.ones(3))
        clock.backward(losses)
        losses.sum().backward()
        clock.sent()
        clock.step()
    spent = clock.read()
    assert spent.phases[COLLECTIVES] >= 0.2
    assert sum(spent.own) == pytest.approx(sum(spent.steps) - spent.phases[COLLECTIVES], abs=0.05)


def test_a_backward_pass_that_comes_later_is_not_told() -> None:
    """A pipeline notes losses, and sends them when it will."""
    clock = Clock()
    losses = torch.ones(3, requires_grad=True) * 2
    clock.backward(losses)
    clock.sent()
    losses.sum().backward()
    assert clock.phase == COMPUTE


class Device:
    """A stream of events that a device passes when it is told to, a millisecond for each."""

    def __init__(self) -> None:
        self.waiting: deque[Event] = deque()
        self.now = 0.0

    def event(self) -> Event:
        """A new one."""
        return Event(self)

    def run(self, count: int | None = None) -> None:
        """Pass so many events, or all."""
        for _ in range(len(self.waiting) if count is None else count):
            self.now += 1.0
            self.waiting.popleft().passed = self.now


class Event:
    """As torch's."""

    def __init__(self, device: Device) -> None:
        self.device, self.passed = device, 0.0

    def record(self) -> None:
        """Put it into the stream."""
        self.passed = 0.0
        self.device.waiting.append(self)

    def query(self) -> bool:
        """Whether it was passed."""
        return self.passed > 0

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds between two that were passed."""
        assert self.query()
        assert other.query()
        return other.passed - self.passed


def step(clock: Clock) -> None:
    """One with five events: it begins, data, computing, the rest, it ends."""
    clock.enter(DATA)
    clock.enter(COMPUTE)
    clock.enter(OTHER)
    clock.step()


def test_a_devices_time_is_read_from_its_events() -> None:
    """What it has not passed yet is left for the next time; nothing is waited for."""
    device = Device()
    clock = DeviceClock(device.event)
    clock.start()
    for _ in range(3):
        step(clock)
    assert clock.read().steps == []
    device.run(11)  # two steps, and the first mark of the third
    spent = clock.read()
    assert spent.steps == pytest.approx([4e-3, 4e-3])
    assert spent.phases[DATA] == pytest.approx(2e-3)
    assert spent.phases[COMPUTE] == pytest.approx(2e-3)
    device.run()
    assert clock.read().steps == pytest.approx([4e-3])


def test_of_many_steps_a_second_some_are_timed_for_all() -> None:
    """So that events do not cost what they measure."""
    device = Device()
    clock = DeviceClock(device.event)
    clock.start()
    for _ in range(1000):
        step(clock)
    device.run()
    assert len(clock.read().steps) == 1000
    for _ in range(1000):
        step(clock)
    device.run()
    spent = clock.read()
    assert 1 <= len(spent.steps) < 200
    assert spent.count == pytest.approx(1000, abs=1000 / len(spent.steps))
    assert spent.phases[COMPUTE] == pytest.approx(spent.count * 1e-3)
    assert len(spent.phases) == len(PHASES)
