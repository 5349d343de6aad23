"""Room: `worldsize why`: why a job waits, or why it is over."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from worldsize.cli.status import look
from worldsize.launch.slurm import classes, states
from worldsize.launch.slurm.client import Client
from worldsize.launch.slurm.why import Around, Why, why_ended, why_waiting

if TYPE_CHECKING:
    from collections.abc import Iterable


@click.command()
@click.argument("job", metavar="JOB")
@click.option("--clusters", "-M", "cluster", help="Another cluster than the default one.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def command(job: str, *, cluster: str | None, as_json: bool) -> None:
    """Say why a job waits or has ended: the category, the evidence, what to do."""
    client = Client(cluster=cluster)
    members = look(client, (job,))[job]
    around = _around(client) if any(state.name in states.WAITING for state in members.values()) else Around()
    groups: dict[Why | str, list[states.State]] = {}
    for state in members.values():
        groups.setdefault(_why(state, around) or states.words(state), []).append(state)
    if as_json:
        click.echo(json.dumps([_plain(why, group) for why, group in groups.items()]))
        return
    for why, group in groups.items():
        click.echo("\n".join(_lines(why, group)))


def _around(client: Client) -> Around:
    return Around(client.partitions(), client.nodes(), client.queue())


def _why(state: states.State, around: Around) -> Why | None:
    if state.facts is not None and state.name in states.WAITING:
        return why_waiting(state.facts, around)
    return why_ended(state, classes.classify(state))


def _plain(why: Why | str, group: Iterable[states.State]) -> dict[str, Any]:
    told = why.to_json() if isinstance(why, Why) else {"category": None, "evidence": [], "do": None}
    return {"jobs": [state.job for state in group], "states": [state.name for state in group], **told}


def _lines(why: Why | str, group: list[states.State]) -> list[str]:
    names = ", ".join(state.job for state in group)
    notes = [f"    {note}" for note in dict.fromkeys(state.note for state in group) if note]
    if isinstance(why, str):
        return [f"{names}: {why}", *notes]
    head = f"{names}: {'waits' if group[0].name in states.WAITING else 'ended'}: {why.category}"
    return [head, *(f"    {line}" for line in why.evidence), *notes, *([f"    Do: {why.do}"] if why.do else [])]
