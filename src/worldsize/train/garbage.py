"""Room: Python's garbage collector while a training goes on: what was there before it is not searched again and again.

A program that has imported torch holds some 300,000 objects. To look through all of them for cycles takes 0.2 s, which the
collector does now and then, on each rank at another step: all the others wait for it.
"""

from __future__ import annotations

import gc

_ITS_OWN = 1_000
"""Python 3.12 begins with 375 frozen objects; a program that calls `gc.freeze` in its first line, freezes 4,000."""


class Garbage:
    """The collector, of one training. Does nothing where the program has settled it for itself."""

    def __init__(self) -> None:
        self._spared = False

    def spare(self) -> None:
        """Collect once; then leave what is there out of later searches. Objects still end when nothing holds them."""
        if not gc.isenabled() or gc.get_freeze_count() > _ITS_OWN:
            return
        gc.collect()
        gc.freeze()
        self._spared = True

    def end(self) -> None:
        """As it was: what became a cycle meanwhile, a model for instance, is found again."""
        if self._spared:
            gc.unfreeze()
            self._spared = False
