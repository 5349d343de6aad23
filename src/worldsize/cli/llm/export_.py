"""Room: `worldsize llm export`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("checkpoint")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["bf16", "fp32", "fp16", "fp64"]), default="bf16", show_default=True)
@click.option(
    "--max-shard-size", metavar="SIZE", default="5GB", show_default=True, help="More goes into several files."
)
@click.option("--average", is_flag=True, help="The running average in place of the weights.")
def command(checkpoint: str, out: Path, dtype: str, max_shard_size: str, *, average: bool) -> None:
    """Write the model of CHECKPOINT (a run, a checkpoint, RUN@STEP) to OUT as transformers loads it."""
    from worldsize.recipes.llm import folder

    files = folder.write(checkpoint, out, dtype=dtype, shard=max_shard_size, average=average)
    click.echo(f"{out}: config, tokenizer, weights in {len(files)} file{'s' * (len(files) > 1)}")
