"""Room: how fast a training is: tokens a second, and the share of what the devices could compute at most (MFU).

MFU is `Shape.flops` times tokens a second over the dense bf16 peak of all devices, as torchtitan and Chowdhery et al. (2022)
count it. Padding counts as tokens here: it is computed.
"""

from __future__ import annotations

import resource
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worldsize.runtime.comm import Comm

PEAKS = {
    "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
    "A100": 312e12, "L40S": 362e12, "MI300X": 1307e12, "MI250X": 191.5e12,
}  # fmt: skip
"""Dense bf16 FLOP/s by a part of the device's name, from the vendors' data sheets; the first that fits counts."""


def peak(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a device; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAKS.items() if part in name), None)


class Meter:
    """Speed between two looks.

    Args:
        flops: operations a token.
        ranks: how many devices work.
        device: this rank's.
    """

    def __init__(self, flops: float, ranks: int, device: torch.device) -> None:
        self._flops, self._ranks, self._device, self._peak = flops, ranks, device, peak(device)
        self._tokens, self._since = 0.0, time.perf_counter()

    def add(self, tokens: float) -> None:
        """A step's tokens, over all ranks."""
        self._tokens += tokens

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done within is no training: its time does not count."""
        self._wait()
        began = time.perf_counter()
        yield
        self._wait()
        self._since += time.perf_counter() - began

    def read(self, comm: Comm) -> dict[str, float]:
        """Since the last look; waits for what the device has been given. Collective.

        Memory is the most that one rank has had, of its host's where it computes there.
        """
        self._wait()
        now = time.perf_counter()
        speed = self._tokens / (now - self._since) / self._ranks
        self._tokens, self._since = 0.0, now
        found = {"tokens_per_second_per_device": speed}
        if self._peak:
            found["mfu"] = speed * self._flops / self._peak
        cuda = self._device.type == "cuda"
        most = torch.cuda.max_memory_allocated(self._device) if cuda else _most_of_the_host()
        return {**found, "memory_gb": comm.max([most / 1e9])[0]}

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _most_of_the_host() -> int:
    """The most that this process had in memory: bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
