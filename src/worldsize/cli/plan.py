"""Room: `worldsize plan`: what a program needs on GPUs that need not be here, layout by layout."""

from __future__ import annotations

import json
from typing import Any

import click

from worldsize.cli.table import table
from worldsize.cli.words import OursFirst
from worldsize.errors import ConfigError

_UNMASKED = ("worldsize.recipes.llm.attention:Masked._mask",)
"""Of our own recipe, whose packed rows go through flex_attention on a GPU."""

_HELP = """Say what SCRIPT needs on so many GPUs, for each way to lay it over them: memory, batches, traffic, checkpoints.

\b
    worldsize plan train.py --gpus 64 --gpu h100-80g -- --lr 1e-3
    worldsize plan --gpus 8 --gpu 80GiB --layouts ddp,fsdp,fsdp+tp2,pp4 train.py
    worldsize plan --gpus 16 --gpu h200-141g -m worldsize llm train -c llm.yaml

No GPU is needed: the program itself runs for two steps, on tensors that have shapes and no memory, once for each layout. Its
run folder is not touched. Everything after SCRIPT is the program's, unless a `--` follows.
"""


@click.command(cls=OursFirst, help=_HELP, context_settings={"allow_interspersed_args": False})
@click.option("--gpus", type=click.IntRange(1), required=True, help="How many there will be.")
@click.option("--gpus-per-node", type=click.IntRange(1), help="Of them on a node. [default: 8, or all]")
@click.option("--gpu", help="Their kind (h100-80g) or memory (80GiB). Without it no layout is said to fit or not.")
@click.option("--layouts", help="fsdp,fsdp+tp2,pp4+schedule=gpipe: these alone. [default: the usual ones]")
@click.option("--precision", help="fp64, fp32, bf16 or fp16: another one than the program's.")
@click.option("--checkpoints", type=click.IntRange(1), default=3, show_default=True, help="How many are kept.")
@click.option(
    "--disk",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="GB a second that all ranks write.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.option("--json", "as_json", is_flag=True, help="Everything in bytes, for a program.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, required=True, metavar="SCRIPT [ARGS]...")
def command(words: tuple[str, ...], gpus: int, *, module: bool, as_json: bool, **asked: Any) -> None:
    """Ask, judge, show."""
    from worldsize.tools.plan import layouts, machine, planning, show
    from worldsize.tools.plan.asking import Program

    local = asked["gpus_per_node"] or min(8, gpus)
    if local > gpus:
        raise ConfigError(
            "a node has more GPUs than there are", found=f"{local} of {gpus}", do="lower --gpus-per-node"
        )
    target = planning.Machine(gpus, local, machine.find(asked["gpu"]) if asked["gpu"] else None)
    wanted = layouts.named(asked["layouts"], gpus) if asked["layouts"] else layouts.usual(gpus, local)
    ours = module and words[:2] == ("worldsize", "llm")
    program = Program(words[0], words[1:], module, _UNMASKED if ours else ())
    told = {"WORLDSIZE_PRECISION": asked["precision"]} if asked["precision"] else {}
    verdicts = planning.made(program, wanted, target, told)
    saved = planning.saves(verdicts, asked["checkpoints"], asked["disk"] * 1e9)
    if as_json:
        click.echo(json.dumps(planning.as_json(verdicts, target, saved), indent=2))
        return
    rows = show.cells(verdicts)
    for line in (*table(rows, "ll" + "r" * (len(rows[0]) - 2)), *show.lines(verdicts, target, saved)):
        click.echo(line)
