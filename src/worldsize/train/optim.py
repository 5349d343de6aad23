"""Room: an optimizer's state by parameter name, so that it survives any layout. Knows torch.optim's contract only.

Tensors go out under names, shards as they are; everything else (step counts, hyperparameters, nested lists) goes out as a
plain skeleton in which a tensor is a placeholder. Coming back, the skeleton says which tensors to read: a parameter
that never had a gradient has no state, and needs none.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from worldsize.errors import CheckpointError, ConfigError
from worldsize.runtime.sharded import is_sharded, plain
from worldsize.train import another
from worldsize.train.plain import empty, join, split
from worldsize.train.shards import ShardStep

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from worldsize.runtime.stretch import Stretch

Skeleton = dict[str, Any]


class NamedOptimizer:
    """One optimizer with the names of what it trains.

    Args:
        name: how checkpoints call it.
        optimizer: a torch optimizer over parameters of the models.
        models: the models by name.

    Raises:
        ConfigError: it trains a parameter of none of the models.
    """

    def __init__(self, name: str, optimizer: Optimizer, models: Mapping[str, nn.Module]) -> None:
        self.name, self.optimizer = name, optimizer
        names = {
            id(p): f"{model}.{path}" for model, module in models.items() for path, p in module.named_parameters()
        }
        self._names: dict[str, nn.Parameter] = {}
        self._slots: dict[str, Any] = {}
        self.step = ShardStep(optimizer)
        """Lets the optimizer make a step."""
        for parameter in self.parameters:
            if id(parameter) not in names:
                raise ConfigError(
                    "the optimizer trains a parameter that belongs to none of its models",
                    found=f"a tensor of shape {tuple(parameter.shape)}",
                    do="make it from the model that it is given: run.optimizer(lambda m: AdamW(m.parameters()), model)",
                )
            self._names[names[id(parameter)]] = parameter

    @property
    def names(self) -> list[str]:
        """Their names, in the same order."""
        return list(self._names)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters it trains, in the order of its groups."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def own(self) -> bool:
        """Whether `state` gives the optimizer's own tensors: others make theirs for the question, and need the room again."""
        return isinstance(self.optimizer.state, defaultdict)

    def state(self) -> tuple[dict[str, Tensor], Skeleton]:
        """Tensors by name ("<parameter>/<key>"), and the skeleton that puts them back. Collective where it is sharded."""
        tensors: dict[str, Tensor] = {}
        self._slots = {
            name: split(self.optimizer.state[parameter], name, tensors)
            for name, parameter in self._names.items()
            if parameter in self.optimizer.state
        }
        return tensors, self.skeleton()

    def skeleton(self) -> Skeleton:
        """The skeleton of the tensors that `state` gave last, and the groups as they are now."""
        return {"by": another.record(self.optimizer), "slots": self._slots, "groups": self._groups()}

    def misfit(self, skeleton: Skeleton) -> CheckpointError | None:
        """Why a checkpoint's state cannot be taken over: it is another optimizer's, or of other groups."""
        mine = self._groups()
        if found := another.changed(another.record(self.optimizer), skeleton):
            return CheckpointError(
                f"optimizer {self.name!r} is not the one that the checkpoint's state is of",
                found=found,
                do=f"restore it, or {another.ACCEPT}",
            )
        if [group["params"] for group in mine] != [group["params"] for group in skeleton["groups"]]:
            return CheckpointError(
                f"optimizer {self.name!r}: the parameter groups are not those of the checkpoint",
                found=_differences(mine, skeleton["groups"]),
                do=f"build the optimizer as in the run that wrote it, or {another.ACCEPT}",
            )
        return None

    def fits(self, skeleton: Skeleton) -> bool:
        """Whether the state of an accepted other optimizer means the same for this one."""
        return another.fits(another.record(self.optimizer), self._groups(), skeleton)

    def renewed(self, skeleton: Skeleton, *, keep: bool) -> Skeleton:
        """What this optimizer begins with in the place of another one: as the program made it.

        Args:
            skeleton: the other one's.
            keep: whether the state itself is taken over.
        """
        found = another.groups(self._groups(), skeleton["groups"])
        return {
            **self.skeleton(),
            "slots": skeleton["slots"] if keep else {},
            "groups": found,
            "renewed": True,
            "left": not keep,
        }

    def wanted(self, skeleton: Skeleton) -> dict[str, Tensor | Stretch]:
        """Empty tensors, or stretches of them, laid out as this optimizer needs them, for everything the skeleton names.

        Raises:
            CheckpointError: the checkpoint's optimizer is another one, trains other parameters, or groups them in another way.
        """
        if problem := self.misfit(skeleton):
            raise problem
        found: dict[str, Tensor | Stretch] = {}
        for name, slot in skeleton["slots"].items():
            parameter = self._names[name]
            for path, tensor in empty(slot, parameter.device).items():
                found[path] = self._room(parameter, path.removeprefix(f"{name}/"), tensor)
        return found

    def load(self, tensors: Mapping[str, Tensor | Stretch], skeleton: Skeleton) -> None:
        """Put state and hyperparameters back, through the optimizer's own `load_state_dict`."""
        numbers = {name: index for index, name in enumerate(self._names)}
        state = {numbers[name]: join(slot, tensors) for name, slot in skeleton["slots"].items()}
        groups = [  # what can be set only since is as the program says
            {**own, **_tuples(saved), "params": [numbers[name] for name in saved["params"]]}
            for own, saved in zip(self.optimizer.param_groups, skeleton["groups"], strict=True)
        ]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _room(self, parameter: nn.Parameter, key: str, saved: Tensor) -> Tensor | Stretch:
        """Where a tensor of a parameter's state is read to: laid out like the parameter, or as the optimizer says."""
        if is_sharded(parameter):
            same = parameter.shape == saved.shape
            return torch.empty_like(plain(parameter), dtype=saved.dtype) if same else saved
        room = getattr(self.optimizer, "room", None)
        made: Stretch | None = None if room is None else room(parameter, key, saved)
        return saved if made is None else made

    def _groups(self) -> list[dict[str, Any]]:
        names = {id(parameter): name for name, parameter in self._names.items()}
        return [
            {**{key: _plain(value) for key, value in group.items() if key != "params"},
             "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in self.optimizer.param_groups
        ]  # fmt: skip


def union(skeletons: Sequence[Skeleton], names: Sequence[str]) -> Skeleton:
    """The skeleton of a whole model's optimizer, of those of ranks that each hold some of its parameters.

    Args:
        skeletons: of all ranks.
        names: the whole model's parameters, in their order.

    Raises:
        ConfigError: the ranks made different optimizers, or different groups.
    """
    places = {name: place for place, name in enumerate(names)}
    slots = {name: slot for each in skeletons for name, slot in each["slots"].items()}
    shapes = [[_bare(group) for group in each["groups"]] for each in skeletons]
    kinds = sorted({each["by"]["class"] for each in skeletons})
    if len(kinds) > 1:
        raise ConfigError(
            "the ranks of a pipeline made different optimizers",
            found=", ".join(kinds),
            do="make the same on every rank",
        )
    if any(shape != shapes[0] for shape in shapes):
        raise ConfigError(
            "the ranks of a pipeline made different parameter groups",
            found=f"{sorted({len(shape) for shape in shapes})} groups",
            do="make the same groups with the same settings on every rank, empty ones too",
        )
    groups = [
        {
            **bare,
            "params": sorted(
                {name for each in skeletons for name in each["groups"][index]["params"]}, key=places.__getitem__
            ),
        }
        for index, bare in enumerate(shapes[0])
    ]
    return {**skeletons[0], "slots": {name: slots[name] for name in names if name in slots}, "groups": groups}


def part(skeleton: Skeleton, own: Collection[str], names: Collection[str]) -> Skeleton:
    """What a rank needs of the skeleton of a whole model's optimizer: its own parameters, and what is not the model's."""
    away = set(names) - set(own)
    return {
        **skeleton,
        "slots": {name: slot for name, slot in skeleton["slots"].items() if name not in away},
        "groups": [
            {**group, "params": [name for name in group["params"] if name not in away]}
            for group in skeleton["groups"]
        ],
    }


def _bare(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()  # lr may be a tensor under compile
    return list(value) if isinstance(value, tuple) else value


def _tuples(group: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no tuples, and optimizers compare none: betas come back as they were."""
    return {
        key: tuple(value) if isinstance(value, list) and key != "params" else value for key, value in group.items()
    }


def _differences(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> str:
    here = {name for group in now for name in group["params"]}
    there = {name for group in before for name in group["params"]}
    if here == there:
        return f"groups of {[len(g['params']) for g in now]} now, of {[len(g['params']) for g in before]} before"
    return f"only now {sorted(here - there)[:3]}, only before {sorted(there - here)[:3]}"
