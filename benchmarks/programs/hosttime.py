"""Room: where the host's time goes inside our own functions, from Python's profiler.

A function's own time counts what it does itself and what it calls outside of the package (torch, builtins). The profiler
makes small functions look dearer than they are; it ranks them.
"""

from __future__ import annotations

import cProfile
import pstats
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

SHOWN = 30
Place = tuple[str, int, str]


class HostTime:
    """Profiles a block of `steps` steps and prints microseconds a step for each of our functions.

    Args:
        steps: steps in the block.
        shown: whether this process prints.
    """

    def __init__(self, steps: int, *, shown: bool) -> None:
        self._steps, self._shown, self._profile = steps, shown, cProfile.Profile()

    def __enter__(self) -> None:
        self._profile.enable()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profile.disable()
        if self._shown and error is None:
            own, calls = _own(pstats.Stats(self._profile))
            for place, seconds in sorted(own.items(), key=lambda item: -item[1])[:SHOWN]:
                print(f"  {seconds / self._steps * 1e6:9.1f} us  {calls[place] / self._steps:6.2f} calls  {_told(place)}")
            print(f"  {sum(own.values()) / self._steps * 1e6:9.1f} us  in all", flush=True)


def _own(stats: pstats.Stats) -> tuple[dict[Place, float], dict[Place, int]]:
    table = stats.stats  # type: ignore[attr-defined]
    own: dict[Place, float] = defaultdict(float)
    calls: dict[Place, int] = {}
    for place, (_, count, inside, _, callers) in table.items():
        if _ours(place):
            own[place] += inside
            calls[place] = count
            continue
        for caller, (_, _, _, whole) in callers.items():
            if _ours(caller):
                own[caller] += whole
    return own, calls


def _ours(place: Place) -> bool:
    return "worldsize" in Path(place[0]).parts or place[0].endswith("steps.py")


def _told(place: Place) -> str:
    return f"{'/'.join(Path(place[0]).parts[-2:])}:{place[1]} {place[2]}"
