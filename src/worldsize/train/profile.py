"""Room: a look at a few steps with torch's profiler: a trace of each rank, and one page that says what stands out."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from worldsize.config import Window
from worldsize.runtime.comm import on_one

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from worldsize.runtime.comm import Comm

FOLDER, SUMMARY = "profiles", "summary.txt"
_COLLECTIVE = re.compile(
    r"nccl|gloo:|c10d::|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|barrier|record_param_comms",
    re.IGNORECASE,
)
_WAITS = re.compile(r"poll|ProfilerStep|^aten::empty$")
_SHOWN = 20
_US = 1e6


class NoProfile:
    """Of a run that was not asked for one."""

    def begin(self, step: int) -> None:
        """Nothing."""

    def end(self, step: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Profile(NoProfile):
    """Traces the steps of a window, once.

    Args:
        window: which steps.
        folder: where traces and summary go, one folder an attempt.
        comm: the agreement between all ranks: the summary is over all of them.
        device: this rank's.
        say: prints the summary; does nothing on all ranks but one.
    """

    def __init__(
        self, window: Window, folder: Path, comm: Comm, device: torch.device, say: Callable[[str], None]
    ) -> None:
        self._window, self._folder, self._comm, self._device, self._say = window, folder, comm, device, say
        self._profiler: Any = None
        self._first = 0

    def begin(self, step: int) -> None:
        """A step is about to be made."""
        if self._profiler is None and step in self._window:
            from torch.profiler import ProfilerActivity, profile

            kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self._device.type == "cuda")
            self._profiler, self._first = profile(activities=kinds, acc_events=True), step
            self._profiler.start()

    def end(self, step: int) -> None:
        """It was made. After the last of the window all ranks write. Collective then."""
        if self._profiler is not None and step + 1 not in self._window:
            self._write(step)

    def close(self) -> None:
        """The run ends: a window that was not reached whole leaves nothing."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler, self._window = None, Window(0, 0)

    def _write(self, last: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        profiler = self._profiler
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._folder / f"rank-{self._comm.rank:04d}.json.gz"))
        ranks = self._comm.gather(shares(profiler.events()))
        text = page(self._first, last, ranks, operators(profiler.key_averages()))
        on_one(self._comm, lambda: (self._folder / SUMMARY).write_text(text, encoding="utf-8"), None)
        self._say(f"{text}traces: {self._folder}")


def shares(events: Iterable[Any]) -> tuple[float, float, float]:
    """Seconds from the first event to the last; of them, with a collective under way; and with nothing under way."""
    on_device = [event for event in events if "CUDA" in str(event.device_type)]
    seen = on_device or [event for event in events if not _WAITS.search(event.name)]
    spans = [(event.time_range.start, event.time_range.end) for event in seen]
    if not spans:
        return 0.0, 0.0, 0.0
    every = [(event.time_range.start, event.time_range.end) for event in events]
    whole = max(end for _, end in every) - min(start for start, _ in every)
    together = [span for span, event in zip(spans, seen, strict=True) if _COLLECTIVE.search(event.name)]
    return whole / _US, covered(together) / _US, max(0.0, whole - covered(spans)) / _US


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length that intervals cover together."""
    length, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, until))
        until = max(until, end)
    return length


def operators(averages: Iterable[Any]) -> list[tuple[float, int, str]]:
    """(seconds of its own, calls, name) of each operator, the longest first: of the device, where it was at work."""
    found = [(each.self_device_time_total, each.self_cpu_time_total, each.count, each.key) for each in averages]
    device = any(seconds > 0 for seconds, _, _, _ in found)
    rows = [((mine if device else host) / _US, calls, name) for mine, host, calls, name in found]
    return sorted((row for row in rows if row[0] > 0), reverse=True)


def page(first: int, last: int, ranks: list[tuple[float, float, float]], rows: list[tuple[float, int, str]]) -> str:
    """The summary."""
    count = last - first + 1
    lines = [
        f"worldsize: profile of steps {first} to {last} on {len(ranks)} ranks",
        "",
        "  rank     a step  collectives   idle",
    ]
    for rank, (whole, together, idle) in enumerate(ranks):
        part = [f"{each / whole:.1%}" if whole else "-" for each in (together, idle)]
        lines.append(f"  {rank:<5}{whole / count * 1e3:>8.2f} ms{part[0]:>13}{part[1]:>7}")
    every = sum(seconds for seconds, _, _ in rows) or 1.0
    lines += ["", "  self time  share     calls  operator (rank 0)"]
    for seconds, calls, name in rows[:_SHOWN]:
        lines.append(f"  {seconds * 1e3:>6.2f} ms{seconds / every:>7.1%}{calls:>10}  {name[:80]}")
    return "\n".join(lines) + "\n"
