"""Room: `worldsize checkpoint verify`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from worldsize.checkpoint import address, manifest, pieces
from worldsize.tools.report.words import size

if TYPE_CHECKING:
    from pathlib import Path


EXAMPLES = """\
\b
worldsize checkpoint verify runs/digits
worldsize checkpoint verify runs/digits@1200
"""


@click.command("verify", epilog=EXAMPLES)
@click.argument("checkpoint")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def command(checkpoint: str, *, as_json: bool) -> None:
    """Read every file of a CHECKPOINT, or of all those of a run folder.

    Sizes and digests must be those of the manifest, and the pieces of every tensor make up the whole of it. Exit code 1
    where anything is wrong, with the names of what is damaged.
    """
    found = {path: problems(path) for path in address.every(checkpoint)}
    if as_json:
        click.echo(json.dumps([{"path": str(path), "problems": wrong} for path, wrong in found.items()], indent=1))
    else:
        for path, wrong in found.items():
            click.echo(f"{path.name}  {'DAMAGED' if wrong else _good(path)}")
            for problem in wrong:
                click.echo(f"    {problem}")
    sys.exit(1 if any(found.values()) else 0)


def problems(path: Path) -> list[str]:
    """What is wrong with a checkpoint; of one whose files are damaged, the tensors are not looked at."""
    return manifest.verify(path) or pieces.incomplete(path)


def _good(path: Path) -> str:
    said = manifest.read(path)
    return f"ok: {len(pieces.tensors(path)):,} tensors, {len(said.files):,} files, {size(said.bytes)}"
