"""Room: single numbers on their way from a device to the host, which waits for them only where it reads too early.

To ask a GPU for a number the usual way (`float(tensor)`) is to wait until it has done all that it was given, and to leave it
idle until the next work comes. Here numbers are sent when they are computed, and read when something else has gone on.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Arrivals:
    """Page-locked memory and events, used again and again."""

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[list[Tensor], Any]]] = defaultdict(list)

    def send(self, numbers: Sequence[Tensor]) -> Arriving:
        """Send 0-dim tensors, after what their devices were given so far."""
        if not any(number.device.type == "cuda" for number in numbers):
            return Arriving(list(numbers), None, [])
        free = self._free[len(numbers)]
        places, event = free.pop() if free else _made(len(numbers))
        for place, number in zip(places, numbers, strict=True):
            place.copy_(number, non_blocking=True)
        event.record()
        return Arriving(places, event, free)


class Arriving:
    """Numbers under way, to be read once.

    Args:
        places: where they arrive.
        event: has happened when they are there; None where they are.
        free: gets both back.
    """

    def __init__(self, places: list[Tensor], event: Any, free: list[tuple[list[Tensor], Any]]) -> None:
        self._places, self._event, self._free = places, event, free

    @property
    def there(self) -> bool:
        """Whether reading would not wait."""
        return self._event is None or bool(self._event.query())

    def read(self) -> list[float]:
        """Wait until they are there."""
        if self._event is not None:
            self._event.synchronize()
        found = [float(place) for place in self._places]
        if self._event is not None:
            self._free.append((self._places, self._event))
        return found


def _made(count: int) -> tuple[list[Tensor], Any]:
    return list(torch.empty(count, dtype=torch.float64, pin_memory=True).unbind()), torch.cuda.Event()
