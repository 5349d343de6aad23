"""Room: `worldsize bench`: one program's speed on this machine, in one line."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click


@click.command()
@click.option("--ranks", type=click.IntRange(1), help="How many. [default: a rank for each GPU, or one]")
@click.option("--duration", default="100st", show_default=True, help="200st, 1ep. Its first quarter is left out.")
@click.option("--strategy", default="", help="Another one than the program's own.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(script: str, args: tuple[str, ...], ranks: int | None, duration: str, strategy: str) -> None:
    """Run SCRIPT for a while in a folder that is thrown away, and say samples a second, and MFU where the program logs it."""
    from worldsize.config import Duration
    from worldsize.launch import env, program
    from worldsize.tools.scale.measure import Asked, Here, Size, points_of, told
    from worldsize.tools.trial import Program

    count = ranks or max(1, program.count_gpus(env.read()))
    with tempfile.TemporaryDirectory() as folder:
        place = Here(Program(script, args, Path(folder)))
        options = {"WORLDSIZE_DURATION": str(Duration.parse(duration))}
        (point,) = points_of(place, Asked([Size(1, count)], (strategy,), 1, weak=False, options=options))
        logged = told(Path(folder))
    first, middle, last = (seconds * 1e3 for seconds in point.step)
    parts = [
        f"{point.throughput:,.4g} samples/s on {count} rank{'s' * (count > 1)}",
        f"{middle:.4g} ms a step ({first:.4g} to {last:.4g} in the middle half of {len(point.intervals)} intervals)",
        f"waiting {point.waiting:.0%}",
        *(f"{name} {value:,.4g}" for name, value in logged.items()),
    ]
    click.echo(", ".join(parts))
