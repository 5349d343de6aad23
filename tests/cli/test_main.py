"""The command itself: help, errors, exit codes."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from worldsize.cli.main import COMMANDS, commands


def call(*args: str) -> subprocess.CompletedProcess[str]:
    """`python -m worldsize`."""
    return subprocess.run([sys.executable, "-m", "worldsize", *args], capture_output=True, text=True, check=False)


def test_help_lists_every_command_and_loads_none() -> None:
    """The list is a table; a command's module is imported when it is used."""
    code = "import sys; sys.argv[1:] = ['--help']\nfrom worldsize.cli.main import main\ntry: main()\nexcept SystemExit: pass\n"
    code += (
        "print([name for name in sys.modules if name.startswith('worldsize.cli.') and name != 'worldsize.cli.main'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"  {name} " in done.stdout for name in COMMANDS)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_is_there(name: str) -> None:
    """The module exists, and has help."""
    command = commands.get_command(click.Context(commands), name)
    assert command is not None
    assert command.get_help(click.Context(command))


def test_an_error_of_ours_is_one_line_and_its_code() -> None:
    """No traceback for what is the user's to mend."""
    done = call("run", "nope.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("worldsize: there is no program 'nope.py'.")
    assert done.stderr.count("\n") == 1


def test_an_unknown_command_is_a_usage_error() -> None:
    """Code 2, and the name."""
    done = call("rum")
    assert done.returncode == 2
    assert "rum" in done.stderr


def test_the_version_is_told() -> None:
    """`worldsize --version`."""
    import worldsize

    assert worldsize.__version__ in call("--version").stdout
