"""Room: low-rank adapters beside frozen projections: made, described as PEFT does, added to their weights at export.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021. Names are those of the peft library.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from worldsize.checkpoint.export import Weights
from worldsize.errors import ConfigError
from worldsize.recipes.llm.frozen import product
from worldsize.recipes.llm.model import Linear
from worldsize.runtime.sharded import is_sharded, local

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from worldsize.recipes.llm.config import LLMConfig
    from worldsize.recipes.llm.joined import InEight
    from worldsize.recipes.llm.model import Decoder

FILE = "adapter_config.json"
OWN = "*.lora_[AB]"
"""Names of what is trained."""
_DOWN, _UP = ".lora_A", ".lora_B"


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters.

    Attributes:
        rank: the size between the two factors.
        alpha: what an adapter gives is multiplied by alpha / rank.
        dropout: of what goes into an adapter.
        targets: the names of projections within a layer.
    """

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> Lora | None:
        """The adapters that a folder's description names; None where it has none."""
        path = folder / FILE
        if not path.is_file():
            return None
        said = json.loads(path.read_text(encoding="utf-8"))
        return cls(said["r"], said["lora_alpha"], said["lora_dropout"], tuple(said["target_modules"]))

    @property
    def parts(self) -> tuple[int, float, frozenset[str]]:
        """What belongs to the weights, and may not change once there are some."""
        return self.rank, self.alpha, frozenset(self.targets)

    def text(self, base: str) -> str:
        """The description, as PEFT reads it."""
        said: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": list(self.targets),
            "bias": "none",
        }
        return json.dumps(said, indent=2) + "\n"


class Adapted(Linear):
    """A projection with an adapter beside it, which begins with a factor of zeros: the model is what it was."""

    tp_beside: ClassVar = {
        "columns": {"lora_A": None, "lora_B": 0}, "rowwise": {"lora_A": 1, "lora_B": None},
        "rowwise_sequence": {"lora_A": 1, "lora_B": None},
    }  # fmt: skip
    """Along which dimension tensor ranks split the factors where they split the weight in that way."""
    eight: InEight | None
    """What is computed with in the frozen weight's stead."""

    def __init__(self, base: Linear, lora: Lora) -> None:
        self._times, self._dropout = lora.alpha / lora.rank, lora.dropout
        self.eight = None
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, spread=base.spread)
        self.lora_A = nn.Parameter(self.weight.new_empty(lora.rank, base.in_features))
        self.lora_B = nn.Parameter(self.weight.new_empty(base.out_features, lora.rank))
        self._fresh()

    def reset_parameters(self) -> None:
        """The projection as ever, the adapter as the paper says."""
        super().reset_parameters()
        if "lora_A" in self._parameters:
            self._fresh()

    def _fresh(self) -> None:
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B)

    def forward(self, states: Tensor) -> Tensor:
        """(samples, length, inputs) -> (samples, length, outputs)."""
        down, up = self._factors(states)
        if is_sharded(states) or (self._dropout and self.training):
            seen = functional.dropout(states, self._dropout, self.training) if self._dropout else states
            low = functional.linear(functional.linear(seen, down), up)
            return torch.add(super().forward(states), low, alpha=self._times)
        held = local(self.weight) if self.eight is None else self.eight.whole
        return self.biased(product(states, held, down, self._times * up))

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """(rank, inputs) and (outputs, rank), whole: their product is what the adapter adds to the weight."""
        return self.lora_A, self._times * self.lora_B

    def biased(self, outputs: Tensor) -> Tensor:
        """With the projection's bias, where it has one."""
        return outputs if self.bias is None else outputs + local(self.bias).to(outputs.dtype)

    def _factors(self, states: Tensor) -> tuple[Tensor, Tensor]:
        if type(self.lora_A) is nn.Parameter or is_sharded(states) or not is_sharded(self.lora_A):
            return self.lora_A, self.lora_B
        from torch.distributed.tensor import Partial

        # The first is whole on each tensor rank, which sees its part of the second: its gradient is a part of the sum.
        return self.lora_A.to_local(grad_placements=[Partial()]), local(self.lora_B)


def of(config: LLMConfig) -> Lora | None:
    """The adapters that settings ask for."""
    if not config.lora_rank:
        return None
    alpha = 2.0 * config.lora_rank if config.lora_alpha is None else config.lora_alpha
    targets = tuple(name.strip() for name in config.lora_targets.split(",") if name.strip())
    return Lora(config.lora_rank, alpha, config.lora_dropout, targets)


def refuse_others(begun: Path, config: LLMConfig) -> None:
    """The checkpoint has the factors and not by what they are multiplied: a run goes on with the adapters that it has.

    Raises:
        ConfigError: the settings ask for others than the folder describes. Drop-out may change.
    """
    kept, asked = Lora.read(begun), of(config)
    if (kept and kept.parts) != (asked and asked.parts):
        raise ConfigError(
            "these are not the adapters that this run was begun with",
            found=f"{kept} in its folder, {asked} asked for",
            do="set lora_rank, lora_alpha and lora_targets as then, or choose another output_dir",
        )


def adapt(model: Decoder, lora: Lora) -> Decoder:
    """Put adapters beside the projections of each layer, and freeze all else.

    Raises:
        ConfigError: layers have no projection of a name in `targets`.
    """
    model.requires_grad_(requires_grad=False)
    for layer in model.model.layers:
        there = {name.rpartition(".")[2]: name for name, each in layer.named_modules() if isinstance(each, Linear)}
        if unknown := [name for name in lora.targets if name not in there]:
            raise ConfigError(
                "lora_targets names what layers do not have", found=", ".join(unknown), do=f"of {', '.join(there)}"
            )
        for name in lora.targets:
            base = layer.get_submodule(there[name])
            assert isinstance(base, Linear)
            made = Adapted(base, lora)
            made.weight.requires_grad = False
            if made.bias is not None:
                made.bias.requires_grad = False
            layer.set_submodule(there[name], made)
    return model


@dataclass(frozen=True, slots=True)
class Merged(Weights):
    """A checkpoint's weights with what adapters give added to them.

    Attributes:
        factors: the weight that each adapter belongs to -> where its two factors lie in the checkpoint.
        times: by what their product is multiplied.
    """

    factors: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    times: float = 1.0

    @classmethod
    def of(cls, weights: Weights, lora: Lora) -> Merged:
        """The weights of a model that was trained with adapters."""
        own = {name: place for name, place in weights.own.items() if not name.endswith((_DOWN, _UP))}
        bases = [name.removesuffix(_DOWN) for name in weights.own if name.endswith(_DOWN)]
        factors = {f"{base}.weight": (weights.own[base + _DOWN], weights.own[base + _UP]) for base in bases}
        return cls(weights.opened, weights.model, own, weights.ties, weights.dtype, factors, lora.alpha / lora.rank)

    def tensor(self, name: str) -> Tensor:
        """Read one tensor, and add its adapter in float32 at least."""
        if name not in self.factors:
            return Weights.tensor(self, name)
        base, down, up = (self.opened.tensor(place) for place in (self.own[name], *self.factors[name]))
        exact = torch.float64 if up.dtype is torch.float64 else torch.float32
        return base.to(exact).addmm(up.to(exact), down.to(exact), alpha=self.times).to(self.dtype_of(name))
