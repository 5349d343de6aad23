"""Room: text that a model goes on with, on any layout: whole passes, no cache. For looking at what was learnt, not for serving.

Each new token is one forward pass over the whole text, so every layout of the training can do it as it stands, ranks in step.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from worldsize.checkpoint import address, foreign
from worldsize.errors import ConfigError, DataError
from worldsize.recipes.llm import data, folder, lora, shape
from worldsize.recipes.llm.model import Decoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn


def go_on(
    model: Callable[[Tensor], Tensor], tokens: Tensor, count: int, *, temperature: float = 0.0, seed: int = 0
) -> Tensor:
    """Draw the tokens that follow.

    Args:
        model: tokens (1, length) -> logits (1, length, vocabulary).
        tokens: (length,), at least one.
        count: how many follow. All are drawn, so that ranks that work together stay in step.
        temperature: by which logits are divided; 0: always the likeliest.
        seed: of what is drawn.

    Returns:
        the drawn tokens (count,).
    """
    draw = torch.Generator().manual_seed(seed)
    row = tokens[None]
    with torch.no_grad():
        for _ in range(count):
            last = model(row)[0, -1].double().cpu()
            if temperature > 0:
                chosen = torch.multinomial(torch.softmax(last / temperature, -1), 1, generator=draw)
            else:
                chosen = last.argmax(keepdim=True)
            row = torch.cat((row, chosen[None].to(row.device)), dim=1)
    return row[0, len(tokens) :]


def text_of(tokenizer: Any, tokens: Tensor) -> str:
    """Tokens up to the end token as text."""
    numbers = tokens.tolist()
    end = tokenizer.eos_token_id
    cut = numbers[: numbers.index(end)] if end in numbers else numbers
    found: str = tokenizer.decode(cut)
    return found


def encoded(tokenizer: Any, prompt: str, *, chat: bool) -> Tensor:
    """A prompt as tokens; `chat`: as a user's message in the tokenizer's template."""
    if chat:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
    numbers = tokenizer(prompt, add_special_tokens=not chat)["input_ids"]
    if numbers[-1:] == [tokenizer.eos_token_id] and len(numbers) > 1:
        numbers = numbers[:-1]
    if not numbers:
        raise DataError("the prompt has no tokens", found=repr(prompt), do="write something")
    return torch.tensor(numbers)


def loaded(where: str, device: torch.device) -> tuple[Callable[[Tensor], Tensor], Any]:
    """The model of a run, a checkpoint, RUN@STEP or a Hugging Face folder, whole on one device, with its tokenizer.

    Returns:
        tokens (samples, length) -> logits (samples, length, vocabulary); the tokenizer.

    Raises:
        ConfigError, CheckpointError, DataError: there is none, with what is there instead.
    """
    path = Path(where)
    plain = (path / folder.CONFIG).is_file()
    checkpoint = path if plain else address.find(where)
    beside = path if plain else folder.beside(folder.run_of(checkpoint))
    model, logits = _bare(beside, device)
    _fill(where, checkpoint, model)
    return logits, data.load_tokenizer(beside)


def _bare(beside: Path, device: torch.device) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The model without its weights, and what gives its logits."""
    try:
        form = shape.read(beside)
    except shape.ForeignError:
        from transformers import AutoConfig, AutoModelForCausalLM

        other: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(beside), dtype=torch.float32)
        other.to(device).eval()
        return other, lambda tokens: other(input_ids=tokens).logits
    with torch.device("meta"):
        model = Decoder(form)
        adapters = lora.Lora.read(beside)
        if adapters is not None:
            lora.adapt(model, adapters)
    model.to_empty(device=device).eval()
    if form.tied:  # memory is given to each name by itself
        model.lm_head.weight = model.model.embed_tokens.weight
    model.model.turning.reset_parameters()
    return model, model


def _fill(where: str, checkpoint: Path, model: nn.Module) -> None:
    found = foreign.open_weights(checkpoint)
    own = {name.removeprefix("model/") if name.startswith("model/") else name: name for name in found.facts}
    live = dict(model.named_parameters(remove_duplicate=False))
    there = {value for name, value in live.items() if name in own}
    if missing := [name for name, value in live.items() if value not in there]:
        raise ConfigError(
            f"{where} is not the model that its config.json describes",
            found=f"no {missing[0]}",
            do="see who wrote it",
        )
    with torch.no_grad():
        found.fill({own[name]: value for name, value in live.items() if name in own})


def written(where: str, prompt: str, count: int, *, temperature: float, seed: int, chat: bool) -> str:
    """What a model goes on with."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = loaded(where, device)
    tokens = encoded(tokenizer, prompt, chat=chat).to(device)
    return text_of(tokenizer, go_on(model, tokens, count, temperature=temperature, seed=seed))
