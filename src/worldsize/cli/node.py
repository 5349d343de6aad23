"""Room: `worldsize node`: what the tasks of a Slurm step execute. Batch scripts write it; nobody types it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from worldsize.launch.slurm.arrival import Asked
from worldsize.launch.slurm.node import Task, become
from worldsize.launch.slurm.ways import WAYS, Work


@click.command(context_settings={"allow_interspersed_args": False}, hidden=True)
@click.option("--launcher", type=click.Choice(WAYS), required=True, help="How this node's ranks are started.")
@click.option("--meet", type=click.Path(path_type=Path), required=True, help="A folder that all nodes share.")
@click.option("--nproc-per-node", default="1", show_default=True, help="N, auto, gpu or cpu; not for srun.")
@click.option("--max-restarts", type=click.IntRange(0), default=0, show_default=True)
@click.option("--grace", type=click.IntRange(1), default=120, show_default=True, help="Seconds from stop to SIGKILL.")
@click.option("--log-dir", help="Where the supervisor keeps the logs of the ranks.")
@click.option("--address-suffix", default="", help="Added to the first node's name.")
@click.option("--interface", help="Whose address the first node gives.")
@click.option("--timeout", type=click.FloatRange(1), default=600.0, show_default=True, help="To wait for all nodes.")
@click.option("--template", help="The command of --launcher template, with its places in braces.")
@click.option("--secrets", type=click.Path(path_type=Path), help="A file with variables for the ranks.")
@click.option("--stage", multiple=True, help="A path that is copied to this node's own disk.")
@click.option("--venv", help="An archive of a virtual environment that is unpacked there.")
@click.option("--fingerprint", type=click.Path(path_type=Path), help="What the job ran with when it was submitted.")
@click.option("--code", type=click.Path(path_type=Path), help="The folder whose commit is compared too.")
@click.option("--strict-env", is_flag=True, help="Refuse another environment.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def command(words: tuple[str, ...], **options: Any) -> None:
    """Meet the other nodes of this Slurm step, then become the command that starts this node's ranks."""
    work = Work(
        program=words,
        python=sys.executable,
        log_dir=options["log_dir"],
        max_restarts=options["max_restarts"],
        grace=options["grace"],
        template=options["template"],
    )
    become(
        Task(
            way=options["launcher"],
            work=work,
            nproc=options["nproc_per_node"],
            meet=options["meet"],
            suffix=options["address_suffix"],
            interface=options["interface"],
            limit=options["timeout"],
            asked=Asked(
                secrets=options["secrets"],
                stage=options["stage"],
                venv=options["venv"],
                fingerprint=options["fingerprint"],
                code=options["code"],
                strict=options["strict_env"],
            ),
        )
    )
