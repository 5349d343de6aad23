"""Room: whose code computes the model: the native decoder, or transformers' own class for all other families.

Both give losses and logits by position under the names of the folder's files. What only the native one can (packing, pipelines,
a head that never holds all logits, weights read shard by shard) is refused or left out for the other.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from worldsize.errors import ConfigError
from worldsize.recipes.llm import attention, data, fp8, lora, losses, shape
from worldsize.recipes.llm.model import Decoder, Ways

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor, nn

    import worldsize as ws
    from worldsize.recipes.llm.config import LLMConfig
    from worldsize.recipes.llm.data import Batch
    from worldsize.recipes.llm.fp8 import Eight
    from worldsize.recipes.llm.lora import Lora


_COMPUTED = {
    "bf16": torch.bfloat16, fp8.NAME: torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64,
}  # fmt: skip
"""What attention is computed in."""


class Impl(Protocol):
    """One way to have a model."""

    vocabulary: int
    packs: bool
    """Whether several documents may share a row."""

    def told(self, *, packed: bool) -> str:
        """What a person hears of it; whether rows hold several documents."""
        ...

    def flops(self, length: int) -> float:
        """Operations a token, see `shape.Shape.flops`."""
        ...

    def place(self, run: ws.Run, options: dict[str, Any], *, fresh: bool) -> nn.Module:
        """The model on the run's ranks, with the folder's weights or fresh ones."""
        ...

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """One loss a position (samples, length), 0 where its label is ignored; length may be that of rows with padding."""
        ...

    def moved(self, model: nn.Module) -> None:
        """After its weights have changed. Collective."""
        ...

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """(samples, length) -> (samples, length, vocabulary)."""
        ...


class Native:
    """The decoder of `model`."""

    packs = True

    def __init__(
        self, folder: Path, form: shape.Shape, ways: Ways, adapters: Lora | None = None, eight: Eight | None = None,
        *, kernel: Callable[..., str], cuts: int = 1,
    ) -> None:  # fmt: skip
        self._folder, self._form, self._ways, self._adapters, self._eight = folder, form, ways, adapters, eight
        self._kernel, self._multiple = kernel, ways.parts * cuts
        self.vocabulary = form.vocabulary
        self._added = 0
        """Parameters of adapters, once they are placed."""

    def told(self, *, packed: bool) -> str:
        """See `Impl`."""
        adapters = f"; adapters of rank {self._adapters.rank}" if self._adapters else ""
        size = f"{self._form.family}, {self._form.parameters:,} parameters"
        eight = f"; {self._eight.told()}" if self._eight else ""
        return f"{size}; attention: {self._kernel(packed=packed)}{adapters}{eight}"

    def flops(self, length: int) -> float:
        """See `Impl`. Of a frozen weight no gradient is computed: four for it, and six for what is trained beside it."""
        frozen = 2.0 * self._form.multiplied if self._adapters else 0.0
        return self._form.flops(length) - frozen + 6.0 * self._added

    def place(self, run: ws.Run, options: dict[str, Any], *, fresh: bool) -> nn.Module:
        """Built without memory, filled module by module, then each rank reads its part."""

        def build() -> nn.Module:
            made = Decoder(self._form, self._ways)
            if self._adapters:
                made = lora.adapt(made, self._adapters)
                self._added = sum(value.numel() for value in made.parameters() if value.requires_grad)
            return self._eight.convert(made, run.say) if self._eight else made

        ready: dict[str, Any] = {"ready": self._eight.ready} if self._eight else {}
        model = run.model(build, init="meta", low_frozen=self._adapters is not None, **ready, **options)
        if not fresh:
            run.warm_start(model, self._folder, fresh=lora.OWN if self._adapters else None)
        self.moved(model)
        return model

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """See `Impl`."""
        names = ("tokens", "labels", "position_ids", "documents")
        tokens, labels, places, documents = (
            data.padded(batch[name], name, self._multiple) if name in batch else None for name in names
        )
        # With padding, whose losses are 0: cut off, the sum's gradient would no longer be one number, see `losses.chunked`.
        found: Tensor = model(tokens, labels, places, documents)
        return found

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """See `Impl`."""
        found: Tensor = model(data.padded(tokens, "tokens", self._multiple))
        return found[:, : tokens.shape[1]]

    def moved(self, model: nn.Module) -> None:
        """See `Impl`."""
        if self._eight:
            self._eight.moved(model)


class Transformers:
    """transformers' class for the folder's `model_type`."""

    packs = False

    def __init__(self, folder: Path, config: LLMConfig) -> None:
        said = shape.config(folder)
        self._folder, self._family, self.vocabulary = (
            folder,
            said.get("model_type", "?"),
            int(said.get("vocab_size", 0)),
        )
        for name in ("pipe_parallel_size", "context_parallel_size"):
            if getattr(config, name) > 1:
                raise ConfigError(
                    f"{name} is for the native decoder", found=f"{getattr(config, name)}, model_type {self._family!r}",
                    do="use ddp, fsdp, hsdp, or model_parallel_size where transformers has a plan for it",
                )  # fmt: skip
        if config.precision == fp8.NAME:
            raise ConfigError(
                "precision fp8 is for the native decoder",
                found=f"model_type {self._family!r}",
                do="use precision=bf16",
            )
        if config.lora_rank:
            raise ConfigError(
                "lora_rank is for the native decoder", found=f"{config.lora_rank}, model_type {self._family!r}",
                do="train all weights of it",
            )  # fmt: skip
        asked = [
            name for name in ("attention", "packing") if name in config.model_fields_set and getattr(config, name)
        ]
        if asked:
            raise ConfigError(
                f"{asked[0]} is for the native decoder",
                found=f"{getattr(config, asked[0])}, model_type {self._family!r}",
                do="leave it out; use_flash_attn chooses between sdpa and plain products",
            )
        self._kernel = "sdpa" if config.use_flash_attn else "eager"
        self._count = 0

    def told(self, *, packed: bool) -> str:
        """See `Impl`."""
        del packed
        return f"{self._family} by transformers, {self._count:,} parameters; attention: {self._kernel}"

    def flops(self, length: int) -> float:
        """Six for each parameter; what attention adds is not known here."""
        del length
        return 6.0 * self._count

    def place(self, run: ws.Run, options: dict[str, Any], *, fresh: bool) -> nn.Module:
        """Built whole on every rank; drop-out as its configuration says."""

        def build() -> nn.Module:
            how = {"attn_implementation": self._kernel, "dtype": torch.float32}
            made = causal(self._folder, fresh=fresh, **how)
            made.config.use_cache = False
            self._count = sum(value.numel() for value in made.parameters())
            found: nn.Module = made.train()
            return found

        return run.model(build, **options)

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Padding stands behind, so causality alone keeps it out of sight."""
        return losses.of_logits(self.logits(model, batch["tokens"]), batch["labels"])

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """See `Impl`."""
        found: Tensor = model(input_ids=tokens).logits
        return found

    def moved(self, model: nn.Module) -> None:
        """See `Impl`."""


