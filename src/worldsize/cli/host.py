"""Room: `worldsize host`: what `worldsize run --hosts` executes on each host. Nobody types it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from worldsize.cli import run
from worldsize.launch.ssh.host import serve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worldsize.launch.plan import Plan


@click.command(hidden=True)
@click.option("--mark", required=True, help="What lines for the starter begin with.")
@click.option("--pipe", is_flag=True, help="Take the starter's lines from a named pipe.")
def command(mark: str, *, pipe: bool) -> None:
    """Take a job from the starter, and run it."""
    sys.exit(serve(mark, _planned, pipe=pipe))


def _planned(words: Sequence[str]) -> Plan:
    options = run.command.make_context("worldsize run", list(words)).params
    script, *args = options.pop("words")
    return run.plan(script, tuple(args), options)
