"""Room: the command `worldsize`: loads only the subcommand that is used, turns errors into one line and a code."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

import click

from worldsize.errors import WorldsizeError
from worldsize.launch import env

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {
    "run": ("worldsize.cli.run", "Start a program on the ranks of this machine, or of several machines by hand."),
    "submit": ("worldsize.cli.submit", "Hand a training over to Slurm; show or keep its script."),
    "generate-slurm": ("worldsize.cli.generate_slurm", "Make Slurm jobs of a builder's slurm_config.yaml."),
    "jobs": ("worldsize.cli.jobs", "List what waits and runs on Slurm."),
    "status": ("worldsize.cli.status", "Show the state of Slurm jobs, and who says so."),
    "why": ("worldsize.cli.why", "Say why a Slurm job waits or has ended, and what to do."),
    "logs": ("worldsize.cli.logs", "Show what a Slurm job prints; -f follows it."),
    "wait": ("worldsize.cli.wait", "Wait until Slurm jobs have ended."),
    "cancel": ("worldsize.cli.cancel", "End Slurm jobs, at once or when they have saved."),
    "requeue": ("worldsize.cli.requeue", "Put a Slurm job back into the queue, under its id."),
    "restart": ("worldsize.cli.restart", "Start an ended Slurm job again where it stopped, as a new one."),
    "drill": ("worldsize.cli.drill", "Stop a live Slurm job, and see whether it saves and comes back."),
    "nodes": ("worldsize.cli.nodes", "Show the Slurm cluster: what is free, what is out, and why."),
    "doctor": ("worldsize.cli.doctor", "Look at the hosts: what is wrong or slow, which one, and what to do."),
    "verify": ("worldsize.cli.verify", "Prove that a program resumes exactly, and trains alike on every layout."),
    "plan": ("worldsize.cli.plan", "Say what a program needs on GPUs that need not be here: memory, traffic, disk."),
    "scale": (
        "worldsize.cli.scale",
        "Measure a program on more and more ranks: speed-up, efficiency, waiting, energy.",
    ),
    "bench": ("worldsize.cli.bench", "Measure a program's speed here, in one line."),
    "checkpoint": (
        "worldsize.cli.checkpoint",
        "Look at checkpoints, verify and compare them, bring weights in and out.",
    ),
    "report": ("worldsize.cli.report", "Write one page about runs: curves, time, restarts, checkpoints, failures."),
    "watch": ("worldsize.cli.watch", "Look on while a run trains, from any machine that sees its folder."),
    "llm": ("worldsize.cli.llm", "Fine-tune and pre-train language models."),
}
"""Name -> the module whose `command` it is, and its line in `worldsize --help`."""

INSIDE = {"node": "worldsize.cli.node", "after": "worldsize.cli.after", "host": "worldsize.cli.host"}
"""What only our own scripts call: name -> module."""


class Commands(click.Group):
    """A group that imports a subcommand when it is used, and not to list it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every name, in the order of the table."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand, imported."""
        module = COMMANDS[cmd_name][0] if cmd_name in COMMANDS else INSIDE.get(cmd_name)
        if module is None:
            return None
        # What is loaded stays: collecting meanwhile frees next to nothing, and is 6% of a preview's time to load.
        gc.disable()
        try:
            with env.without_plugins():
                command = import_module(module).command
        finally:
            gc.enable()
        assert isinstance(command, click.Command), ctx.command_path
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table, as it is."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def alike(name: str) -> str:
    """`--nproc_per_node` is `--nproc-per-node`."""
    return name.replace("_", "-")


@click.command(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": alike, "max_content_width": 100},
)
@click.version_option(package_name="worldsize")
def commands() -> None:
    """One PyTorch training program, any world size: laptop, GPU box, Slurm."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The entry point: exits with the code of the command, or of the error, which takes one line.

    Args:
        argv: the words; those of the command line where None.
    """
    try:
        code = commands(argv, standalone_mode=False)
    except WorldsizeError as error:
        click.echo(f"worldsize: {error}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "worldsize"
        click.echo(f"{where}: {error.format_message()} Do: see {where} --help", err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)
