"""Room: the names of how much is computed again in the backward pass, and in how many rows. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from worldsize.launch import fields
from worldsize.launch.given import refuse
from worldsize.launch.units import mebibytes

AUTO = "auto"
NONE, SELECTIVE, FULL = KINDS = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Mode:
    """How much the layers compute again.

    Attributes:
        kind: none; selective: all but projections and attention; full: all of a layer from its input.
        every: of each so many layers the first computes all of it again, the others nothing; 0: all do as `kind` says.
    """

    kind: str
    every: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.every}" if self.every else self.kind

    def of(self, layer: int) -> str:
        """What the layer of that number does."""
        if not self.every:
            return self.kind
        return NONE if layer % self.every else FULL

    @classmethod
    def parse(cls, text: str) -> Mode:
        """From `str` of one."""
        kind, _, every = text.partition(":")
        return cls(kind, int(every or 0))


def activation_checkpointing(value: Any) -> str:
    """None, selective, selective:2 and so on, full, auto."""
    word = fields.text(value)
    kind, colon, every = word.partition(":")
    if colon and kind == SELECTIVE:
        return f"{kind}:{fields.count(every, 1)}"
    return fields.choice(word, *KINDS, AUTO)


def reshard(value: Any) -> float:
    """True, false, or a share."""
    if isinstance(value, bool) or str(value).isalpha():
        return float(fields.flag(value))
    return fields.number(value, 0.0, 1.0)


def micro_batch(value: Any) -> int | str:
    """A number of rows, or auto."""
    return AUTO if value == AUTO else fields.count(value, 1)


def memory(value: Any) -> int:
    """Bytes."""
    found = mebibytes(fields.text(value)) * 2**20
    if not found:
        refuse("is no limit", do="write an amount, as in 70GiB")
    return found
