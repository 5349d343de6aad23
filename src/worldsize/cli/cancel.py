"""Room: `worldsize cancel`: end jobs, at once or when they have saved."""

from __future__ import annotations

import click

from worldsize.launch.slurm import acts
from worldsize.launch.slurm.known import Desk


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@click.option(
    "--stop", is_flag=True, help="Let them save first; they end with code 75. For jobs of worldsize submit."
)
@click.option("--clusters", "-M", "cluster", help="Another cluster than the jobs' own, or the default one.")
def command(jobs: tuple[str, ...], *, stop: bool, cluster: str | None) -> None:
    """End jobs, and say what was ended. They do not go back into the queue; `worldsize restart` starts them again."""
    for line in acts.cancel(Desk.here(cluster), jobs, stop=stop):
        click.echo(line)
