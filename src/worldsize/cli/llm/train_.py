"""Room: `worldsize llm train`: settings from options and a file, and the training itself in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from worldsize.cli import options
from worldsize.errors import WorldsizeError
from worldsize.launch import env, yamlfile
from worldsize.recipes.llm.config import LLMConfig
from worldsize.runtime import failure

_HELP = """Fine-tune or pre-train a language model, as one rank of whoever starts it.

\b
    worldsize llm train --init_ckpt llama --data_path chats.jsonl --output_dir runs/chat --train_steps 1000
    worldsize run --nproc-per-node 8 --strategy fsdp -m worldsize llm train -c llm.yaml

A file given with -c has the same names; options win over it. `-` and `_` are alike.
"""


@click.command(help=_HELP, context_settings={"max_content_width": 100})
@click.option("-c", "--config", type=click.Path(path_type=Path), help="A YAML file with the same names.")
@click.option(
    "--local_rank", "--local-rank", hidden=True, help="As deepspeed's launcher gives it; the environment says it too."
)
@click.option(
    "--deepspeed", is_flag=True, hidden=True, help="As programs for deepspeed have it; --deepspeed_config decides."
)
@options.from_model(LLMConfig, flags_take_values=True)
def command(config: Path | None, local_rank: str | None, *, deepspeed: bool, **asked: Any) -> None:
    """Read the settings, and train."""
    del local_rank, deepspeed
    values: dict[str, Any] = yamlfile.load(config) if config else {}
    options.over(values, asked)
    try:
        made = LLMConfig.of(values)
        made.required()
        from worldsize.recipes.llm.train import train

        train(made)
    except WorldsizeError as error:
        if "RANK" not in env.read():
            raise
        failure.end(error)
