"""Room: everything a resumed run needs, as tensors by name and one plain mapping; and how it is put back.

Nothing here is a rank's own: any layout can read what any layout wrote. Random numbers need no state, since every draw
comes from a key; generators of the user's own are kept with `Run.keep`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from worldsize.errors import CheckpointError, ConfigError, DataError
from worldsize.runtime.stretch import Stretch
from worldsize.train import another, optim
from worldsize.train.plain import join, split

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from worldsize.train.engine import Engine
    from worldsize.train.keep import Kept
    from worldsize.train.parts import Placed, Trained

T = TypeVar("T")


@dataclass(slots=True)
class Progress:
    """Where the training stands.

    Attributes:
        step: optimizer steps made.
        epoch: epoch of the next step.
        samples: samples seen by those steps, all ranks.
        tokens: tokens in them, where the duration counts tokens.
        tail: the last step's totals and loss, where what the program does after it (an evaluation) was interrupted.
        best: value, step and direction of the best so far.
        shift: by how many steps the plan of batches is ahead of `step`, after a change of batch was accepted.
        done: why the run ended before its duration, or None.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    tokens: int = 0
    tail: dict[str, Any] | None = None
    best: dict[str, Any] = field(default_factory=dict)
    shift: int = 0
    done: str | None = None


def tensors(engine: Engine, kept: Kept) -> dict[str, Tensor]:
    """Every tensor of the state under its name, as it lies on this rank."""
    found: dict[str, Tensor] = {}
    for placed in engine.parts.models.values():
        if placed.save != "none":
            found |= _named(f"model/{placed.name}", _tensors(placed, placed.strategy.state(placed.module)))
    for entry in engine.parts.optimizers:
        found |= _named(f"optim/{entry.named.name}", entry.named.state()[0])
    for name, average in engine.parts.averages.items():
        found |= _named(f"average/{name}", average.state())
    return found | _named("keep", kept.state()[0])


def optimizers(engine: Engine, found: Mapping[str, Tensor]) -> set[str]:
    """Which of `tensors` only an update changes: the optimizers' own. Weights a program may change on its own account."""
    starts = tuple(f"optim/{entry.named.name}/" for entry in engine.parts.optimizers if entry.named.own)
    return {name for name in found if name.startswith(starts)}


def plain(engine: Engine, kept: Kept, progress: Progress) -> dict[str, Any]:
    """The rest of the state, in types that JSON can hold. Collective where ranks hold different parameters."""
    return {
        "progress": asdict(progress),
        "optim": {entry.named.name: _whole(engine, entry) for entry in engine.parts.optimizers},
        "schedules": [split(_safe(each.schedule.state_dict()), "schedule", {}) for each in engine.parts.schedules],
        "scale": engine.scale.state_dict() if engine.scale else None,
        "keep": kept.state()[1],
    }


