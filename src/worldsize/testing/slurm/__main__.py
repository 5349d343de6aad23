"""Room: `python -m worldsize.testing.slurm`: arguments, one call of a cluster, what to print."""

from __future__ import annotations

import getpass
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from worldsize.errors import WorldsizeError
from worldsize.launch import env
from worldsize.testing.slurm import needs
from worldsize.testing.slurm.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "python -m worldsize.testing.slurm"


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"worldsize-slurm-{getpass.getuser()}"


_at = click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    default=_folder,
    metavar="DIR",
    help="Where the cluster is kept.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def commands() -> None:
    """A real Slurm cluster on this machine, to try things out and for tests."""


@commands.command()
@click.option("--nodes", default=4, show_default=True, help="How many.")
@click.option(
    "--gpus", default=0, show_default=True, help="Of each node; pretended, nothing can be computed on them."
)
@click.option("--accounting", is_flag=True, help="slurmdbd and a database, for sacct.")
@click.option("--ssh", is_flag=True, help="An sshd on every node.")
@click.option("--loopback", is_flag=True, help="All nodes share this machine's loopback; needs no root.")
@click.option("--install", is_flag=True, help="Install what is missing: root on Debian.")
@_at
def up(*, install: bool, folder: Path, **wanted: Any) -> None:
    """Start it, and end first what an earlier start left in DIR."""
    cluster = Cluster(folder=folder, outlive=True, **wanted)
    if install:
        cluster.install()
    cluster.up()
    if cluster.loopback:
        click.echo(f"all nodes share this machine's loopback ({cluster.why_loopback})")
    click.echo(cluster.run(["sinfo"]).out, nl=False)
    click.echo(f'eval "$({_NAME} env{_option(folder)})"')


@commands.command()
@_at
def down(folder: Path) -> None:
    """End everything that was started, and remove DIR."""
    Cluster.at(folder).down()


@commands.command()
@_at
def status(folder: Path) -> None:
    """What Slurm says of its nodes, and which machines have power."""
    cluster = Cluster.at(folder)
    states = cluster.states()
    for name in cluster.machines:
        click.echo(f"{name:8} {'on' if cluster.alive(name) else 'off':4} {states.get(name, '')}".rstrip())


@commands.command("env")
@_at
def environment(folder: Path) -> None:
    """Lines for a shell to evaluate, so that srun, sbatch and the others find the cluster."""
    for name, value in Cluster.at(folder).env.items():
        click.echo(f"export {name}={shlex.quote(value)}")


def _on_a_node(name: str, verb: Callable[[Cluster, str], None], text: str) -> None:
    @commands.command(name, help=text)
    @click.argument("node")
    @_at
    def command(node: str, folder: Path) -> None:
        verb(Cluster.at(folder), node)


_on_a_node("kill-node", Cluster.kill, "A power cut: every process of NODE ends at once.")
_on_a_node("start-node", Cluster.start, "Bring a killed NODE back.")
_on_a_node("cut", Cluster.cut, "Take NODE's cable out: what runs there goes on, and reaches nobody.")
_on_a_node("join", Cluster.join, "Put the cable back.")


@commands.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@_at
@click.argument("node")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def execute(node: str, words: tuple[str, ...], folder: Path) -> None:
    """Run COMMAND on NODE, outside of any job, in this terminal."""
    cluster = Cluster.at(folder)
    argv = cluster.command(node, words[words[0] == "--" :], Path.cwd())
    os.execvpe(argv[0], argv, {**needs.environment(env.read()), **cluster.env})  # noqa: S606 - no shell is what is wanted


def _option(folder: Path) -> str:
    return "" if folder == _folder() else f" --dir {shlex.quote(str(folder))}"


def main() -> None:
    """Exit with the code of the error, which takes one line."""
    try:
        commands(prog_name=_NAME)
    except WorldsizeError as error:
        click.echo(f"{_NAME}: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
