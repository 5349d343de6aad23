"""Room: `worldsize restart`: an ended job again, as a new one in the same folder."""

from __future__ import annotations

import click

from worldsize.launch.slurm import acts
from worldsize.launch.slurm.known import Desk


@click.command()
@click.argument("job", metavar="JOB")
@click.option("--time", help="Another time limit: 2:00:00.")
@click.option("-p", "--partition", help="Another partition.")
@click.option("--exclude", metavar="NODES", help="Nodes to do without.")
@click.option("--mem", help="Other memory of each node: 64G.")
@click.option("--clusters", "-M", "cluster", help="Another cluster than the job's own, or the default one.")
def command(job: str, *, cluster: str | None, **asked: str | None) -> None:
    """Start an ended job again where it stopped: its script once more, as a new job. Prints the new id.

    What is given here holds for the new job; where it submits a job that follows, that one has the script's own again.
    """
    ticket = acts.restart(Desk.here(cluster), job, asked)
    click.echo(ticket.job)
    click.echo(f"worldsize: job {ticket.job} goes on from job {ticket.former}, in {ticket.folder}", err=True)
