"""Room: who is measured with whom, and when: pairs that run at the same time share no member. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")


def tournament(members: Sequence[T]) -> list[list[tuple[T, T]]]:
    """Every pair once, in as few rounds as can be, each member at most once in a round (the circle method)."""
    ring: list[T | None] = [*members, *([None] if len(members) % 2 else [])]
    half, found = len(ring) // 2, []
    for _ in range(len(ring) - 1):
        facing = zip(ring[:half], reversed(ring[half:]), strict=True)
        found.append([(one, other) for one, other in facing if one is not None and other is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return [pairs for pairs in found if pairs]
