"""Room: looking on until a run ends: redrawn on a terminal, lines where nobody looks."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from worldsize.errors import EXIT_FAILED, EXIT_STOPPED
from worldsize.tools.report.reading import check
from worldsize.tools.watch import view
from worldsize.tools.watch.follow import Follow

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rich.console import Console
    from rich.text import Text

    from worldsize.tools.report.reading import RunFacts

_LINE_S, _PATIENCE_S = 10.0, 5.0
_CODES = {"finished": 0, "stopped": EXIT_STOPPED, "failed": EXIT_FAILED, "lost": EXIT_FAILED}


def watch(folder: Path, *, every: float, once: bool) -> int:
    """Show the run until it has ended.

    Args:
        folder: its folder.
        every: seconds between two looks.
        once: show it as it is, and no more.

    Returns:
        0 where it finished or `once`, 75 where it stopped on request, 1 where it failed.

    Raises:
        ConfigError: this is no run folder, or nothing has begun in it.
    """
    from rich.console import Console

    check(folder)
    follow, console = Follow(folder), Console(highlight=False)
    if once:
        console.print(_text(follow.look(), console.width), soft_wrap=True)
        return 0
    return _live(follow, console, every) if console.is_terminal else _lines(follow, every)


def _live(follow: Follow, console: Console, every: float) -> int:
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as live:
        return _until_the_end(follow, every, lambda run: live.update(_text(run, console.width), refresh=True))


def _lines(follow: Follow, every: float) -> int:
    next_line, told = 0.0, ""

    def show(run: RunFacts) -> None:
        nonlocal next_line, told
        news = f"{run.last.number} {run.last.how} {len([row for row in run.events if row['event'] == 'failure'])}"
        if time.monotonic() < next_line and news == told:
            return
        next_line, told = time.monotonic() + _LINE_S, news
        print(view.line(run), file=sys.stdout, flush=True)  # noqa: T201 - this is what was asked for

    return _until_the_end(follow, every, show)


def _until_the_end(follow: Follow, every: float, show: Callable[[RunFacts], None]) -> int:
    ended: float | None = None
    while True:
        run = follow.look()
        show(run)
        if run.last.how in ("finished", "stopped"):
            return _CODES[run.last.how]
        ended = None if run.last.how == "running" else ended or time.monotonic()
        # A launcher that starts a failed run again needs a moment.
        if ended is not None and time.monotonic() > ended + _wait(run):
            return _CODES[run.last.how]
        time.sleep(every)


def _wait(run: RunFacts) -> float:
    last = [row for row in run.events if row["event"] == "failure" and row["attempt"] == run.last.number]
    return 120.0 if last and last[-1].get("again") else _PATIENCE_S


def _text(run: RunFacts, width: int) -> Text:
    from rich.text import Text

    return Text("\n").join(Text.assemble(*parts) for parts in view.lines(run, width))
