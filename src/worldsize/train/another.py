"""Room: which class of optimizer a state is of, and what of it another one can begin with.

torch's AdamW is an Adam, and both keep the same state: so names are compared, never kinds. A strategy may put an optimizer
of its own into the place of the program's (`made` is the program's then), so that a state is of the same class under all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.optim import Optimizer

ACCEPT = "accept=('optimizer',): weights and position go on then, its state begins anew where it does not fit"
_ALIKE = {"torch.optim.adam.Adam", "torch.optim.adamw.AdamW"}
"""Their states mean the same; what they do with the decay of weights is a number of the groups."""
_SHAPING = "amsgrad"
"""Whether those keep one tensor more."""
_TELLING = {"decoupled_weight_decay", "fused", "momentum_decay", "weight_decay"}
"""What one of torch's classes can be told and another one cannot, where all else of this one is the other's too."""
_RATES, _LAST = "base_lrs", "_last_lr"


def record(optimizer: Optimizer) -> dict[str, Any]:
    """What a checkpoint says of an optimizer: the program's class, and what can be set of it."""
    kind = type(getattr(optimizer, "made", optimizer))
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "keys": sorted(optimizer.defaults)}


def changed(now: Mapping[str, Any], skeleton: Mapping[str, Any]) -> str | None:
    """Both optimizers in words, where the state is of another one.

    Args:
        now: the record of the optimizer that is there.
        skeleton: of the checkpoint; those of before this record have only what is in their groups.
    """
    before = skeleton.get("by")
    if before is not None:
        return None if _same(now, before) else f"now {now['class']}, before {before['class']}"
    return next((said for group in skeleton["groups"] if (said := _by_keys(now, group))), None)


def fits(now: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], skeleton: Mapping[str, Any]) -> bool:
    """Whether an accepted optimizer can go on with the state of the other one.

    Args:
        now: the record of the optimizer that is there.
        groups: its groups, parameters by name.
        skeleton: of the checkpoint.
    """
    before = skeleton.get("by")
    if before is None or len(groups) != len(skeleton["groups"]) or now["keys"] != before["keys"]:
        return False
    pairs = zip(groups, skeleton["groups"], strict=True)
    return {now["class"], before["class"]} <= _ALIKE and all(
        mine["params"] == other["params"] and mine.get(_SHAPING) == other.get(_SHAPING) for mine, other in pairs
    )


def groups(mine: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The program's own settings, each rate as far down or up its schedule as the other optimizer's was."""
    others = before if len(mine) == len(before) else [before[0]] * len(mine) if before else [{}] * len(mine)
    return [
        {**group, "lr": _rate(group, other)} if "lr" in group else dict(group)
        for group, other in zip(mine, others, strict=True)
    ]


def rates(saved: Any, own: Any, last: Sequence[Any]) -> Any:
    """A schedule's state of the checkpoint, with the rates that it starts from those of the program.

    Args:
        saved: the state of before; schedules of schedules hold lists of such.
        own: the state of the schedule that is there.
        last: the rates as they are now.
    """
    if isinstance(saved, list) and isinstance(own, list) and len(saved) == len(own):
        return [rates(before, now, last) for before, now in zip(saved, own, strict=True)]
    if not isinstance(saved, dict) or not isinstance(own, dict):
        return saved
    found = {key: rates(value, own.get(key), last) for key, value in saved.items()}
    if _LAST in saved:
        found[_LAST] = list(last)
    return {**found, _RATES: own[_RATES]} if _RATES in own else found


def _same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Of one package and name; a program's own class may have moved, or be `__main__`'s."""
    tops = {each["class"].partition(".")[0] for each in (now, before)}
    names = {each["class"].rpartition(".")[2] for each in (now, before)}
    return len(names) == 1 and (len(tops) == 1 or ("torch" not in tops and now["keys"] == before["keys"]))


def _by_keys(now: Mapping[str, Any], group: Mapping[str, Any]) -> str | None:
    """Of a class that nobody wrote down: both in words, where what can be set of them tells that they are two."""
    lost, new = group.keys() - set(now["keys"]), set(now["keys"]) - group.keys()
    lost = {key for key in lost if key != "params" and not key.endswith("_lr")}  # a schedule's
    other = bool(new or lost & _TELLING) if now["class"].startswith("torch.optim.") else bool(lost and new)
    differing = f"knows {min(lost)!r}" if lost else f"knows no {min(new)!r}" if new else ""
    return f"now {now['class']}, before one that {differing}" if other else None


def _rate(group: Mapping[str, Any], before: Mapping[str, Any]) -> Any:
    start, began = group.get("initial_lr"), before.get("initial_lr")
    return group["lr"] if start is None or not began else start * before["lr"] / began
