"""Room: `worldsize requeue`: a job back into the queue, under its own id."""

from __future__ import annotations

import click

from worldsize.launch.slurm import acts
from worldsize.launch.slurm.known import Desk


@click.command()
@click.argument("job", metavar="JOB")
@click.option("--force", is_flag=True, help="Also one that has completed.")
@click.option("--clusters", "-M", "cluster", help="Another cluster than the job's own, or the default one.")
def command(job: str, *, force: bool, cluster: str | None) -> None:
    """Stop a job and put it back into the queue, or start one again that has ended. Of an array name the member: 12_3."""
    click.echo(f"{acts.requeue(Desk.here(cluster), job, force=force)}: back in the queue")
