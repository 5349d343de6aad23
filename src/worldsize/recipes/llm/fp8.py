"""Room: layers' projections in eight bits: by torchao, `tensorwise`, `frozen`. Embedding, head and norms stay in bf16.

Micikevicius et al., "FP8 Formats for Deep Learning", 2022. A tensor is multiplied so that its largest value is the format's,
anew for each product (dynamic scaling): one factor for all of it (tensorwise), or one for each row of a product (rowwise).
Sharded weights (tensorwise) are cast before they are gathered, so that half of bf16's bytes travel; the factors of all
of them are found in one exchange a step.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from worldsize.errors import ConfigError
from worldsize.recipes.llm import tensorwise
from worldsize.recipes.llm.frozen import FORWARD
from worldsize.recipes.llm.joined import Gated, InEight, Together
from worldsize.recipes.llm.lora import Adapted
from worldsize.recipes.llm.model import Layer, Linear
from worldsize.strategies.base import brief

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from worldsize.recipes.llm.config import LLMConfig
    from worldsize.recipes.llm.model import Decoder

NAME = "fp8"
_LEAST = (8, 9)
"""Compute capability of a GPU that multiplies in eight bits."""
_GATHERED = ("fsdp", "hsdp")
_OVER_FROZEN = (None, "single", "ddp")
_OVER = (*_OVER_FROZEN, *_GATHERED)


class Eight:
    """What is computed in eight bits, and how.

    Args:
        scaling: tensorwise or rowwise.
        gathered: weights that are sharded travel in eight bits.
        emulated: round as a GPU would, and multiply in float32: for machines that cannot.
    """

    _kind: type[Linear] = Linear

    def __init__(self, scaling: str, *, gathered: bool, emulated: bool = False) -> None:
        self.scaling, self._gathered = scaling, gathered and scaling == "tensorwise"
        self._emulated = emulated
        self._own = scaling == "tensorwise" and not emulated

    def told(self) -> str:
        """What a person hears of it."""
        return f"projections in fp8, {self.scaling}{', gathered in fp8' if self._gathered else ''}"

    def convert(self, model: Decoder, say: Callable[[str], None]) -> Decoder:
        """Put projections of eight bits in place of those of each layer.

        Raises:
            ConfigError: none of them has sizes that can be.
        """
        left, count = [], 0
        for index, layer in enumerate(model.model.layers):
            there = {name: each for name, each in layer.named_modules() if isinstance(each, self._kind)}
            fit = {name: each for name, each in there.items() if _fits(each)}
            left += [
                f"layers.{index}.{name} ({each.out_features} x {each.in_features})"
                for name, each in there.items()
                if name not in fit
            ]
            count += len(fit)
            self._put(layer, fit)
        _tell(count, left, say)
        return model

    def _put(self, layer: nn.Module, fit: dict[str, Linear]) -> None:
        """In place of these, by their names."""
        for name, base in fit.items():
            layer.set_submodule(name, _projection().over(base, self._config(), own=self._own))
        if self._own:
            _join(layer, _projection(), tensorwise.Joint, tensorwise.MLP)

    def ready(self, unit: nn.Module) -> None:
        """Before a part of the model is sharded: its weights know how they travel. See `worldsize.strategies.base.Options`."""
        if not self._gathered:
            return
        for module in unit.modules():
            if isinstance(module, _projection()) and type(module.weight) is nn.Parameter:
                dtype = module.config.cast_config_weight.target_dtype
                cast = _shard()(module.weight.detach(), module.linear_mm_config, dtype)
                module.weight = nn.Parameter(cast, requires_grad=module.weight.requires_grad)

    def moved(self, model: nn.Module) -> None:
        """After weights have changed: find all factors at once, where they would be found one by one. Collective."""
        if self._gathered:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)

    def _config(self) -> Any:
        from dataclasses import replace

        from torchao.float8 import Float8LinearConfig

        return replace(Float8LinearConfig.from_recipe_name(self.scaling), emulate=self._emulated)


class FrozenEight(Eight):
    """Frozen projections with adapters: see `frozen`. Checkpoints hold their weights as they were."""

    _kind = Adapted

    def __init__(self) -> None:
        super().__init__("tensorwise", gathered=False)

    def told(self) -> str:
        """What a person hears of it."""
        return "frozen projections in fp8"

    def _put(self, layer: nn.Module, fit: dict[str, Linear]) -> None:
        """Projections of the same states as one, the others alone."""
        joined = _join(layer, Adapted, Together, Gated)
        for each in fit.values():
            if isinstance(each, Adapted) and each not in joined:
                each.eight = InEight(each)

    def moved(self, model: nn.Module) -> None:
        """Round what has changed: once, and after a checkpoint was read."""
        for module in model.modules():
            held = module.eight if isinstance(module, Adapted) else getattr(module, "together", None)
            if held is not None:
                held.renew()


def of(config: LLMConfig, device: torch.device) -> Eight | None:
    """What settings ask for.

    Raises:
        ConfigError: torchao is needed and not installed, the device cannot, or the layout.
    """
    if config.precision != NAME:
        return None
    if not config.lora_rank and find_spec("torchao") is None:
        raise ConfigError("precision=fp8 needs torchao", do="pip install 'worldsize[fp8]'")
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _LEAST:
        found = device.type if device.type != "cuda" else _gpu(device)
        raise ConfigError(
            "precision=fp8 needs a GPU of compute capability 8.9 or more", found=found, do="use precision=bf16"
        )
    if config.lora_rank:
        if config.strategy not in _OVER_FROZEN:
            do = "use one of them, or precision=bf16"
            raise ConfigError("precision=fp8 with lora_rank is for single and ddp", found=str(config.strategy), do=do)
        return FrozenEight()
    if config.strategy not in _OVER:
        raise ConfigError(
            "precision=fp8 is for single, ddp, fsdp and hsdp", found=str(config.strategy), do="use precision=bf16"
        )
    if config.fp8_scaling == "rowwise":
        import torch._inductor.config as compiler

        # The compiler would skip roundings to bf16 on the way to fp8, and find other factors than the backward pass.
        compiler.emulate_precision_casts = True
    return Eight(config.fp8_scaling, gathered=config.strategy in _GATHERED)


def _join(
    layer: nn.Module, kind: type[nn.Linear], joint: Callable[..., Any], mlp: Callable[..., Any]
) -> list[nn.Linear]:
    """Have projections of the same states, and those of the MLP, computed as one, where all of them are of a kind and fit."""
    assert isinstance(layer, Layer)
    taken: list[nn.Linear] = []
    for module, names, made in (
        (layer.self_attn, ("q_proj", "k_proj", "v_proj"), joint), (layer.mlp, ("gate_proj", "up_proj", "down_proj"), mlp),
    ):  # fmt: skip
        parts = [cast("nn.Linear", module.get_submodule(name)) for name in names]
        biased = made is mlp and any(part.bias is not None for part in parts)
        if all(isinstance(part, kind) and _fits(part) for part in parts) and not biased:
            module.together = made(*parts)
            taken += parts
    return taken


def _fits(projection: nn.Linear) -> bool:
    return projection.in_features % tensorwise.MULTIPLE == projection.out_features % tensorwise.MULTIPLE == 0


def _tell(count: int, left: list[str], say: Callable[[str], None]) -> None:
    """Say which projections are left as they are, beside so many that are not. Raises ConfigError where that is none."""
    if not count:
        raise ConfigError(
            "precision=fp8, and no projection has sizes that are multiples of 16", found=brief(left),
            do="use precision=bf16",
        )  # fmt: skip
    if left:
        say(f"fp8: {len(left)} of {len(left) + count} projections stay in bf16, their sizes are no multiples of 16: "
            f"{brief(left)}")  # fmt: skip


def _gpu(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}: {major}.{minor}"


@cache
def _projection() -> Any:
    """The class, made when torchao is there."""
    from torchao.float8.float8_linear import Float8Linear

    class Projection(Float8Linear):  # type: ignore[misc]
        """A projection in eight bits, with fresh weights of the model's own spread."""

        spread = 0.0
        joint: tensorwise.Joint | None = None

        @classmethod
        def over(cls, base: Linear, config: Any, *, own: bool) -> Projection:
            """In place of another, with its weights. `own`: computed by `tensorwise`, not by torchao."""
            made: Projection = cls.from_float(base, config)
            made.spread, made.joint = base.spread, tensorwise.Joint(made) if own else None
            return made

        def forward(self, states: Tensor) -> Tensor:
            """(..., inputs) -> (..., outputs)."""
            found: Tensor = super().forward(states) if self.joint is None else self.joint(states)[0]
            return found

        def reset_parameters(self) -> None:
            """As `Linear`."""
            Linear.reset_parameters(self)

    return Projection


@cache
def _shard() -> Any:
    """The class of a sharded weight: torchao's, whose cast before it is gathered is one pass on GPUs in place of three."""
    from torch.utils._pytree import tree_map_only
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Cast

    class Shard(Cast):  # type: ignore[misc]
        """A shard."""

        @classmethod
        def __torch_dispatch__(cls, *args: Any) -> Any:
            """What torchao makes of it stays of this class."""
            found = super().__torch_dispatch__(*args)
            made = lambda each: cls(each._tensor, each._linear_mm_config, each._dtype)  # noqa: E731, SLF001
            return tree_map_only(Cast, made, found)

        def fsdp_pre_all_gather(self, mesh: Any) -> tuple[Any, Any]:
            """What travels, and what is needed to understand it."""
            scale = self._precomputed_scale
            if scale is None or self._dtype is not FORWARD:
                return super().fsdp_pre_all_gather(mesh)  # type: ignore[no-any-return]
            return (tensorwise.scaled(self._tensor, scale),), (scale,)

    Shard.__qualname__ = Shard.__name__
    return Shard


def __getattr__(name: str) -> Any:
    """`Shard`, for who reads one that was pickled."""
    if name == "Shard":
        return _shard()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
