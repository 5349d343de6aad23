"""Room: `worldsize report`: one page about runs, written beside them."""

from __future__ import annotations

from pathlib import Path

import click

from worldsize.errors import ConfigError

NAME = "report.html"


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), help="Where to. [default: report.html in the first run]"
)
def command(runs: tuple[Path, ...], output: Path | None) -> None:
    """Write one HTML page about runs: curves, time, restarts and their cost, checkpoints, failures, settings.

    RUN is a run folder; several stand side by side. The page is one file that needs no network.
    """
    from worldsize.tools.report import page, reading, summary

    text = page.page([summary.summary(reading.facts(run)) for run in runs])
    target = output or runs[0] / NAME
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("the report cannot be written", found=str(error), do="give another --output") from error
    click.echo(target)
