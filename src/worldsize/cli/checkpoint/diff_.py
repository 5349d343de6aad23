"""Room: `worldsize checkpoint diff`."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any

import click

from worldsize.checkpoint import address
from worldsize.cli.checkpoint import words
from worldsize.cli.table import table
from worldsize.errors import EXIT_USAGE, WorldsizeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worldsize.checkpoint.difference import Difference
    from worldsize.checkpoint.opened import Opened

_SHOWN = 20


EXAMPLES = """\
\b
worldsize checkpoint diff runs/ddp runs/fsdp --rtol 1e-5 --atol 1e-7
worldsize checkpoint diff runs/digits@1200 runs/digits@1300
"""


@click.command("diff", epilog=EXAMPLES)
@click.argument("a")
@click.argument("b")
@click.option(
    "--rtol", type=click.FloatRange(0), default=0.0, help="Allowed difference, relative to the larger value."
)
@click.option("--atol", type=click.FloatRange(0), default=0.0, help="Allowed difference, absolute.")
@click.option("--all", "every", is_flag=True, help=f"Show every name, not only the first {_SHOWN}.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def command(a: str, b: str, rtol: float, atol: float, *, every: bool, as_json: bool) -> None:
    """Show what differs between checkpoints A and B, whatever layouts wrote them.

    Tensors with their largest differences, names that only one has, progress, hyperparameters and what else the
    training kept. Exit code 0: equal; 1: different; 2: trouble.
    """
    try:
        found = _compare(a, b, rtol, atol)
    except WorldsizeError as error:
        error.exit_code = EXIT_USAGE
        raise
    left, right, difference = found
    if as_json:
        sides = {"a": str(left.path), "b": str(right.path)}
        click.echo(json.dumps(_finite(sides | difference.to_json()), indent=1, default=str))
    else:
        for line in _lines(left, right, difference, None if every else _SHOWN):
            click.echo(line)
    sys.exit(1 if difference else 0)


def _compare(a: str, b: str, rtol: float, atol: float) -> tuple[Opened, Opened, Difference]:
    paths = address.find(a), address.find(b)
    from worldsize.checkpoint import difference
    from worldsize.checkpoint.opened import Opened

    left, right = map(Opened, paths)
    return left, right, difference.compare(left, right, rtol=rtol, atol=atol)


def _lines(a: Opened, b: Opened, found: Difference, most: int | None) -> Iterator[str]:
    for side, opened in (("A", a), ("B", b)):
        yield f"{side}  {opened.path}  ({words.layout(opened.manifest.layout)})"
    if not found:
        yield f"equal: {found.equal} tensors, progress, hyperparameters"
        return
    yield f"{len(found.deltas)} tensors differ, {found.equal} are equal"
    rows = [_row(delta) for delta in found.deltas[:most]]
    if rows:
        yield from _indented([["absolute", "relative", "values", "tensor"], *rows], "rrrl")
        yield from _more(found.deltas, most)
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        if names:
            yield f"{len(names)} tensors are only in {side}"
            yield from (f"  {name}" for name in names[:most])
            yield from _more(names, most)
    if found.plain:
        yield f"{len(found.plain)} values differ"
        yield from _indented([["A", "B", "value"], *([str(x), str(y), at] for at, x, y in found.plain[:most])], "rrl")
        yield from _more(found.plain, most)


def _row(delta: Any) -> list[str]:
    kinds = f"  {delta.kinds[0]} | {delta.kinds[1]}" if delta.kinds else ""
    numbers = ["-" if math.isnan(number) else f"{number:.3g}" for number in (delta.absolute, delta.relative)]
    return [*numbers, f"{delta.values:,}", delta.name + kinds]


def _indented(rows: list[list[str]], right: str) -> Iterator[str]:
    yield from (f"  {line}" for line in table(rows, right))


def _more(items: list[Any], most: int | None) -> Iterator[str]:
    if most is not None and len(items) > most:
        yield f"  and {len(items) - most} more (--all shows them)"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinities: they are texts."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
