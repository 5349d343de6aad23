"""Room: `worldsize jobs`: what waits and runs, and what ended lately, a line each."""

from __future__ import annotations

import getpass
import json
import time

import click

from worldsize.cli.table import table
from worldsize.launch.slurm import states
from worldsize.launch.slurm.client import Client
from worldsize.launch.slurm.nodes import duration


@click.command()
@click.option("--all", "everyone", is_flag=True, help="Everybody's, not only yours.")
@click.option("--hours", default=0.0, metavar="N", help="Also those that ended in the last N hours, from accounting.")
@click.option("--clusters", "-M", "cluster", help="Another cluster than the default one.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def command(*, everyone: bool, hours: float, cluster: str | None, as_json: bool) -> None:
    """List jobs that wait or run on Slurm."""
    client, user = Client(cluster=cluster), None if everyone else getpass.getuser()
    found = list(client.queue(user=user))
    note = None
    if hours > 0:
        kept = client.accounting(user=user, since=time.time() - hours * 3600)
        listed = {facts.job for facts in found}
        newest = {facts.job: facts for facts in kept.jobs if facts.job not in listed}
        found += [facts for facts in newest.values() if facts.ended]
        note = kept.missing
    if as_json:
        click.echo(json.dumps({"jobs": [facts.to_json() for facts in found], "note": note}))
        return
    for line in _table(found):
        click.echo(line)
    if note:
        click.echo(f"ended jobs cannot be told: {note}", err=True)


def _table(found: list[states.JobFacts]) -> list[str]:
    if not found:
        return ["no jobs"]
    rows = [("JOB", "NAME", "USER", "PARTITION", "NODES", "LIMIT", "STATE"), *map(_row, found)]
    return list(table(rows, "lllllll"))


def _row(facts: states.JobFacts) -> tuple[str, ...]:
    state = states.State(facts.job, facts.state, facts.source, facts.ended, facts)
    name = " ".join(facts.name.split())
    limit = duration(facts.limit)
    return facts.job, name, facts.user, facts.partition, str(facts.nodes), limit, states.words(state)
