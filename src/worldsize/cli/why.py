"""Room: `worldsize why`: why jobs wait, or why they are over."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from worldsize.launch.slurm import states
from worldsize.launch.slurm.known import Desk
from worldsize.launch.slurm.why import Around, Why, why_ended, why_waiting

if TYPE_CHECKING:
    from collections.abc import Iterable

    from worldsize.launch.slurm.known import Known


@click.command()
@click.argument("job", metavar="JOB")
@click.option("--clusters", "-M", "cluster", help="Another cluster than the job's own, or the default one.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def command(job: str, *, cluster: str | None, as_json: bool) -> None:
    """Say why a job waits or has ended: the category, the evidence, what to do."""
    desk = Desk.here(cluster)
    members = desk.find([job])
    around = _around(desk, job) if any(known.waits for known in members) else Around()
    groups: dict[Why | str, list[Known]] = {}
    for known in members:
        groups.setdefault(_why(known, around) or states.words(known.state), []).append(known)
    if as_json:
        click.echo(json.dumps([_plain(why, group) for why, group in groups.items()]))
        return
    for why, group in groups.items():
        click.echo("\n".join(_lines(why, group)))


def _around(desk: Desk, job: str) -> Around:
    client = desk.client_of(job)
    return Around(client.partitions(), client.nodes(), client.queue())


def _why(known: Known, around: Around) -> Why | None:
    if known.facts is not None and known.waits:
        return why_waiting(known.facts, around)
    if not known.ended:
        return None
    return why_ended(known.state, known.ending, known.record, known.tail, ours=known.folder is not None)


def _plain(why: Why | str, group: Iterable[Known]) -> dict[str, Any]:
    told = why.to_json() if isinstance(why, Why) else {"category": None, "evidence": [], "do": None}
    return {"jobs": [known.job for known in group], "states": [known.state.name for known in group], **told}


def _lines(why: Why | str, group: list[Known]) -> list[str]:
    names = ", ".join(known.job for known in group)
    notes = [f"    {note}" for note in dict.fromkeys(known.state.note for known in group) if note]
    notes += [f"    {known.job} goes on as job {known.next}" for known in group if known.ended and known.next]
    if isinstance(why, str):
        return [f"{names}: {why}", *notes]
    head = f"{names}: {'waits' if group[0].waits else 'ended'}: {why.category}"
    return [head, *(f"    {line}" for line in why.evidence), *notes, *([f"    Do: {why.do}"] if why.do else [])]
