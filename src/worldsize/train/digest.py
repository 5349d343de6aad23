"""Room: whether ranks that should hold the same weights do. A flipped bit in one replica trains on silently otherwise.

A parameter's digest is the sum of its bits read as integers: exact, in any order, and one number on the device, which is read a
step later. Ranks that hold the same part of a parameter must have the same; whoever is outvoted is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from worldsize.errors import StepError
from worldsize.runtime.sharded import is_sharded, local
from worldsize.strategies.base import brief

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from worldsize.runtime.comm import Comm
    from worldsize.train.parts import Placed

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Held = dict[str, Sequence[tuple[int, list[int]]]]
"""By part of a parameter: each digest of it, and the ranks that have it."""


class Replicas:
    """Compares weights over ranks, every so many steps and before each commit.

    Args:
        comm: the agreement between all ranks.
        models: the run's; looked at from the first comparison on.
        every: after how many steps; None for never.
    """

    def __init__(self, comm: Comm, models: dict[str, Placed], every: int | None) -> None:
        self._comm, self._models, self._every = comm, models, every
        self._parts: list[list[str]] | None = None
        self._taken: tuple[int, Tensor] | None = None

    def begin(self, step: int) -> None:
        """A step is about to begin. Collective where it is due.

        Raises:
            StepError: weights differ, with the ranks and the parameter.
        """
        if self._taken is not None:
            (made, sums), self._taken = self._taken, None
            self._compare(made, sums)
        if self._every is not None and step and step % self._every == 0 and self._comm.size > 1:
            self._taken = (step, self._sums())

    def check(self, step: int) -> None:
        """Compare at once, before something is made of the weights. Collective; raises as `begin`."""
        if self._every is not None and self._comm.size > 1:
            self._compare(step, self._sums())

    def _sums(self) -> Tensor:
        found = [digest(part) for _, _, part in self._held()]
        return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64)

    def _held(self) -> Iterable[tuple[str, Tensor, Tensor]]:
        """Parameters by name, whole and what lies here of them."""
        for placed in self._models.values():
            for name, value in placed.module.named_parameters():
                part = local(value.detach())
                if part.numel() and part.device.type != "meta":
                    yield f"{placed.name}.{name}", value, part

    def _compare(self, step: int, sums: Tensor) -> None:
        if self._parts is None:
            self._parts = self._comm.gather([name + _share(value) for name, value, _ in self._held()])
        digests = self._comm.gather(sums.tolist())
        if all(parts == self._parts[0] for parts in self._parts) and all(each == digests[0] for each in digests):
            return
        different = disagreements(self._parts, digests)
        if different:
            raise _refusal(step, different)


def digest(value: Tensor) -> Tensor:
    """The sum of a tensor's bits, read as integers of its values' size and added without regard to overflow."""
    return value.view(_INTEGERS[value.element_size()]).sum(dtype=torch.int64)


def disagreements(parts: list[list[str]], digests: list[list[int]]) -> Held:
    """Parts of parameters with more than one digest, in the order of the models.

    Args:
        parts: by rank, what it holds, by name.
        digests: by rank, of each of these.
    """
    found: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, (names, values) in enumerate(zip(parts, digests, strict=True)):
        for name, value in zip(names, values, strict=True):
            found[name][value].append(rank)
    return {name: list(each.items()) for name, each in found.items() if len(each) > 1}


def outvoted(held: Sequence[tuple[int, list[int]]]) -> list[int]:
    """The ranks whose digest is not that of most; all of them where there is no most."""
    most = max(len(ranks) for _, ranks in held)
    right = [ranks for _, ranks in held if len(ranks) == most]
    wrong = [ranks for _, ranks in held if len(right) > 1 or ranks not in right]
    return sorted(rank for ranks in wrong for rank in ranks)


def _refusal(step: int, different: Held) -> StepError:
    name, held = next(iter(different.items()))
    odd, total = outvoted(held), sum(len(ranks) for _, ranks in held)
    more = f" and {len(different) - 1} more" if len(different) > 1 else ""
    who = f"rank{'s' if len(odd) > 1 else ''} {brief([str(rank) for rank in odd], 8)}"
    which = (
        f"{who} differ, and it cannot be told which is right"
        if len(odd) == total
        else f"{who} of {total} that hold it"
    )
    return StepError(
        f"ranks hold different weights at step {step}: {who}",
        found=f"parameter {name!r}{more}: {which}",
        do="look for faults of memory on that host (ECC, dmesg), and start again from a checkpoint before it",
    )


def _share(value: nn.Parameter | Tensor) -> str:
    """Which part of a sharded parameter this rank holds: equal on ranks that hold the same."""
    if not is_sharded(value):
        return ""
    mesh = value.device_mesh
    axes = zip(value.placements, mesh.get_coordinate() or (), mesh.shape, strict=False)
    cuts = [f"{how}@{at}" for how, at, size in axes if size > 1 and not how.is_replicate()]
    return f"[{', '.join(cuts)}]" if cuts else ""
