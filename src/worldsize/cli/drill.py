"""Room: `worldsize drill`: stop a live job and see whether it comes back."""

from __future__ import annotations

import json
import sys

import click

from worldsize.cli.options import SECONDS
from worldsize.launch.slurm.drill import drill
from worldsize.launch.slurm.known import Desk


@click.command()
@click.argument("job", metavar="JOB")
@click.option("--timeout", type=SECONDS, default="10m", show_default=True, help="For all of it.")
@click.option("--clusters", "-M", "cluster", help="Another cluster than the job's own, or the default one.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def command(job: str, *, timeout: float, cluster: str | None, as_json: bool) -> None:
    """Send the stop signal to a running job; see whether it saves, goes back into the queue, and comes back.

    Exit code: 0 if all of that was seen, and it went on from the step that it had saved, where it says from which.
    """
    found = drill(Desk.here(cluster), job, timeout, lambda line: click.echo(line, err=as_json))
    if as_json:
        click.echo(json.dumps(found.to_json()))
    else:
        click.echo(f"{found.job}: {'all held' if found.why is None else f'did not hold: {found.why}'}")
    sys.exit(0 if found.why is None else 1)
