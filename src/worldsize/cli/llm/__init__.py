"""Room: `worldsize llm`: the recipe for language models as commands."""

from __future__ import annotations

import click

from worldsize.cli.group import Group

COMMANDS = {
    "train": "Fine-tune or pre-train a language model.",
    "generate": "Print what a model goes on with.",
    "export": "Write a run's model as transformers loads it.",
}
"""Name -> its line in `worldsize llm --help`; the module of that name has the command."""


@click.command(cls=Group, table=COMMANDS, package=__name__)
def command() -> None:
    """Fine-tune and pre-train language models, from a Hugging Face folder and JSON lines."""
