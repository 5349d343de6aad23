"""Room: the small interface between the loop and a layout. Knows models and collectives; never steps, files, launchers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from worldsize.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from worldsize.runtime.session import Session
    from worldsize.strategies.precision import Precision

Padding = Literal["none", "one", "equal"]
"""What a rank with fewer micro-batches than others must still run, with weight 0: nothing; one where it has none at
all; as many as the busiest rank."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a model may ask of any strategy.

    Attributes:
        compile: compile the model in place (torch.compile; True or a mode's name).
        activation_checkpointing: recompute the activations of these module classes in the backward pass; True for
            the repeated blocks.
        unused_parameters: "error" names a parameter that got no gradient; "allow" searches for them at each step.
        wrap: module classes that FSDP shards as one unit; None for the repeated blocks.
        reshard: whether FSDP frees a unit's whole parameters after its forward pass.
        offload: keep FSDP's shards and the optimizer's state in host memory.
    """

    compile: bool | str = False
    activation_checkpointing: bool | tuple[type[nn.Module], ...] = False
    unused_parameters: Literal["error", "allow"] = "error"
    wrap: tuple[type[nn.Module], ...] | None = None
    reshard: bool = True
    offload: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Options:
        """Options by name. Raises ConfigError on an unknown one."""
        unknown = set(values) - set(cls.__dataclass_fields__)
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise ConfigError(f"unknown strategy option {sorted(unknown)}", do=f"choose from {known}")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a strategy works."""

    session: Session
    precision: Precision
    options: Options = field(default_factory=Options)


class Strategy(ABC):
    """How models and work lie over ranks.

    A strategy is made once per run and name, places any number of models, and is told before each micro-batch
    whether that is the last one of the step, so that gradients are exchanged once.
    """

    name: ClassVar[str]
    padding: ClassVar[Padding] = "none"

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.device = setting.session.device

    @property
    def rank(self) -> int:
        """Data-parallel rank of this process: which share of the global batch it works on."""
        return self.setting.session.comm.rank

    @property
    def ranks(self) -> int:
        """How many data-parallel ranks there are."""
        return self.setting.session.comm.size

    @property
    def averaged(self) -> int:
        """Gradients come out divided by this number: losses are multiplied by it so that they come out summed."""
        return 1

    @abstractmethod
    def place(self, build: Callable[[], nn.Module], options: Options) -> nn.Module:
        """Build the user's model and lay it over the ranks.

        Args:
            build: makes the whole model; every rank gets the same weights from it.
            options: see `Options`.

        Returns:
            the user's model: same class, same attributes, same parameter names.
        """

    def exchange(self, model: nn.Module, *, last: bool) -> None:
        """Before a micro-batch of the model's own turn: gradients are exchanged in its backward pass iff `last`."""

    def stand_by(self, model: nn.Module, *, last: bool) -> None:
        """The same in a turn that trains other models: this one's gradients are thrown away afterwards."""

    def check_gradients(self, model: nn.Module) -> list[str]:
        """Names of parameters that got no gradient where that makes the exchange wrong."""
        del model
        return []

    def sum_(self, tensor: Tensor) -> Any:
        """Start to sum a small tensor on `device` over ranks, in place. Returns what to wait on, or None."""
        del tensor
        return None

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every rank, in rank order."""
        return [tensor]

    def whole(self, model: nn.Module) -> dict[str, Tensor]:
        """A full copy of the model's state in host memory, on every rank. Collective."""
        return {name: full(value).detach().cpu().clone() for name, value in model.state_dict().items()}

    def layout(self) -> dict[str, Any]:
        """What a checkpoint says about how it was written."""
        return {"strategy": self.name, "ranks": self.ranks, "precision": self.setting.precision.name}


def full(tensor: Tensor) -> Tensor:
    """A whole tensor from a shard (collective), or the tensor itself."""
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def materialise(build: Callable[[], nn.Module], precision: Precision, device: torch.device) -> nn.Module:
    """Build a model whole, in the parameters' dtype, on the device."""
    model = build()
    return model.to(device=device, dtype=precision.parameters)
