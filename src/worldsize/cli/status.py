"""Room: `worldsize status`: jobs, from whoever knows of them, and who that is."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from worldsize.errors import EXIT_USAGE
from worldsize.launch.slurm import states
from worldsize.launch.slurm.known import Desk
from worldsize.launch.slurm.nodes import duration, when

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worldsize.launch.slurm.known import Known


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@click.option("--clusters", "-M", "cluster", help="Another cluster than the job's own, or the default one.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def command(jobs: tuple[str, ...], *, cluster: str | None, as_json: bool) -> None:
    """Show the state of jobs: 12, 12_3 (a member of an array), 16+1 (a part)."""
    found = Desk.here(cluster).look(jobs)
    if as_json:
        click.echo(json.dumps({job: [known.to_json() for known in members] for job, members in found.items()}))
        return
    for job, members in found.items():
        if len(members) > 1:
            click.echo(f"{job}: {states.summary(known.state for known in members)}")
        for known in members:
            for line in _lines(known):
                click.echo(line)
    every = [known for members in found.values() for known in members]
    if all(known.state.name == states.UNKNOWN and known.folder is None for known in every):
        sys.exit(EXIT_USAGE)


def _lines(known: Known) -> Iterator[str]:
    yield f"{known.job}: {states.words(known.state)}"
    facts, record = known.facts, known.record
    rows = {} if facts is None else _rows(facts)
    rows["folder"] = str(known.folder or rows.get("folder") or "")
    if record is not None and record.step is not None:
        rows["committed"] = f"step {record.step}" + (
            "" if known.ended or record.of(facts) else ", by an earlier attempt"
        )
    rows |= {"failed": record.line if record is not None and known.ended else "", "goes on as": known.next or ""}
    former = known.ticket.former if known.ticket else None
    rows |= {"follows": f"job {former}" if former else "", "note": known.state.note or ""}
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
