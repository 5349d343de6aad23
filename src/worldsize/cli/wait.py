"""Room: `worldsize wait`: until jobs have ended."""

from __future__ import annotations

import sys
import time

import click

from worldsize.cli.options import SECONDS
from worldsize.launch.slurm import states
from worldsize.launch.slurm.known import Desk
from worldsize.launch.slurm.watch import Watch

_TIMED_OUT = 124
"""As `timeout` of coreutils ends."""
_INTERRUPTED = 130


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@click.option("--timeout", type=SECONDS, help="Wait no longer: 90, 5m, 2h.")
@click.option("--clusters", "-M", "cluster", help="Another cluster than the jobs' own, or the default one.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing on the way.")
def command(jobs: tuple[str, ...], *, timeout: float | None, cluster: str | None, quiet: bool) -> None:
    """Wait until all jobs have ended; one that goes back into the queue has not.

    Exit code: 0 if all have completed, else that of the first training that has not (75: it stopped on request, with
    everything committed); 124 when the time is over. Ctrl-C ends the waiting, never the jobs.
    """
    desk = Desk.here(cluster)
    desk.find(jobs)
    try:
        sys.exit(_wait(Watch(desk, jobs), None if timeout is None else time.monotonic() + timeout, quiet=quiet))
    except KeyboardInterrupt:
        click.echo("worldsize: waits no longer; the jobs go on", err=True)
        sys.exit(_INTERRUPTED)


def _wait(watch: Watch, end: float | None, *, quiet: bool) -> int:
    while True:
        for known in watch.look():
            if not quiet:
                click.echo(f"worldsize: {known.job} is {states.words(known.state)}", err=True)
        if watch.over:
            break
        now = time.monotonic()
        if end is not None and now >= end:
            left = [known.job for known in watch.jobs if not known.state.final]
            click.echo(f"worldsize: not ended in time: {', '.join(left)}; they go on", err=True)
            return _TIMED_OUT
        time.sleep(max(0.0, min(watch.due, end or watch.due) - now))
    for known in watch.jobs:
        click.echo(f"{known.job}: {known.ending if known.ended else states.words(known.state)}")
    return watch.code
