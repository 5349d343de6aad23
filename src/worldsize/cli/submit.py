"""Room: `worldsize submit`: a job spec from options and a file to a preview, a script on disk, a job in the queue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from worldsize.cli import options
from worldsize.errors import ConfigError
from worldsize.launch import env, profile, yamlfile
from worldsize.launch.slurm import submit as slurm
from worldsize.launch.spec import JobSpec

_HELP = """Hand a training over to Slurm: SCRIPT on every rank of its nodes.

\b
    worldsize submit train.py --nodes 2 --gpus-per-node 4 --time 2:00:00 -- --lr 3e-4
    worldsize submit -c job.yaml --preview

Options are sbatch's where it has them, and stand on either side of SCRIPT; only what follows a `--` is the program's.
A file given with -c has the same names; options win over it. --preview shows the script, --save keeps it, and either
alone submits nothing unless --submit is given too.
"""
_NOT_OPTIONS = ("program", "env", "pass_env", "secrets", "dependency", "extra")


@click.command(help=_HELP)
@click.option("-c", "--config", type=click.Path(path_type=Path), help="A YAML file with the same names.")
@click.option(
    "--profile",
    "site",
    type=click.Path(path_type=Path),
    help="The site profile (YAML) instead of $WORLDSIZE_PROFILE.",
)
@click.option("--preview", is_flag=True, help="Print the script.")
@click.option("--save", type=click.Path(path_type=Path), help="Keep the script in this file.")
@click.option(
    "--submit/--no-submit", "hand_over", default=None, help="Hand it over. [default: unless shown or saved]"
)
@click.option("--job-dir", type=click.Path(path_type=Path), help="The job's own folder, shared by all nodes.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.option("--env", "variables", multiple=True, metavar="NAME=VALUE", help="A variable for the ranks.")
@options.debug
@click.option("--secret", multiple=True, metavar="NAME", help="A variable of yours for the ranks, shown nowhere.")
@click.option("--pass-env", multiple=True, metavar="NAME", help="A variable of yours for the ranks.")
@click.option("--dependency", multiple=True, metavar="KIND:JOB", help="What must have happened before: afterok:123.")
@click.option("--extra", multiple=True, metavar="OPTION", help="A further option of sbatch: --extra=--switches=1.")
@options.from_model(JobSpec, leave_out=_NOT_OPTIONS)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def command(words: tuple[str, ...], **asked: Any) -> None:
    """Plan, show, save, hand over: in this order, each where it was asked for."""
    own = {name: asked.pop(name) for name in ("config", "site", "preview", "save", "hand_over", "job_dir", "module")}
    environ = env.read()
    spec = _spec(words, asked, own)
    made = slurm.draft(spec, profile.find(environ, own["site"]), own["job_dir"])
    if own["preview"]:
        click.echo(made.text, nl=False)
    if own["save"]:
        _save(own["save"], made.text)
        click.echo(f"saved {own['save']}", err=True)
    wanted = own["hand_over"] if own["hand_over"] is not None else not (own["preview"] or own["save"])
    if wanted:
        from worldsize.launch.slurm.client import Client

        ticket = slurm.submit(made, Client(environ), slurm.state_folder(environ))
        if ticket.notes:
            click.echo(ticket.notes, err=True)
        click.echo(f"{ticket.job}")
        click.echo(
            f"worldsize: job {ticket.job} ({ticket.name}) is in the queue; its folder: {ticket.folder}", err=True
        )


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("the script cannot be saved", found=str(error), do="give another --save") from error


def _spec(words: tuple[str, ...], asked: dict[str, Any], own: dict[str, Any]) -> JobSpec:
    # As it was loaded: it knows the line of each setting.
    values: dict[str, Any] = yamlfile.load(own["config"]) if own["config"] else {}
    variables = options.debugged(asked.pop("debug")) | options.pairs(asked.pop("variables"), "env")
    asked["secrets"] = asked.pop("secret")
    asked["dependency"] = tuple(each for text in asked["dependency"] for each in text.split(","))
    options.over(values, asked)
    if variables:
        values["env"] = {**values.get("env", {}), **variables}
    if words:
        values["program"] = (*(("-m",) if own["module"] else ()), *words)
    return JobSpec.of(values)
