"""Room: a command with commands of its own, a file each: what is used is imported, what is listed is not."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping


class Group(click.Group):
    """A group that imports a command when it is used.

    Args:
        table: name -> its line in the help.
        package: where the modules are: that of `ls` is `ls_`, its command is called `command`.
    """

    def __init__(self, *args: Any, table: Mapping[str, str], package: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._table, self._package = table, package

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every name, in the order of the table."""
        del ctx
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported."""
        if cmd_name not in self._table:
            return None
        command = import_module(f"{self._package}.{cmd_name}_").command
        assert isinstance(command, click.Command), ctx.command_path
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table, as it is."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(self._table.items()))
