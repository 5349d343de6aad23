"""Room: what a program holds in the place of its optimizer: its own groups and state, over partitions that DeepSpeed moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from worldsize.errors import CheckpointError, StepError
from worldsize.runtime.stretch import Stretch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from worldsize.strategies.deepspeed.fragments import Fragments, Shards


class PartitionedOptimizer(Optimizer):
    """An optimizer over the program's own parameters.

    Learning rates and other hyperparameters that are written into its groups reach DeepSpeed at each step. `state` makes
    the state of a parameter when it is asked for it, in shards; asking is collective.

    Args:
        made: the program's optimizer, before DeepSpeed gets it.
        shapes: the shape of each parameter while it is whole.
    """

    def __init__(self, made: Optimizer, shapes: Mapping[nn.Parameter, torch.Size]) -> None:
        self._made, self._shapes = made, shapes
        super().__init__([dict(group) for group in made.param_groups], made.defaults)
        trained = [any(value.requires_grad for value in group["params"]) for group in self.param_groups]
        self._moved = [group for group, any_trained in zip(self.param_groups, trained, strict=True) if any_trained]
        self._engine: Any = None
        self._fragments: Fragments | None = None
        self._shards: Shards | None = None
        self._norm = torch.zeros(())
        self.pending = False
        """Whether there are gradients that no step has used."""

    @property
    def made(self) -> Optimizer:
        """The program's own one."""
        return self._made

    def drive(self, engine: Any, fragments: Fragments | None, shards: Shards) -> None:
        """From now on steps are this engine's.

        Args:
            engine: DeepSpeed's.
            fragments: its partitions; None where it has none (stage 0).
            shards: makes the shards.
        """
        self._engine, self._fragments, self._shards = engine, fragments, shards
        if fragments is None:
            self.state = self._made.state
            return
        self._norm = torch.zeros((), device=engine.device)
        fragments.know_norm(lambda: self._norm)
        self.state = _States(fragments, shards, self._shapes)  # type: ignore[assignment]

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move the partitions, and give every rank the new values. Collective.

        Raises:
            StepError: a closure was given.
        """
        if closure is not None:
            raise StepError("DeepSpeed evaluates once a step: no closure", do="use another optimizer, or fsdp")
        base = self._made if self._fragments is None else self._fragments.base
        for ours, theirs in zip(self._moved, base.param_groups, strict=True):
            theirs.update({key: value for key, value in ours.items() if key != "params"})
        self._engine.step()
        self.pending = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throw away gradients that no step has used."""
        if self._fragments is not None and self.pending:
            self._norm.fill_(-1.0)
            self._engine.step()
            self._norm.zero_()
        elif self._fragments is None:
            self._made.zero_grad(set_to_none)
        self.pending = False

    def room(self, parameter: nn.Parameter, key: str, saved: Tensor) -> Stretch | None:
        """Where a tensor of a parameter's state is read to before `load_state_dict`; None where a whole one is right."""
        if self._fragments is None or saved.shape != self._shapes[parameter] or not saved.dim():
            return None
        if not parameter.requires_grad:  # it was trained when that was written, and lies in no partition now
            return None
        assert isinstance(self.state, _States)
        return self.state.room(parameter, key, saved.dtype)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put state and hyperparameters into the partitions. Collective.

        Raises:
            CheckpointError: the state differs between parameters where DeepSpeed keeps one for all of them.
        """
        values = [value for group in self.param_groups for value in group["params"]]
        saved = {value: state_dict["state"][at] for at, value in enumerate(values) if at in state_dict["state"]}
        if self._fragments is None:
            # It has the trained parameters only, and counts them by itself.
            own = self._made.state_dict()["param_groups"]
            held = [value for group in self._made.param_groups for value in group["params"]]
            state = {at: saved[value] for at, value in enumerate(held) if value in saved}
            self._made.load_state_dict({"state": state, "param_groups": own})
        else:
            assert isinstance(self.state, _States)
            self.state.load(saved, [value for value in values if value.requires_grad])
        for group, before in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in before.items() if key != "params"})


class _States(Mapping["nn.Parameter", dict[str, Any]]):
    """The optimizer's state by parameter."""

    def __init__(self, fragments: Fragments, shards: Shards, shapes: Mapping[nn.Parameter, torch.Size]) -> None:
        self._fragments, self._shards, self._shapes = fragments, shards, shapes
        self._coming: dict[tuple[Tensor, str], Tensor] = {}
        """What `room` gave out parts of, until `load` takes it over."""

    def __contains__(self, parameter: object) -> bool:
        trained = parameter in self._shapes and parameter.requires_grad  # type: ignore[attr-defined]
        return trained and bool(self._fragments.base.state.get(self._flat(parameter)))  # type: ignore[arg-type]

    def __getitem__(self, parameter: nn.Parameter) -> dict[str, Any]:
        part, shape = self._fragments.part(parameter), self._shapes[parameter]
        state = self._fragments.base.state[part.flat]
        return {
            key: self._shards.gather(part, part.of(value), shape) if _laid(value, part.flat) else _copy(value)
            for key, value in state.items()
        }

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self._shapes if parameter in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def room(self, parameter: nn.Parameter, key: str, dtype: torch.dtype) -> Stretch:
        """This rank's part of a tensor of the state, in memory that will be the partition's: no second copy is made."""
        part = self._fragments.part(parameter)
        at = (part.flat, key)
        if at not in self._coming:
            now = self._fragments.base.state.get(part.flat, {}).get(key)
            kept = _laid(now, part.flat) and now.dtype is dtype
            self._coming[at] = now if kept else torch.zeros_like(part.flat, dtype=dtype, requires_grad=False)
        return Stretch(part.of(self._coming[at]), self._shapes[parameter], part.begin)

    def load(self, saved: Mapping[nn.Parameter, Mapping[str, Any]], trained: list[nn.Parameter]) -> None:
        """Fill the partitions' state. Collective."""
        groups: dict[int, list[nn.Parameter]] = {}
        for parameter in trained:
            groups.setdefault(id(self._flat(parameter)), []).append(parameter)
        base = self._fragments.base
        for members in groups.values():
            flat = self._flat(members[0])
            base.state.pop(flat, None)
            if state := self._one(members, [saved.get(each, {}) for each in members]):
                base.state[flat] = self._fill(flat, state, members, saved)
        self._coming.clear()

    def _one(self, members: list[nn.Parameter], states: list[Mapping[str, Any]]) -> dict[str, Any]:
        """What all parameters of a partition have in common."""
        plain = [
            {key: _comparable(value, self._shapes[each]) for key, value in state.items()}
            for each, state in zip(members, states, strict=True)
        ]
        if any(each != plain[0] for each in plain):
            found = {str(each) for each in plain}
            raise CheckpointError(
                "DeepSpeed keeps one optimizer state for all parameters of a group, and the checkpoint's differ",
                found="; ".join(sorted(found)[:2]),
                do="put them into groups of their own, or go on under the strategy that wrote it",
            )
        return dict(states[0])

    def _fill(
        self,
        flat: Tensor,
        state: dict[str, Any],
        members: list[nn.Parameter],
        saved: Mapping[nn.Parameter, Mapping[str, Any]],
    ) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, value in state.items():
            if not _shaped(value, self._shapes[members[0]]):
                made[key] = _copy(value)
                continue
            if isinstance(value, Stretch):
                made[key] = self._coming[flat, key]
                continue
            made[key] = torch.zeros_like(flat, dtype=value.dtype, requires_grad=False)
            for each in members:
                part = self._fragments.part(each)
                self._shards.scatter(saved[each][key], part, part.of(made[key]))
        return made

    def _flat(self, parameter: nn.Parameter) -> Tensor:
        return self._fragments.part(parameter).flat


def _laid(value: Any, flat: Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == flat.numel()


def _shaped(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor | Stretch) and len(value.shape) > 0 and value.shape == shape


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _comparable(value: Any, shape: torch.Size) -> Any:
    if _shaped(value, shape):
        return str(value.dtype)
    return value.tolist() if isinstance(value, torch.Tensor) else value
