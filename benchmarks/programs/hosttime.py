"""Room: where the host's time goes: each moment is charged to the innermost function of ours that is at work.

What a function calls outside of the package (torch, builtins) counts as its own time. Watching makes small functions
look dearer than they are: the table ranks, it does not measure.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import worldsize

if TYPE_CHECKING:
    from types import CodeType, FrameType, TracebackType

SHOWN = 25
_PACKAGE = str(Path(worldsize.__file__).parent)


class HostTime:
    """Watches a block of `steps` steps and prints microseconds a step for each of our functions.

    Args:
        steps: steps in the block.
        shown: whether this process prints.
    """

    def __init__(self, steps: int, *, shown: bool) -> None:
        self._steps, self._shown = steps, shown
        self._time: dict[CodeType | None, float] = defaultdict(float)
        self._calls: dict[CodeType | None, int] = defaultdict(int)
        self._owners: list[CodeType | None] = [None]
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()
        sys.setprofile(self._event)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.setprofile(None)
        self._charge()
        if self._shown and error is None:
            self._print()

    def _event(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self._charge()
            ours = _ours(frame.f_code)
            self._calls[frame.f_code] += ours
            self._owners.append(frame.f_code if ours else self._owners[-1])
            self._since = time.perf_counter()
        elif event == "return" and len(self._owners) > 1:
            self._charge()
            self._owners.pop()
            self._since = time.perf_counter()

    def _charge(self) -> None:
        self._time[self._owners[-1]] += time.perf_counter() - self._since

    def _print(self) -> None:
        for code, seconds in sorted(self._time.items(), key=lambda item: -item[1])[:SHOWN]:
            calls = self._calls[code] / self._steps
            print(f"  {seconds / self._steps * 1e6:9.1f} us  {calls:6.2f} calls  {_told(code)}")
        print(f"  {sum(self._time.values()) / self._steps * 1e6:9.1f} us  in all", flush=True)


def _ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_PACKAGE) or code.co_filename.endswith("programs/steps.py")


def _told(code: CodeType | None) -> str:
    if code is None:
        return "(waiting for the device at the end)"
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_firstlineno} {code.co_qualname}"
