"""Room: the small interface between the loop and a layout. Knows models and collectives; never steps, files, launchers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from worldsize.errors import ConfigError, StepError
from worldsize.runtime.grid import Grid, Sizes
from worldsize.strategies.norm import gradients, limit_, norm

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor
    from torch.optim import Optimizer

    from worldsize.runtime.session import Session
    from worldsize.strategies.precision import Precision

Padding = Literal["none", "one", "equal"]
"""What a rank with fewer micro-batches than others must still run, with weight 0: nothing; one where it has none at
all; as many as the busiest rank."""
Recompute = Callable[[Sequence[nn.Module], Callable[[nn.Module], AbstractContextManager[None]]], None]
"""Activation checkpointing of a program's own: gets a model's repeated blocks, before they are sharded and compiled, and what
must stand around a second pass of one of them."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a model may ask of any strategy.

    Attributes:
        init: "here" builds the whole model on every rank. "meta" builds it without memory and then fills module by
            module through `reset_parameters`, each under a random key of its path: the same weights under every
            strategy, and FSDP never holds more than one unit whole. See `worldsize.strategies.building`.
        ready: gets each unit that FSDP is about to shard, filled, and last the whole model: for weights that know a way of
            their own to be gathered.
        low_frozen: hold parameters that are not trained in the dtype that is computed in, not in that of the others.
        compile: compile the model in place: True, a mode's name, or torch.compile's arguments by name.
        activation_checkpointing: recompute the activations of these module classes in the backward pass; True for
            the repeated blocks; or what sees to that itself, see `Recompute`.
        unused_parameters: "error" names a parameter that got no gradient; "allow" searches for them at each step.
        bucket_mb: size of the buckets in which DDP sums gradients, in MiB.
        wrap: module classes that FSDP shards as one unit, () for one unit in all; None for the repeated blocks.
        reshard: of how many of its units FSDP frees the whole parameters after their forward pass, as a share, from the first
            unit on: True for all, False for none. The last ones are wanted first in the backward pass.
        offload: keep FSDP's shards and the optimizer's state in host memory.
        tp_plan: how modules are split over tensor ranks, by name; None for the model's own. See `tensorplan`.
        loss_parallel: under tp, outputs stay split over classes up to the cross entropy.
        deepspeed: DeepSpeed's JSON, as a mapping or a file. See `worldsize.strategies.deepspeed.config`.
        schedule: under pp, the order of work: see `worldsize.strategies.pipeline.order.SCHEDULES`.
        stages: under pp, in how many stages the model is cut; None for as many as the schedule wants.
        split: under pp, names of the modules with which the stages after the first begin; None for balanced stages.
        balance: under pp, what is balanced: "parameters", or the "time" of a forward pass of `sample`.
        sample: under pp, a batch of inputs for `balance="time"`; a tuple for several arguments.
    """

    init: Literal["here", "meta"] = "here"
    ready: Callable[[nn.Module], None] | None = None
    low_frozen: bool = False
    compile: bool | str | Mapping[str, Any] = False
    activation_checkpointing: bool | tuple[type[nn.Module], ...] | Recompute = False
    unused_parameters: Literal["error", "allow"] = "error"
    bucket_mb: float = 25.0
    wrap: tuple[type[nn.Module], ...] | None = None
    reshard: float = True
    offload: bool = False
    tp_plan: Mapping[str, Any] | None = None
    loss_parallel: bool = False
    deepspeed: Mapping[str, Any] | str | Path | None = None
    schedule: str = "1f1b"
    stages: int | None = None
    split: Sequence[str] | None = None
    balance: Literal["parameters", "time"] = "parameters"
    sample: Any = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Options:
        """Options by name. Raises ConfigError on an unknown one."""
        unknown = set(values) - set(cls.__dataclass_fields__)
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise ConfigError(f"unknown strategy option {sorted(unknown)}", do=f"choose from {known}")
        return cls(**values)

    def __post_init__(self) -> None:
        for name, known in (
            ("init", ("here", "meta")), ("unused_parameters", ("error", "allow")), ("balance", ("parameters", "time"))
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"strategy option {name}", found=repr(getattr(self, name)), do=f"choose one of {known}"
                )
        if not 0 <= self.reshard <= 1:
            raise ConfigError("strategy option reshard", found=repr(self.reshard), do="give a share between 0 and 1")


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a strategy works."""

    session: Session
    precision: Precision
    options: Options = field(default_factory=Options)
    sizes: Sizes = field(default_factory=Sizes)
    batch: tuple[int, int | None] = (0, None)
    """Samples of a step, 0 where nobody knows, and of a forward pass, None where the loader will say it."""
    schedule: str | None = None
    """Of a pipeline, where the command line says it."""


