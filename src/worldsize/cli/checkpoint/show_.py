"""Room: `worldsize checkpoint show`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from worldsize.checkpoint import address, contents
from worldsize.cli.checkpoint import words
from worldsize.cli.table import table
from worldsize.tools.report.words import size

if TYPE_CHECKING:
    from collections.abc import Iterator


EXAMPLES = """\
\b
worldsize checkpoint show runs/digits
worldsize checkpoint show runs/digits@1200 --tensors
"""


@click.command("show", epilog=EXAMPLES)
@click.argument("checkpoint")
@click.option("--tensors", is_flag=True, help="A line for each tensor: dtype, size, pieces, shape.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def command(checkpoint: str, *, tensors: bool, as_json: bool) -> None:
    """Show what is in a CHECKPOINT: where the training stood, what wrote it, tensors and hyperparameters."""
    found = contents.look(address.find(checkpoint))
    if as_json:
        click.echo(json.dumps(found.to_json(tensors=tensors), indent=1))
        return
    rows = [[name, str(value)] for name, value in _rows(found).items()]
    for line in [*table(rows, "ll"), *(_tensors(found) if tensors else ())]:
        click.echo(line)


def _rows(found: contents.Contents) -> dict[str, Any]:
    said = found.manifest
    rows: dict[str, Any] = {
        "path": found.path,
        "step": f"{said.step:,}",
        "epochs finished": f"{said.epoch:,}",
        "samples seen": f"{said.samples:,}",
        "best": "yes" if found.best else "no",
        "exact": "yes" if said.exact is True else f"no: {said.exact}",
        "layout": ", ".join(filter(None, (words.layout(said.layout), str(said.layout.get("precision", ""))))),
        "committed": f"{words.when(said.created)} by attempt {said.attempt}",
        "written by": f"worldsize {said.version}, format {said.format}",
        "size": f"{size(said.bytes)} in {len(said.files)} files",
    }
    rows |= {
        name: f"{count.tensors:,} tensors, {count.values:,} values, {size(count.bytes)}"
        for name, count in found.parts.items()
    }
    rows |= {"tied": ", ".join(f"{name} = {first}" for name, first in said.aliases.items())} if said.aliases else {}
    for name, groups in found.optimizers.items():
        for number, group in enumerate(groups):
            label = f"optimizer {name}" + (f", group {number}" if len(groups) > 1 else "")
            rows[label] = ", ".join(f"{key}={value}" for key, value in group.items())
    return rows | {f"kept {name}": value for name, value in found.kept.items()}


def _tensors(found: contents.Contents) -> Iterator[str]:
    head = ["dtype", "size", "pieces", "shape", "tensor"]
    rows = [
        [saved.dtype, size(saved.bytes), str(len(saved.pieces)), str(list(saved.shape)), name]
        for name, saved in found.tensors.items()
    ]
    yield ""
    yield from table([head, *rows], "lrrll")
