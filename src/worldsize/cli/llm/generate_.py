"""Room: `worldsize llm generate`."""

from __future__ import annotations

import click


@click.command()
@click.argument("model")
@click.argument("prompt")
@click.option("--tokens", type=click.IntRange(1), default=64, show_default=True, help="How many follow at most.")
@click.option(
    "--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="0: always the likeliest."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of what is drawn.")
@click.option("--chat", is_flag=True, help="PROMPT is a user's message in the tokenizer's chat template.")
def command(model: str, prompt: str, tokens: int, temperature: float, seed: int, *, chat: bool) -> None:
    """Print what MODEL (a run, a checkpoint, RUN@STEP, a Hugging Face folder) goes on with after PROMPT."""
    from worldsize.recipes.llm.generate import written

    click.echo(written(model, prompt, tokens, temperature=temperature, seed=seed, chat=chat))