@dataclass(frozen=True, slots=True)
class Coming:
    """A micro-batch that a turn is going to bring.

    Attributes:
        batch: as the program gets it.
        seed: what its random numbers come from.
        dummy: whether it counts for nothing.
    """

    batch: Any
    seed: int
    dummy: bool


class Strategy(ABC):
    """How models and work lie over ranks.

    A strategy is made once per run and name, places any number of models, and is told before each micro-batch
    whether that is the last one of the step, so that gradients are exchanged once.
    """

    name: ClassVar[str]
    padding: ClassVar[Padding] = "none"
    rehearses: ClassVar[bool] = True
    """Whether `forget` undoes all that a pass forward and backward leaves behind."""
    rehearsing = False
    """Whether passes are made that are no part of a step: what ranks exchange in them without need may stay undone."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.device = setting.session.device
        self.notes: list[str] = []
        """What the user should read once, of what was asked."""
        world, sizes = setting.session.world, setting.sizes
        self.grid = Grid.of(world, sizes, self.replicas(sizes.shares(world)))
        self._placed: dict[nn.Module, list[tuple[str, nn.Parameter, bool]]] = {}

    @property
    def rank(self) -> int:
        """Data-parallel rank of this process: which share of the global batch it works on."""
        return self.grid.share

    @property
    def ranks(self) -> int:
        """How many data-parallel ranks there are."""
        return self.grid.shares

    def replicas(self, shares: int) -> int:
        """How many copies of the model's shards there are, where the batch is dealt into so many shares."""
        return shares

    @property
    def averaged(self) -> int:
        """Gradients come out divided by this number: losses are multiplied by it so that they come out summed."""
        return 1

    def place(self, build: Callable[[], nn.Module], options: Options) -> nn.Module:
        """Build the user's model and lay it over the ranks. Collective.

        Args:
            build: makes the whole model; every rank gets the same weights from it.
            options: see `Options`.

        Returns:
            the user's model: same class, same attributes, same parameter names.
        """
        model = self.lay(build, options)
        self._placed[model] = [(name, value, value.requires_grad) for name, value in model.named_parameters()]
        return model

    @abstractmethod
    def lay(self, build: Callable[[], nn.Module], options: Options) -> nn.Module:
        """What `place` does under this strategy."""

    def open(self, model: nn.Module, batches: Sequence[Coming]) -> None:
        """Before the first micro-batch of a turn that trains the model: all of this rank's, dummies among them."""

    def close(self, model: nn.Module) -> None:
        """After the last one: from here on gradients are the whole world's."""

    def exchange(self, model: nn.Module, *, last: bool) -> None:
        """Before a micro-batch of the model's own turn: gradients are exchanged in its backward pass iff `last`.

        Raises:
            StepError: a parameter was frozen or unfrozen after placing.
        """
        del last
        changed = [name for name, value, trained in self._placed[model] if value.requires_grad is not trained]
        if changed:
            raise StepError(
                "requires_grad was changed after run.model, where the exchange of gradients cannot follow it",
                found=brief(changed),
                do="freeze before the model is placed (in its builder)",
            )

    def stand_by(self, model: nn.Module, *, last: bool) -> None:
        """The same in a turn that trains other models: this one's gradients are thrown away afterwards."""

    def backward(self, losses: Tensor, weights: Tensor) -> None:
        """Send the losses of a micro-batch backward, each with its weight (of the same shape)."""
        torch.autograd.backward(losses, weights)

    def sent(self, model: nn.Module) -> None:
        """After each backward pass of the model's own turn. Raises StepError where it went past the exchange."""

    def forget(self, model: nn.Module) -> None:
        """After passes that were no part of a step, or that an error ended: as if there had been none."""
        model.zero_grad(set_to_none=True)

    def check_gradients(self, model: nn.Module) -> list[str]:
        """Names of parameters that got no gradient where that makes the exchange wrong."""
        del model
        return []

    def without_gradient(self, model: nn.Module) -> list[str]:
        """Names of trained parameters that have no gradient now."""
        return [name for name, value, trained in self._placed[model] if trained and value.grad is None]

    def differing_buffers(self, model: nn.Module) -> list[str]:
        """Names of saved buffers that are not the same on all ranks, so that no rank's is the right one. Collective."""
        del model
        return []

    def adopt(self, optimizer: Optimizer, models: Sequence[nn.Module], clip: float | None) -> Optimizer:
        """The optimizer that the run uses for the one that the program made over placed models: mostly itself.

        Another one has `made`, the program's: a checkpoint says its class.
        """
        del models, clip
        return optimizer

    def clip_(
        self, parameters: Sequence[nn.Parameter], *, divisor: float, most: float | None, wanted: bool
    ) -> Tensor | None:
        """Divide the gradients of an optimizer, and scale them down where they are too large together.

        Args:
            parameters: what the optimizer trains.
            divisor: what they are divided by: a loss scale, a count.
            most: the largest norm that all of them together may have, None for any.
            wanted: whether the norm is needed.

        Returns:
            the norm over all ranks before it is limited (0-dim tensor), where it is needed.
        """
        if not wanted and most is None and divisor == 1.0:
            return None  # to look for the gradients of some hundred shards takes as long as a dozen launches
        grads = gradients(parameters)
        size = self.norm(grads) / divisor if wanted else None
        limit_(grads, size, divisor, most)
        return size

    def norm(self, grads: Sequence[Tensor]) -> Tensor:
        """The 2-norm over the gradients of all ranks together, each counted once. Collective where they are sharded."""
        return norm(grads, self.device)

    def held(self, model: nn.Module) -> dict[str, Tensor]:
        """What this rank holds of a model's state, by name: its own tensors, which training moves.

        What is written into them reaches forward passes once `changed` was called.
        """
        return {name: value.detach() for name, value in model.state_dict().items()}

    def changed(self, model: nn.Module) -> None:
        """After something was written into the tensors that `held` gave. Collective."""

    def state(self, model: nn.Module, held: Mapping[str, Tensor] | None = None) -> Mapping[str, Any]:
        """What checkpoints keep of a model on this rank, under the names of the user's own model. Collective.

        Args:
            model: a placed one.
            held: other values than its own, laid out as `held` gives them: an average.
        """
        found: Mapping[str, Any] = model.state_dict() if held is None else held
        return found

    def room(self, model: nn.Module, held: Mapping[str, Tensor] | None = None) -> Mapping[str, Any]:
        """What a checkpoint is read into: what `state` gives, or `Stretch`es of it that need not be gathered. Collective.

        Args:
            model: a placed one.
            held: as for `state`.
        """
        return self.state(model, held)

    def filled(self, model: nn.Module, state: Mapping[str, Any], held: Mapping[str, Tensor] | None = None) -> None:
        """After something was read into the tensors that `state` or `room` gave. Collective.

        Args:
            model: a placed one.
            state: what they gave.
            held: what it was given.
        """

    def names(self, model: nn.Module) -> list[str] | None:
        """The whole model's parameters in their order, where this rank holds only some of them; else None."""
        del model
        return None

    def start_sum_(self, tensor: Tensor) -> Callable[[], Any]:
        """Begin to sum a small tensor on `device` over ranks, in place.

        Returns:
            what to call before the tensor is used: orders the sum before whatever the device does next.
        """
        del tensor
        return _nothing

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every rank, in rank order."""
        return [tensor]

    def whole(self, model: nn.Module) -> dict[str, Tensor]:
        """A full copy of the model's state in host memory, on every rank. Collective."""
        return {name: full(value).detach().cpu().clone() for name, value in self.state(model).items()}

    def layout(self) -> dict[str, Any]:
        """What a checkpoint says about how it was written."""
        written = self.grid.written()
        mesh = {"mesh": written} if written.keys() - {"dp_replicate"} else {}
        return {
            "strategy": self.name, "ranks": self.grid.world, "precision": self.setting.precision.name, **mesh,
        }  # fmt: skip


def _nothing() -> None:
    """One rank's sum is there at once."""


def full(tensor: Tensor) -> Tensor:
    """A whole tensor from a shard (collective), or the tensor itself."""
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def brief(names: list[str], most: int = 5) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