def accepted(engine: Engine, train: Mapping[str, Any], accept: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """The checkpoint's plain state as this run's optimizers can take it. Collective.

    Args:
        engine: with everything that the program made.
        train: as it was saved.
        accept: names of changes that are wanted.

    Returns:
        the state, and a line for each optimizer that is another one.

    Raises:
        CheckpointError: an optimizer is another one, and that was not accepted; or there are other optimizers.
    """
    here, there = [entry.named.name for entry in engine.parts.optimizers], list(train["optim"])
    if here != there:
        raise CheckpointError(
            "the optimizers are not those of the checkpoint", found=f"now {here}, before {there}",
            do="make as many as the run that wrote it",
        )  # fmt: skip
    found, lines = dict(train["optim"]), []
    for entry in engine.parts.optimizers:
        saved = _part(entry, train)
        answers = engine.comm.gather((entry.named.misfit(saved), entry.named.fits(saved)))
        problem = next((error for error, _ in answers if error is not None), None)
        if problem is None:
            continue
        if "optimizer" not in accept:
            raise problem
        keep = all(fits for _, fits in answers)
        found[entry.named.name] = entry.named.renewed(saved, keep=keep)
        goes_on = "its state goes on, its settings are the program's" if keep else "its state begins anew"
        lines.append(f"{problem.what} ({problem.found}), accepted: {goes_on}")
    return {**train, "optim": found}, lines


def left(train: Mapping[str, Any]) -> tuple[str, ...]:
    """What names of tensors begin with that stay in the checkpoint: the state of optimizers that were replaced."""
    return tuple(f"optim/{name}/" for name, saved in train["optim"].items() if saved.get("left"))


def wanted(engine: Engine, kept: Kept, train: Mapping[str, Any]) -> dict[str, Tensor | Stretch]:
    """Tensors to read a checkpoint into, laid out as this run needs them: the model's own, and empty ones for the rest.

    Args:
        engine: with everything that the program made.
        kept: the program's own state.
        train: what `accepted` gave.

    Raises:
        CheckpointError: the checkpoint keeps other things.
    """
    found: dict[str, Tensor | Stretch] = {}
    for placed in engine.parts.models.values():
        if placed.save != "none":
            found |= _named(f"model/{placed.name}", _tensors(placed, placed.strategy.room(placed.module)))
    for entry in engine.parts.optimizers:
        found |= _named(f"optim/{entry.named.name}", entry.named.wanted(_part(entry, train)))
    for name, average in engine.parts.averages.items():
        found |= _named(f"average/{name}", average.room())
    return found | _named("keep", kept.wanted(train["keep"], engine.device))


def restore(engine: Engine, kept: Kept, train: Mapping[str, Any], read: Mapping[str, Tensor | Stretch]) -> Progress:
    """Put what was read where it belongs; the models' own tensors are filled already. Collective."""
    for placed in engine.parts.models.values():
        placed.strategy.filled(placed.module, _under(f"model/{placed.name}", read))
    for name, average in engine.parts.averages.items():
        average.filled(_under(f"average/{name}", read))
    for entry in engine.parts.optimizers:
        entry.named.load(_under(f"optim/{entry.named.name}", read), _part(entry, train))
    if len(train["schedules"]) != len(engine.parts.schedules):
        raise CheckpointError(
            "the schedules are not those of the checkpoint",
            found=f"{len(engine.parts.schedules)} now, {len(train['schedules'])} before",
        )
    renewed = {id(each.optimizer) for each in engine.parts.optimizers if _part(each, train).get("renewed")}
    for scheduled, packed in zip(engine.parts.schedules, train["schedules"], strict=True):
        schedule, state = scheduled.schedule, join(packed, {})
        if id(scheduled.optimizer) in renewed:
            last = [group.get("lr") for group in scheduled.optimizer.param_groups]
            state = another.rates(state, schedule.state_dict(), last)
        schedule.load_state_dict(state)
    if engine.scale and train["scale"]:
        engine.scale.load_state_dict(train["scale"])
    kept.load(_under("keep", read), train["keep"])
    return Progress(**train["progress"])


def _names(entry: Trained) -> list[str] | None:
    """All parameters of its models, where this rank holds only some of them; else None."""
    found = [(placed.name, placed.strategy.names(placed.module)) for placed in entry.models]
    if any(names is None for _, names in found):
        return None
    return [f"{model}.{name}" for model, names in found for name in names or ()]


def _whole(engine: Engine, entry: Trained) -> optim.Skeleton:
    names, own = _names(entry), entry.named.skeleton()
    return own if names is None else optim.union(engine.comm.gather(own), names)


def _part(entry: Trained, train: Mapping[str, Any]) -> optim.Skeleton:
    names, saved = _names(entry), train["optim"][entry.named.name]
    return saved if names is None else optim.part(saved, entry.named.names, names)


def _tensors(placed: Placed, state: Mapping[str, Any]) -> dict[str, Any]:
    foreign = [key for key, value in state.items() if not isinstance(value, torch.Tensor | Stretch)]
    if foreign:
        raise ConfigError(
            f"model {placed.name!r} has state that is no tensor",
            found=str(foreign[:3]),
            do="use run.keep for it, or a buffer",
        )
    return {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def _safe(state: Any) -> Any:
    """A schedule's state without functions: they are the program's own and come back with it."""
    if isinstance(state, dict):
        return {key: _safe(value) for key, value in state.items() if not callable(value)}
    if isinstance(state, list | tuple):
        return type(state)(_safe(value) for value in state)
    return state.tolist() if isinstance(state, torch.Tensor) else state


def _named(prefix: str, found: Mapping[str, T]) -> dict[str, T]:
    return {f"{prefix}/{name}": tensor for name, tensor in found.items()}


def _under(prefix: str, found: Mapping[str, T]) -> dict[str, T]:
    start = f"{prefix}/"
    return {name.removeprefix(start): tensor for name, tensor in found.items() if name.startswith(start)}


def tokens(totals: Mapping[str, float]) -> int:
    """How many tokens a step has: what `count=` calls so, or the only thing that it counts.

    Raises:
        DataError: nothing is counted but samples.
    """
    names = [name for name in totals if name != "samples"]
    name = "tokens" if "tokens" in names or len(names) != 1 else names[0]
    if name not in totals:
        raise DataError(
            "a duration in tokens needs a count of them",
            found=f"counted: {list(totals)}",
            do="run.steps(data, count=...)",
        )
    return int(totals[name])
