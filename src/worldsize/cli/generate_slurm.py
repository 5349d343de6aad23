"""Room: `worldsize generate-slurm`: a builder's slurm_config.yaml to previews, scripts on disk, jobs in the queue."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from worldsize.cli import options
from worldsize.launch import env, profile, yamlfile
from worldsize.launch.builder import sweep
from worldsize.launch.builder.config import BuilderConfig
from worldsize.launch.slurm import submit as slurm
from worldsize.launch.slurm.client import Client

if TYPE_CHECKING:
    from worldsize.launch.slurm.submit import Draft

_HELP = """Make Slurm jobs of a slurm_config.yaml: keep their scripts, hand them over, or only show them.

\b
    worldsize generate-slurm -c slurm_config.yaml --no-save-script --no-submit-job   # shows
    worldsize generate-slurm -c slurm_config.yaml --no-save-script                   # submits
    worldsize generate-slurm -c slurm_config.yaml                                    # keeps and submits

Each setting of the file is an option too, and the option wins. An id of each job goes to standard output; `worldsize
jobs`, `status`, `why` know them. A spec of our own says more: see `worldsize submit`.
"""


@click.command(help=_HELP)
@click.option("-c", "--config", type=click.Path(path_type=Path), help="The slurm_config.yaml.")
@click.option("-j/ ", "--submit-job/--no-submit-job", default=None, help="Hand the jobs over. [default: yes]")
@click.option("-s/ ", "--save-script/--no-save-script", default=None, help="Keep the scripts. [default: yes]")
@click.option(
    "--profile",
    "site",
    type=click.Path(path_type=Path),
    help="The site profile (YAML) instead of $WORLDSIZE_PROFILE.",
)
@options.from_model(BuilderConfig, leave_out=("submit_job", "save_script"))
def command(config: Path | None, site: Path | None, **asked: Any) -> None:
    """Show where nothing else is asked for; else keep, then hand over."""
    values: dict[str, Any] = yamlfile.load(config) if config else {}
    options.over(values, asked)
    wanted, environ = BuilderConfig.of(values), env.read()
    made = sweep.drafts(wanted, profile.find(environ, site))
    if not (wanted.save_script or wanted.submit_job):
        click.echo("\n".join(each.text for each in made), nl=False)
    if wanted.save_script:
        for each in made:
            click.echo(f"saved {sweep.keep(each, Path(wanted.save_dir))}", err=True)
    if wanted.submit_job:
        _submit(made, Client(environ), slurm.state_folder(environ))


def _submit(made: list[Draft], client: Client, state: Path) -> None:
    for each in made:
        ticket = slurm.submit(each, client, state)
        click.echo(ticket.job)
        click.echo(f"worldsize: job {ticket.job} ({ticket.name}) is in the queue", err=True)
