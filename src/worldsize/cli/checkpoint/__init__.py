"""Room: `worldsize checkpoint`: look at checkpoints, verify and compare them, bring weights in and out. A file a command."""

from __future__ import annotations

import click

from worldsize.cli.group import Group

COMMANDS = {
    "ls": "List the committed checkpoints of a run.",
    "show": "Show what is in a checkpoint.",
    "verify": "Read checkpoints whole and compare them with their manifests.",
    "diff": "Show what differs between two checkpoints.",
    "export": "Write weights for other programs.",
    "import": "Bring weights in for a warm start.",
}
"""Name -> its line in `worldsize checkpoint --help`; the module of that name has the command."""


@click.command(cls=Group, table=COMMANDS, package=__name__)
def command() -> None:
    """Look at the checkpoints of a run, verify and compare them, bring weights in and out.

    Wherever a checkpoint is asked for, three forms are understood: its folder; a run folder, for the newest committed
    checkpoint in it; and RUN@STEP.
    """
