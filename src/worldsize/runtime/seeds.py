"""Room: the global random generators of this process. Knows how to seed all of them at once; never what for.

What a number is drawn for is a key (`runtime.keys.key`): the same key gives the same numbers on any rank, at any world
size. CPU and CUDA generators draw different sequences from one seed, so a curve with drop-out is one per device type.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_MASK32 = 0xFFFF_FFFF


def reseed(number: int, device: torch.device | None = None) -> None:
    """Seed torch (CPU, and the generator of `device` if it is a CUDA device), numpy and random with one number.

    About 10 µs: `torch.manual_seed` would visit every CUDA device and take ten times as long.
    """
    torch.default_generator.manual_seed(number)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(number)
    random.seed(number)
    np.random.seed(number & _MASK32)  # noqa: NPY002 - user code draws from the global generator


@contextmanager
def reseeded(number: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed for the length of a block and put every generator back as it was."""
    python, legacy, host = random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state(device) if device is not None and device.type == "cuda" else None
    try:
        reseed(number, device)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        torch.default_generator.set_state(host)
        if cuda is not None and device is not None:
            torch.cuda.set_rng_state(cuda, device)
