"""Room: `worldsize watch`: a run folder, or a job's, to what is shown."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from worldsize.cli.options import SECONDS
from worldsize.errors import ConfigError

if TYPE_CHECKING:
    from worldsize.launch.slurm.known import Known

_JOB = re.compile(r"[0-9]+(_[0-9]+)?")


@click.command()
@click.argument("run", metavar="RUN|JOB")
@click.option("--once", is_flag=True, help="Show it as it is now, and end.")
@click.option("--every", type=SECONDS, default="1s", show_default=True, help="Between two looks.")
@click.option("--clusters", "-M", "cluster", help="Of a job: another cluster than its own, or the default one.")
def command(run: str, *, once: bool, every: float, cluster: str | None) -> None:
    """Look on while a run trains: progress, loss, each rank's time and memory, checkpoints, attempts, the last failure.

    RUN is a run folder, JOB a Slurm job of ours. It reads files only, so any machine that sees the folder will do. Ends
    with the run: 0 finished, 75 stopped on request, 1 failed. Where the output is no terminal it writes lines.
    """
    from worldsize.tools.watch import show

    folder = Path(run)
    if not folder.exists() and _JOB.fullmatch(run):
        folder = _of_job(run, cluster, every, once=once)
    sys.exit(show.watch(folder, every=every, once=once))


def _of_job(job: str, cluster: str | None, every: float, *, once: bool) -> Path:
    """The run folder of a job, as soon as its ranks have named it."""
    from worldsize.launch.slurm.known import Desk

    desk, told = Desk.here(cluster), ""
    while True:
        known = desk.look([job])[job][0]
        folder = _named(known)
        if folder is not None:
            return folder
        if once or not known.live:
            raise ConfigError(
                f"job {job} has no run folder",
                found=f"its state is {known.state.name}",
                do="give the run folder itself",
            )
        if known.state.name != told:
            click.echo(f"job {job}: {known.state.name}, no run has begun in it", err=True)
        told = known.state.name
        time.sleep(max(every, 2.0))


def _named(known: Known) -> Path | None:
    from worldsize.runtime.report import folder_of

    if known.folder is None:
        return None
    records = sorted(known.folder.glob(f"exit-{known.job}-*"), key=lambda path: path.stat().st_mtime)
    return next((found for record in reversed(records) if (found := folder_of(record)) is not None), None)
