"""Room: `worldsize verify`: prints what the proofs of `tools` found, and fails on the first difference."""

from __future__ import annotations

import shutil
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from worldsize.config import Duration
from worldsize.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from worldsize.tools.trial import Layout, Program
    from worldsize.tools.verify import Row


@click.group()
def command() -> None:
    """Prove on your own program that it resumes exactly, and that every layout trains the same curve."""


def _shared(function: Callable[..., None]) -> Callable[..., None]:
    options = (
        click.option(
            "--layouts",
            default="single,ddp:2",
            show_default=True,
            help="Strategies and ranks, the first is the measure.",
        ),
        click.option(
            "--precision",
            default="fp64",
            show_default=True,
            help="fp64 tells wrong logic from rounding; '' keeps yours.",
        ),
        click.option("--duration", help="Instead of the program's own: 40st, 2ep."),
        click.option("--tolerance", type=float, help="Largest relative difference; 1e-10 in fp64, else 1e-5."),
        click.option("--keep", type=click.Path(path_type=Path), help="Keep the trials in this folder."),
        click.argument("script", type=click.Path(exists=True, dir_okay=False)),
        click.argument("args", nargs=-1, type=click.UNPROCESSED),
    )
    for option in reversed(options):
        function = option(function)
    return function


@command.command()
@_shared
@click.option("--at", help="Interrupt after these steps: 3,17,40. Chosen where not given.")
@click.option("--points", default=3, show_default=True, help="How many interruptions are chosen.")
def resume(script: str, args: tuple[str, ...], at: str | None, points: int, **options: str) -> None:
    """Run SCRIPT straight and interrupted; compare losses, sample ids, learning rates and final weights.

    What follows a `--` is the program's. The first of --layouts runs straight and up to each interruption; every one
    of them resumes.
    """
    from worldsize.tools import verify

    stops = [int(step) for step in at.split(",")] if at else None
    _compare(
        script, args, options, lambda *given: verify.resume(*given[:2], at=stops, points=points, tolerance=given[2])
    )


@command.command()
@_shared
def parity(script: str, args: tuple[str, ...], **options: str) -> None:
    """Run SCRIPT on every one of --layouts and compare the curves with the first.

    What follows a `--` is the program's.
    """
    from worldsize.tools import verify

    _compare(script, args, options, lambda *given: verify.parity(*given[:2], tolerance=given[2]))


@command.command()
@_shared
@click.option("--at", type=int, help="Stop the writers after this step. Chosen where not given.")
@click.option("--writers", help="Only what these layouts write; every one of --layouts where not given.")
def matrix(script: str, args: tuple[str, ...], at: int | None, writers: str | None, **options: str) -> None:
    """Stop SCRIPT on every layout and resume it on every layout; print the table of all pairs, in Markdown.

    What follows a `--` is the program's. The first of --layouts also runs straight: it is the measure.
    """
    from worldsize.tools import verify

    write = _layouts(writers or options["layouts"])
    read = _layouts(options["layouts"])
    tolerance, program = _program(script, args, options)
    rows = verify.matrix(program, read, at=at, writers=write, tolerance=tolerance)
    _end(program, options["keep"], _grid(rows, write, read, tolerance))


@command.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--steps", default="0:10", show_default=True, help="First and past-the-last step.")
@click.option(
    "--delivered", type=click.Path(exists=True, path_type=Path), help="Audit what WORLDSIZE_LEDGER noted there."
)
def ledger(run: Path, steps: str, delivered: Path | None) -> None:
    """Print which samples each step of a RUN sees, from its order alone; or audit what was delivered."""
    from worldsize.tools import audit

    if delivered is not None:
        count, problems = audit.audit(run, delivered)
        for problem in problems:
            click.echo(problem)
        click.echo(f"{count} steps audited, {len(problems)} differ from the order")
        sys.exit(1 if problems or not count else 0)
    first, _, stop = steps.partition(":")
    if not (first.isdigit() and stop.isdigit()):
        raise ConfigError(f"--steps {steps!r}", do="write first:stop, like 10:20")
    for step, epoch, ids in audit.planned(run, int(first), int(stop)):
        click.echo(f"step {step}  epoch {epoch}  {' '.join(map(str, ids))}")


def _compare(
    script: str, args: tuple[str, ...], options: dict[str, str], proof: Callable[..., Iterable[Row]]
) -> None:
    tolerance, program = _program(script, args, options)
    _end(program, options["keep"], _table(proof(program, _layouts(options["layouts"]), tolerance), tolerance))


def _program(script: str, args: tuple[str, ...], options: dict[str, str]) -> tuple[float, Program]:
    from worldsize.tools.trial import Program

    precision = options["precision"] or None
    tolerance = float(options["tolerance"] or (1e-10 if precision == "fp64" else 1e-5))
    duration = Duration.parse(options["duration"]) if options["duration"] else None
    folder = Path(options["keep"] or tempfile.mkdtemp(prefix="worldsize-verify-")).resolve()
    return tolerance, Program(script, args, folder, precision, duration)


def _layouts(text: str) -> list[Layout]:
    from worldsize.tools.trial import Layout

    return [Layout.parse(each) for each in text.split(",")]


def _end(program: Program, keep: str, differs: int) -> None:
    # A proof that failed leaves its trials behind: their logs and curves are what one looks at next.
    if not keep and not differs:
        shutil.rmtree(program.folder)
    sys.exit(1 if differs else 0)


def _grid(rows: Iterable[Row], write: Sequence[Layout], read: Sequence[Layout], tolerance: float) -> int:
    """A line for each writer, a column for each reader: the largest relative difference; returns how many differ."""
    numbers = {str(layout): str(number) for number, layout in enumerate(read, 1)}
    click.echo(f"| wrote | {' | '.join(numbers.values())} |")
    click.echo(f"|---|{'---|' * len(read)}")
    told = iter(rows)
    wrong, worst = [], 0.0
    for writer in write:
        cells = list(islice(told, len(read)))
        apart = [max(row.largest.values()) for row in cells]
        worst = max(worst, *apart)
        wrong += [row for row in cells if row.first is not None]
        values = [
            "differs" if row.first else f"{value:.0e}" if value else "0"
            for row, value in zip(cells, apart, strict=True)
        ]
        click.echo(f"| {numbers.get(str(writer), '')} `{writer}` | {' | '.join(values)} |")
    for row in wrong:
        click.echo(f"{row.name}: {row.first}")
    pairs = len(write) * len(read)
    verdict = f"{len(wrong)} of {pairs} differ" if wrong else f"all {pairs} agree"
    click.echo(f"\n{verdict}; the largest relative difference is {worst:.1e} (allowed: {tolerance:g})")
    return len(wrong)


def _table(rows: Iterable[Row], tolerance: float) -> int:
    """Print row by row as they come; returns how many differ."""
    names = ("loss", "lr", "grad_norm", "weights")
    click.echo(f"{'':<40} {'steps':>6} " + " ".join(f"{name:>10}" for name in names))
    count = differs = 0
    for row in rows:
        count += 1
        numbers = " ".join(f"{row.largest[name]:>10.2g}" if name in row.largest else f"{'-':>10}" for name in names)
        click.echo(f"{row.name:<40} {row.steps:>6} {numbers}  {'same' if row.first is None else 'DIFFERS'}")
        if row.first is not None:
            differs += 1
            click.echo(f"    first difference at {row.first}")
    verdict = f"{differs} of {count} differ" if differs else f"all {count} agree"
    click.echo(f"{verdict} (largest relative difference allowed: {tolerance:g})")
    return differs
