"""Room: `worldsize checkpoint import`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

EXAMPLES = """\
\b
worldsize checkpoint import pretrained/ --to runs/tuned
worldsize checkpoint import old.ckpt --to runs/tuned --prefix model. --trust
worldsize checkpoint import ds_output/ --to weights.safetensors --trust
"""


@click.command("import", epilog=EXAMPLES)
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Path(path_type=Path),
    help="A run folder, or a .safetensors or .pt file.",
)
@click.option("--prefix", help="Take only the names that begin with this, and take it off.")
@click.option("--trust", is_flag=True, help="Allow unpickling SOURCE, which can run any code that it brings.")
def command(source: Path, target: Path, prefix: str | None, *, trust: bool) -> None:
    """Bring the weights of SOURCE in for a warm start.

    SOURCE is a checkpoint or run folder of worldsize (RUN@STEP too), a torch or safetensors file, a Lightning
    checkpoint, or a folder of accelerate, transformers or DeepSpeed (any ZeRO stage and number of ranks, or universal).
    Weights alone are read: what an optimizer kept stays behind.
    """
    from worldsize.checkpoint import address
    from worldsize.checkpoint.weights import read_weights, write_weights

    if not source.exists():
        source = address.find(source)
    weights = read_weights(source, prefix=prefix, trust=trust, say=partial(click.echo, err=True))
    file = write_weights(weights, target)
    total = sum(tensor.numel() for tensor in weights.values())
    click.echo(f"{len(weights)} tensors, {total:,} values -> {file}")
