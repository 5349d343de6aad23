"""Room: `worldsize checkpoint ls`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from worldsize.checkpoint import listing
from worldsize.cli.checkpoint import words
from worldsize.cli.table import table
from worldsize.tools.report.words import size

if TYPE_CHECKING:
    from collections.abc import Iterator


EXAMPLES = """\
\b
worldsize checkpoint ls runs/digits
worldsize checkpoint ls runs/digits --json | jq '.checkpoints[-1].step'
"""


@click.command("ls", epilog=EXAMPLES)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def command(run: Path, *, as_json: bool) -> None:
    """List the committed checkpoints of a RUN folder, oldest first; then what lies there and is none, and why."""
    found = listing.look(run)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=1))
        return
    for line in _lines(found):
        click.echo(line)


def _lines(found: listing.Listing) -> Iterator[str]:
    head = ["step", "epochs", "samples", "size", "committed", "attempt", "layout", ""]
    rows = [_row(entry, found.best, newest=entry is found.entries[-1]) for entry in found.entries]
    if rows:
        yield from table([head, *rows], "rrrrlrll")
    else:
        yield f"no committed checkpoint in {found.run}"
    if found.others:
        yield "no checkpoints:"
        yield from (f"  {line}" for line in table([[name, why] for name, why in found.others.items()], "ll"))


def _row(entry: Any, best: set[int], *, newest: bool) -> list[str]:
    marks = [word for word, holds in (("newest", newest), ("best", entry.step in best)) if holds]
    marks += [f"not exact: {entry.exact}"] if entry.exact is not True else []
    numbers = [f"{entry.step:,}", f"{entry.epoch:,}", f"{entry.samples:,}", size(entry.bytes)]
    moment = words.when(entry.created)
    return [*numbers, moment, str(entry.attempt), words.layout(entry.layout), ", ".join(marks)]
