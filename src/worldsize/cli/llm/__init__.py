"""Room: `worldsize llm`: the recipe for language models as commands."""

from __future__ import annotations

from importlib import import_module

import click

COMMANDS = {
    "train": "Fine-tune or pre-train a language model.",
    "generate": "Print what a model goes on with.",
    "export": "Write a run's model as transformers loads it.",
}
"""Name -> its line in `worldsize llm --help`; the module of that name has the command."""


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
    """Fine-tune and pre-train language models, from a Hugging Face folder and JSON lines."""
