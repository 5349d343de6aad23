"""Room: `worldsize llm`: the recipe for language models as commands."""

from __future__ import annotations

from importlib import import_module

import click

_COMMANDS = {
    "train": ("worldsize.cli.llm.train_", "Fine-tune or pre-train a language model."),
}


class _LLM(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        command = import_module(_COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


command = _LLM("llm", help="Fine-tune and pre-train language models, from a Hugging Face folder and JSON lines.")
