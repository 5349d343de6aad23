"""Room: `worldsize checkpoint`: look at checkpoints, verify them, and bring weights in from elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from worldsize.checkpoint import manifest
from worldsize.errors import CheckpointError

if TYPE_CHECKING:
    from worldsize.checkpoint.manifest import Manifest


@click.group()
def command() -> None:
    """Look at the checkpoints of a run, verify them, import weights."""


@command.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
def ls(run: Path) -> None:
    """List the committed checkpoints of a RUN folder, oldest first."""
    from worldsize.checkpoint import retain

    paths, best = manifest.committed(run), retain.best_steps(run)
    for path in paths:
        try:
            click.echo(_line(path, manifest.read(path), best))
        except CheckpointError as error:
            click.echo(f"{path.name}  UNREADABLE: {error}")
    if not paths:
        click.echo(f"no committed checkpoint in {run}")


@command.command()
@click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))
def show(path: Path) -> None:
    """Show what a checkpoint says of itself (of a run folder: its newest)."""
    path = _checkpoints(path)[-1]
    found = manifest.read(path)
    rows = {
        "path": path,
        "step": f"{found.step:,}",
        "epochs finished": f"{found.epoch:,}",
        "samples seen": f"{found.samples:,}",
        "size": f"{found.bytes:,} bytes in {len(found.files)} files",
        "committed": found.created,
        "attempt": found.attempt,
        "layout": json.dumps(found.layout, sort_keys=True),
        "exact": found.exact,
        "written by": f"worldsize {found.version}, format {found.format}",
    } | found.extra
    width = max(map(len, rows))
    for name, value in rows.items():
        click.echo(f"{name:<{width}}  {value}")


@command.command()
@click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))
def verify(path: Path) -> None:
    """Read every file of a checkpoint, or of all those of a run folder, and compare with its manifest.

    Exit code 1 where anything is wrong.
    """
    bad = 0
    for checkpoint in _checkpoints(path):
        problems = manifest.verify(checkpoint)
        bad += bool(problems)
        click.echo(f"{checkpoint.name}  {'DAMAGED' if problems else 'ok'}")
        for problem in problems:
            click.echo(f"    {problem}")
    sys.exit(1 if bad else 0)


@command.command("import")
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Path(path_type=Path),
    help="A run folder, or a .safetensors or .pt file.",
)
@click.option("--prefix", help="Take only the names that begin with this, and take it off.")
@click.option("--trust", is_flag=True, help="Allow unpickling SOURCE, which can run any code that it brings.")
def import_(source: Path, target: Path, prefix: str | None, *, trust: bool) -> None:
    """Bring the weights of SOURCE in for a warm start.

    SOURCE is a checkpoint or run folder of worldsize, a torch or safetensors file, a Lightning checkpoint, or a
    folder of accelerate or transformers.
    """
    from worldsize.checkpoint.weights import read_weights, write_weights

    weights = read_weights(source, prefix=prefix, trust=trust)
    file = write_weights(weights, target)
    total = sum(tensor.numel() for tensor in weights.values())
    click.echo(f"{len(weights)} tensors, {total:,} values -> {file}")


def _checkpoints(path: Path) -> list[Path]:
    if (path / manifest.MANIFEST).is_file():
        return [path]
    if found := manifest.committed(path):
        return found
    raise CheckpointError(
        f"{path} is no committed checkpoint and no run folder with one", do="see worldsize checkpoint ls"
    )


def _line(path: Path, found: Manifest, best: set[int]) -> str:
    star = "  best" if found.step in best else ""
    layout = found.layout.get("strategy", "")
    size = f"{found.bytes:>15,} bytes"
    return f"{path.name}  epoch {found.epoch}  {size}  {found.created}  attempt {found.attempt}  {layout}{star}"
