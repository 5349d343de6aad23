"""Room: `worldsize checkpoint export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from worldsize.checkpoint import address
from worldsize.errors import ConfigError
from worldsize.tools.report.words import size

EXAMPLES = """\
\b
safetensors  a file OUT.safetensors, or a folder as transformers has it (with an index
             where it is several files); one tensor in memory at a time
torch        a state dict for torch.load; with --optimizer {"model": ..., "optimizer": ...}
deepspeed    a universal checkpoint: engine.load_checkpoint(OUT) with load_universal,
             at any ZeRO stage (1 to 3) and world size, with the optimizer's state

\b
worldsize checkpoint export runs/lm exported --dtype bf16 --max-shard-size 2GB
worldsize checkpoint export runs/digits@1200 digits.pt --to torch --optimizer
worldsize checkpoint export runs/lm ds --to deepspeed
"""


@click.command("export", epilog=EXAMPLES)
@click.argument("checkpoint")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--to", "form", type=click.Choice(["safetensors", "torch", "deepspeed"]), default="safetensors", show_default=True
)
@click.option("--model", help="Which model, where there are several.")
@click.option("--average", is_flag=True, help="Its running average (run.average) instead of the weights.")
@click.option("--dtype", type=click.Choice(["fp64", "fp32", "bf16", "fp16"]), help="Cast floating-point tensors.")
@click.option(
    "--max-shard-size", metavar="SIZE", help="safetensors: more than this goes into several files. [default: 5GB]"
)
@click.option("--optimizer", is_flag=True, help="torch: the state of the optimizer too.")
def command(checkpoint: str, out: Path, form: str, **options: Any) -> None:
    """Write the weights of a CHECKPOINT to OUT under the names of the bare model.

    What is tied is written once. OUT must not exist.
    """
    _check(form, options)
    path = address.find(checkpoint)
    from worldsize.checkpoint import export, universal
    from worldsize.checkpoint.opened import Opened

    weights = export.Weights.choose(Opened(path), options["model"], options["dtype"], average=options["average"])
    if form == "safetensors":
        made = export.safetensors(weights, out, export.size(options["max_shard_size"] or export.SHARD))
    elif form == "torch":
        made = [export.torch_file(weights, out, optimizer=options["optimizer"])]
    else:
        made = [universal.deepspeed(weights, out)]
    total = size(sum(weights.bytes(name) for name in weights.own))
    tied = f" ({len(weights.ties)} tied to others)" if weights.ties else ""
    files = made[0] if len(made) == 1 else f"{out} in {len(made)} files"
    click.echo(f"{path.name}: {len(weights.own) + len(weights.ties)} tensors{tied}, {total} -> {files}")


def _check(form: str, options: dict[str, Any]) -> None:
    only = {
        "max_shard_size": ("safetensors",),
        "optimizer": ("torch",),
        "dtype": ("safetensors", "torch"),
        "average": ("safetensors", "torch"),
    }
    for name, forms in only.items():
        if options[name] and form not in forms:
            raise ConfigError(f"--{name.replace('_', '-')} is for --to {' or '.join(forms)}", found=f"--to {form}")
