"""Room: what this machine's devices use while trials run: GPUs by nvidia-smi, processors by the kernel's counters (RAPL)."""

from __future__ import annotations

import shutil
import threading
import time
from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING, Self

from worldsize.launch import env, shell

if TYPE_CHECKING:
    from collections.abc import Callable

_ZONES = Path("/sys/class/powercap")
_EVERY_S = 0.5
_ASK = ("nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits")


class Energy:
    """Joules since it was begun, by time; of all devices of this machine, whoever uses them.

    Args:
        watts: reads the power, in W; None where nothing tells.
    """

    def __init__(self, watts: Callable[[], float | None] | None = None) -> None:
        self._watts = watts or _source()
        self._times: list[float] = []
        self._joules: list[float] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self._end.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> float | None:
        """Joules between two times, in seconds since 1970; None where nothing told, or not all the time."""
        if len(self._times) < 2 or begin < self._times[0] or end > self._times[-1] + 2 * _EVERY_S:  # noqa: PLR2004
            return None
        return self._at(end) - self._at(begin)

    def _at(self, when: float) -> float:
        after = min(max(bisect_left(self._times, when), 1), len(self._times) - 1)
        (first, last), (low, high) = self._times[after - 1 : after + 1], self._joules[after - 1 : after + 1]
        return low + (high - low) * (when - first) / (last - first)

    def _measure(self) -> None:
        while True:
            watts, now = self._watts(), time.time()
            if watts is None:
                return
            before = self._joules[-1] + watts * (now - self._times[-1]) if self._times else 0.0
            self._joules.append(before)
            self._times.append(now)
            if self._end.wait(_EVERY_S):
                return


def _source() -> Callable[[], float | None]:
    return _gpus if _gpus() is not None else _Processors()


def _gpus() -> float | None:
    if not shutil.which(_ASK[0]):
        return None
    said = shell.call(_ASK, env.read(), timeout=20)
    try:
        return sum(float(line) for line in said.out.split()) if said.code == 0 and said.out.strip() else None
    except ValueError:  # a card that does not tell
        return None


class _Processors:
    """The mean power since the last look, by the counters of the processors' packages (microjoules, which wrap around)."""

    def __init__(self, zones: Path = _ZONES) -> None:
        self._zones = [zone for zone in sorted(zones.glob("intel-rapl:*")) if zone.name.count(":") == 1]
        self._before: dict[Path, int] = {}
        self._since = time.monotonic()
        self()

    def __call__(self) -> float | None:
        now = time.monotonic()
        try:
            found = {zone: int((zone / "energy_uj").read_text()) for zone in self._zones}
            most = {zone: int((zone / "max_energy_range_uj").read_text()) for zone in self._zones}
        except OSError:
            return None
        if not found:
            return None
        used = sum((found[zone] - self._before.get(zone, found[zone])) % (most[zone] + 1) for zone in found)
        watts = used / 1e6 / max(now - self._since, 1e-9)
        self._before, self._since = found, now
        return watts
