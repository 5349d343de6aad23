"""Room: text that a model goes on with, on any layout: whole passes, no cache. For looking at what was learnt, not for serving.

Each new token is one forward pass over the whole text, so every layout of the training can do it as it stands, ranks in step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import worldsize as ws
from worldsize.checkpoint import address, foreign
from worldsize.errors import ConfigError, DataError
from worldsize.recipes.llm import data, folder, impl, lora, samples, shape
from worldsize.recipes.llm.model import Decoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

SEEN = "generated.jsonl"
"""What a training's looks are written to, in the run folder."""


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
    # One length for all passes, as compiled layers and pipelines like it; what is behind does not count for what is before.
    row, begin = torch.cat((tokens, tokens.new_zeros(count)))[None], len(tokens)
    with torch.no_grad():
        for at in range(begin, begin + count):
            last = model(row)[0, at - 1].double().cpu()
            if temperature > 0:
                chosen = torch.multinomial(torch.softmax(last / temperature, -1), 1, generator=draw)
            else:
                chosen = last.argmax(keepdim=True)
            row[0, at] = chosen.item()
    return row[0, begin:]


def prompts(source: str) -> list[str]:
    """Those of a file with one a line, or the one that is given.

    Raises:
        DataError: the file cannot be read, or there is none in it.
    """
    path = Path(source)
    try:
        there = path.is_file()
    except OSError:  # a prompt is too long for the name of a file
        there = False
    try:
        # Not splitlines: it ends lines at characters that stand within texts.
        lines = path.read_text(encoding="utf-8-sig").split("\n") if there else [source]
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} holds no prompts: it is not UTF-8", found=str(error), do="write it as UTF-8"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read", found=error.strerror or str(error)) from error
    if not (found := [line for line in lines if line.strip()]):
        raise DataError(f"{source} holds no prompt", do="write one a line")
    return found


class Looks:
    """Prompts that a training looks at now and then.

    Args:
        source: a file with a prompt a line, or a prompt.
        count: how many tokens follow.
        tokenizer: of the model.
        place: the run folder, which gets a file of what was seen.
    """

    def __init__(self, source: str, count: int, tokenizer: Any, place: Path) -> None:
        self._prompts = prompts(source)
        self._data = [encoded(tokenizer, prompt, chat=False) for prompt in self._prompts]
        self._count, self._tokenizer, self._file = count, tokenizer, place / SEEN

    def look(self, run: ws.Run, logits: Callable[[Tensor], Tensor], step: int) -> None:
        """Say what follows each, and write it down. Collective: ranks share the prompts, or work on each together."""
        loader = torch.utils.data.DataLoader(self._data, batch_size=1)  # type: ignore[arg-type, var-annotated]
        found = run.predict(lambda batch: go_on(logits, batch[0], self._count)[None], loader)
        texts = [text_of(self._tokenizer, row) for row in found]
        for prompt, text in zip(self._prompts, texts, strict=True):
            run.say(f"worldsize: step {step}: {prompt!r} -> {text!r}")
        if ws.here().rank == 0:
            self._write(step, texts)

    def _write(self, step: int, texts: list[str]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            for prompt, text in zip(self._prompts, texts, strict=True):
                file.write(json.dumps({"step": step, "prompt": prompt, "text": text}, ensure_ascii=False) + "\n")


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
        prompt = samples.templated(tokenizer, [{"role": "user", "content": prompt}], open_=True)
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
        other = impl.causal(beside, fresh=True, dtype=torch.float32)
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
