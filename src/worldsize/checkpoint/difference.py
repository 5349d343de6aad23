"""Room: what differs between two checkpoints: tensors, one in memory at a time, and plain values. Whatever wrote them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from worldsize.checkpoint.skeleton import unpack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from worldsize.checkpoint.opened import Opened

_VALUES = 1 << 20
"""Values that are compared at once."""


@dataclass(frozen=True, slots=True)
class Delta:
    """How one tensor differs.

    Attributes:
        name: its name in the checkpoints.
        absolute: the largest difference; NaN where the shapes differ.
        relative: the largest difference by the larger of the two values.
        values: how many values differ by more than is allowed.
        kinds: shape and dtype of both where these differ.
    """

    name: str
    absolute: float
    relative: float
    values: int
    kinds: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs between A and B.

    Attributes:
        deltas: tensors that differ, the largest difference first.
        equal: how many tensors do not.
        only_a: names that only A has.
        only_b: names that only B has.
        plain: values of progress, hyperparameters, schedules, kept objects: where, in A, in B.
    """

    deltas: list[Delta] = field(default_factory=list)
    equal: int = 0
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    plain: list[tuple[str, Any, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.deltas or self.only_a or self.only_b or self.plain)

    def to_json(self) -> dict[str, Any]:
        """In plain types."""
        return asdict(self) | {"different": bool(self)}


def compare(a: Opened, b: Opened, *, rtol: float = 0.0, atol: float = 0.0) -> Difference:
    """Compare two checkpoints; the layouts that wrote them and the times are no difference.

    Values are equal within `atol + rtol * max(|a|, |b|)`, and two NaNs are. Another shape or dtype is a difference
    whatever is allowed.

    Raises:
        CheckpointError: one cannot be read.
    """
    in_a, in_b = _names(a), _names(b)
    plain = list(_plain_differences(_plain(a), _plain(b), rtol, atol))
    deltas: dict[tuple[str, str], Delta | None] = {}
    equal = 0
    for name in sorted(in_a.keys() & in_b):
        # What is tied in the same way on both sides is read once.
        key = in_a[name], in_b[name]
        if key not in deltas:
            deltas[key] = _delta(name, a.tensor(name), b.tensor(name), rtol, atol)
            equal += deltas[key] is None
    differing = [delta for delta in deltas.values() if delta is not None]
    differing.sort(key=lambda delta: (-_rank(delta.absolute), -_rank(delta.relative), delta.name))
    return Difference(differing, equal, sorted(in_a.keys() - in_b), sorted(in_b.keys() - in_a), plain)


def _names(opened: Opened) -> dict[str, str]:
    """Every name, also the tied ones, with the one that it was saved under."""
    return {name: name for name in opened.facts} | opened.manifest.aliases


def _rank(number: float) -> float:
    return math.inf if math.isnan(number) else number


def _delta(name: str, a: Tensor, b: Tensor, rtol: float, atol: float) -> Delta | None:
    kinds = None if (a.shape, a.dtype) == (b.shape, b.dtype) else (_kind(a), _kind(b))
    if a.shape != b.shape:
        return Delta(name, math.nan, math.nan, max(a.numel(), b.numel()), kinds)
    absolute, relative, values = 0.0, 0.0, 0
    for one, other in zip(a.reshape(-1).split(_VALUES), b.reshape(-1).split(_VALUES), strict=True):
        gap, scale, equal = _gap(one, other)
        # A gap of 0 between unequal values: integers too large for a float64.
        allowed = equal | ((gap > 0) & (gap <= atol + rtol * scale))
        values += int((~allowed).sum())
        if gap.numel():
            absolute = max(absolute, float(gap.max()))
            relative = max(relative, float((gap / scale).nan_to_num(0.0, posinf=math.inf).max()))
    return Delta(name, absolute, relative, values, kinds) if values or kinds else None


def _gap(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The differences, the larger values, and which are equal. A NaN on one side, or unlike infinities, differ infinitely."""
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    exact = a == b if a.dtype == b.dtype and not a.is_floating_point() else None
    a, b = a.to(wide), b.to(wide)
    equal = a == b if exact is None else exact
    equal |= a.isnan() & b.isnan()
    gap = (a - b).abs().nan_to_num(math.inf, posinf=math.inf).masked_fill(equal, 0.0)
    return gap, torch.maximum(a.abs(), b.abs()).nan_to_num(1.0, posinf=1.0), equal


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _plain(opened: Opened) -> dict[str, Any]:
    """What train.json holds, by path, without the tensors: those are compared by their names."""
    train = dict(opened.train)
    train["optim"] = {
        name: {"groups": saved["groups"], "slots": {key: _unpacked(slot) for key, slot in saved["slots"].items()}}
        for name, saved in train.get("optim", {}).items()
    }
    train["schedules"] = [_unpacked(schedule) for schedule in train.get("schedules", [])]
    train["keep"] = {name: _unpacked(kept) for name, kept in train.get("keep", {}).items()}
    return dict(_flat(train, ""))


class _Elsewhere:
    """A tensor's place."""


def _unpacked(skeleton: Any) -> Any:
    return unpack(skeleton, lambda _: _Elsewhere)


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(inner, dict | list | tuple) for inner in value):
        for index, inner in enumerate(value):
            yield from _flat(inner, f"{path}[{index}]")
    elif value is not _Elsewhere:
        yield path, value


_MISSING = "(nothing)"


def _plain_differences(
    a: dict[str, Any], b: dict[str, Any], rtol: float, atol: float
) -> Iterator[tuple[str, Any, Any]]:
    for path in [*a, *(path for path in b if path not in a)]:
        one, other = a.get(path, _MISSING), b.get(path, _MISSING)
        if not _close(one, other, rtol, atol):
            yield path, one, other


def _close(a: Any, b: Any, rtol: float, atol: float) -> bool:
    if a == b:
        return True
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or abs(a - b) <= atol + rtol * max(abs(a), abs(b))
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return all(_close(one, other, rtol, atol) for one, other in zip(a, b, strict=True))
    return False
