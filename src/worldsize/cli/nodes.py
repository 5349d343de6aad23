"""Room: `worldsize nodes`: the cluster in words."""

from __future__ import annotations

import json

import click

from worldsize.errors import ConfigError
from worldsize.launch.slurm.client import Client
from worldsize.launch.slurm.nodes import report


@click.command()
@click.option("-p", "--partition", help="Only this one.")
@click.option("--clusters", "-M", "cluster", help="Another cluster than the default one.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def command(*, partition: str | None, cluster: str | None, as_json: bool) -> None:
    """Show the partitions and what is free in them; which nodes are out, why, and the command that brings them back."""
    client = Client(cluster=cluster)
    partitions, nodes = client.partitions(), client.nodes()
    if partition is not None:
        names = [known.name for known in partitions]
        if partition not in names:
            raise ConfigError(f"there is no partition {partition!r}", found=", ".join(names), do="name one of these")
        partitions = [known for known in partitions if known.name == partition]
        nodes = [node for node in nodes if partition in node.partitions]
    if as_json:
        told = {"partitions": [known.to_json() for known in partitions], "nodes": [node.to_json() for node in nodes]}
        click.echo(json.dumps(told))
        return
    for line in report(nodes, partitions):
        click.echo(line)
