"""Room: `worldsize after`: what a batch script asks when its step has failed. Nobody types it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from worldsize.errors import EXIT_STOPPED, WorldError
from worldsize.launch import env
from worldsize.launch.failure import SIGNALLED
from worldsize.launch.slurm import after, exitfile
from worldsize.runtime.hostlist import expand


@click.command(hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("job")
@click.argument("attempt")
@click.argument("code", type=int)
@click.option("--ranks", default="1", help="Ranks on each node: 4, or 4,4,2.")
@click.option("--log", type=click.Path(path_type=Path), help="The job's log.")
@click.option("--began", type=float, default=0.0, help="When this attempt began, seconds since 1970.")
@click.option("--asked", is_flag=True, help="Whether it was asked to stop.")
@click.option("--max-restarts", type=click.IntRange(0), default=0)
@click.option("--exclude/--no-exclude", default=True, help="Whether nodes with bad hardware are left out.")
@click.option("--without", default="", help="Nodes that its step did not use.")
def command(folder: Path, job: str, attempt: str, code: int, **options: Any) -> None:
    """Say on stderr what failed, write it into the exit record, and print the root's exit code and what follows.

    `CODE again [NODES]`: the job comes again, without those nodes; `CODE stopped`: it only did what it was asked to.
    """
    hosts = _hosts(options["ranks"], options["without"])
    this = after.Attempt(folder, job, attempt, code, hosts, options["log"], options["began"])
    root = after.root_code(after.tail(this.log), code)
    known = exitfile.read(this.record).failed
    if known is None and (root == EXIT_STOPPED or (options["asked"] and root > SIGNALLED)):
        click.echo(f"{root} stopped")
        return
    what = known or after.failed(this)
    if known is None:
        click.echo(f"worldsize: {what.line}", err=True)
        with this.record.open("a", encoding="utf-8") as file:
            file.write(what.words)
    found = after.decide(this, what, options["max_restarts"])
    nodes = ",".join(found.without) if options["exclude"] else ""
    click.echo(f"{root} again {nodes}".strip() if found.again else str(root))
    if found.again or options["max_restarts"]:
        click.echo(f"worldsize: {'tried again' if found.again else 'not tried again'}: {found.why}", err=True)


def _hosts(ranks: str, without: str) -> list[str]:
    """Where each rank was, as far as the job's environment says it."""
    try:
        left = set(without.split(","))
        nodes = [node for node in expand(env.read().get("SLURM_JOB_NODELIST", "")) if node not in left]
    except WorldError:
        return []
    counts = [int(word) for word in ranks.split(",")]
    counts = counts * len(nodes) if len(counts) == 1 else counts
    return [node for node, count in zip(nodes, counts, strict=False) for _ in range(count)]
