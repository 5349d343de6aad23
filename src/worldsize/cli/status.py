"""Room: `worldsize status`: one job, from whoever knows of it, and who that is."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from worldsize.launch.slurm import states
from worldsize.launch.slurm.client import Client
from worldsize.launch.slurm.nodes import duration, when

if TYPE_CHECKING:
    from collections.abc import Iterator


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@click.option("--clusters", "-M", "cluster", help="Another cluster than the default one.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def command(jobs: tuple[str, ...], *, cluster: str | None, as_json: bool) -> None:
    """Show the state of jobs: 12, 12_3 (a member of an array), 16+1 (a part)."""
    found = look(Client(cluster=cluster), jobs)
    if as_json:
        told = {job: [state.to_json() for state in members.values()] for job, members in found.items()}
        click.echo(json.dumps(told))
        return
    for job, members in found.items():
        if len(members) > 1:
            click.echo(f"{job}: {states.summary(members.values())}")
        for state in members.values():
            for line in _lines(state):
                click.echo(line)


def look(client: Client, jobs: tuple[str, ...]) -> dict[str, dict[str, states.State]]:
    """The members of each job with their states. Accounting is asked only for what squeue does not list."""
    queue = client.listing(jobs)
    rest = [job for job in jobs if not any(states.belongs(facts, job) for facts in queue.jobs)]
    accounting = client.accounting(rest) if rest else None
    return {job: states.gather(states.Asked(job, time.time()), queue, accounting) for job in jobs}


def _lines(state: states.State) -> Iterator[str]:
    yield f"{state.job}: {states.words(state)}"
    facts = state.facts
    rows = {} if facts is None else _rows(facts)
    if state.note:
        rows["note"] = state.note
    yield from (f"    {name:<10} {value}" for name, value in rows.items() if value)


def _rows(facts: states.JobFacts) -> dict[str, str]:
    times = {"submitted": facts.submit, "starts" if facts.state in states.WAITING else "started": facts.start}
    times |= {"ended" if facts.ended else "ends": facts.end}
    return {
        "name": " ".join(facts.name.split()),
        "partition": facts.partition,
        "asks for": f"{facts.nodes} nodes, {facts.tres}, {duration(facts.limit)}",
        "nodes": facts.node_list,
        **{name: when(second) for name, second in times.items() if second},
        "restarts": str(facts.restarts or ""),
        "folder": facts.work_dir,
        "log": facts.stdout,
        "comment": " ".join(facts.comment.split()),
    }