def causal(folder: Path, *, fresh: bool, **how: Any) -> Any:
    """What transformers makes of a folder, with its weights or fresh ones; nothing is fetched.

    Raises:
        ConfigError: it knows no such model, or the folder lacks weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, __version__

    try:
        if fresh:
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True), **how)
        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **how)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"transformers {__version__} makes no causal language model of {folder}",
            found=str(error).splitlines()[0],
            do="see its config.json and weights, or whether a newer transformers knows it",
        ) from error


def chosen(config: LLMConfig, folder: Path, device: torch.device) -> Impl:
    """The native decoder where it knows the family, unless another is asked for.

    Raises:
        ConfigError: the native one is asked for and does not compute this model; or the folder has no model.
    """
    if config.model_impl == "transformers":
        return Transformers(folder, config)
    try:
        form = shape.read(folder)
    except shape.ForeignError:
        if config.model_impl == "native":
            raise
        return Transformers(folder, config)
    name = config.attention or ("auto" if config.use_flash_attn else "math")
    # A pipeline learns the shapes between its stages from layers that are not laid over tensor ranks: whole sequences.
    parts = config.model_parallel_size if config.sequence_parallel and config.pipe_parallel_size == 1 else 1
    ways = Ways(
        attention.kernel(name, device, form.head_dim),
        fused=config.use_fused_ops,
        compiled=config.compile and device.type == "cuda",
        parts=1 if form.vocabulary % parts else parts,
    )
    windows = any(window is not None and window < config.max_seq_len for window in form.windows)
    packed = config.packing and config.context_parallel_size == 1 and getattr(ways.kernel, "packed", None) is not None
    if name == "flash" and windows and not packed:
        raise ConfigError(
            "attention=flash computes no windows", found=f"model_type {form.family!r}, max_seq_len {config.max_seq_len}",
            do="leave it at auto",
        )  # fmt: skip
    tensor = config.model_parallel_size
    heads = attention.Heads(max(1, form.heads // tensor), max(1, form.kv_heads // tensor), form.head_dim)
    cuts = config.context_parallel_size
    masked = windows or (cuts > 1 and heads.queries != heads.keys)
    told = partial(attention.told, ways.kernel, heads, device, _COMPUTED[config.precision], masked=masked)
    return Native(folder, form, ways, lora.of(config), fp8.of(config, device), kernel=told, cuts=cuts)
