"""Room: `worldsize checkpoint`: look at checkpoints, verify and compare them, bring weights in and out. A file a command."""

from __future__ import annotations

from importlib import import_module

import click

COMMANDS = {
    "ls": "List the committed checkpoints of a run.",
    "show": "Show what is in a checkpoint.",
    "verify": "Read checkpoints whole and compare them with their manifests.",
    "diff": "Show what differs between two checkpoints.",
    "export": "Write weights for other programs.",
    "import": "Bring weights in for a warm start.",
}
"""Name -> its line in `worldsize checkpoint --help`; the module of that name has the command."""


class _Commands(click.Group):
    """A group that imports a command when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"{__name__}.{cmd_name}_").command
        assert isinstance(command, click.Command), ctx.command_path
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=_Commands)
def command() -> None:
    """Look at the checkpoints of a run, verify and compare them, bring weights in and out.

    Wherever a checkpoint is asked for, three forms are understood: its folder; a run folder, for the newest committed
    checkpoint in it; and RUN@STEP.
    """
