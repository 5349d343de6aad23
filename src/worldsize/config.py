"""Room: small typed values that several rooms share: durations and their units. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from worldsize.errors import ConfigError

Unit = Literal["st", "ep", "sa", "tok"]
"""Steps, epochs, samples, tokens."""

_WORDS: dict[str, Unit] = {
    "st": "st", "step": "st", "steps": "st",
    "ep": "ep", "epoch": "ep", "epochs": "ep",
    "sa": "sa", "sample": "sa", "samples": "sa",
    "tok": "tok", "token": "tok", "tokens": "tok",
}  # fmt: skip
_SCALE = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_GRAMMAR = re.compile(
    rf"\s*(\d+(?:_\d+)*(?:\.\d+)?)\s*([kmbt]?)\s*({'|'.join(sorted(_WORDS, key=len, reverse=True))})\s*",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Duration:
    """A length of training with its unit: `Duration.parse("500st")`, "10ep", "2.5Mtok" (k, M, B, T scale)."""

    count: int
    unit: Unit

    def __post_init__(self) -> None:
        if self.count < 0 or self.unit not in get_args(Unit):
            raise ConfigError(f"duration {self.count!r} {self.unit!r} is not a length of training", do=_HELP)

    @classmethod
    def parse(cls, text: str | Duration) -> Duration:
        """Read "500st", "10 epochs", "2.5Mtok", "1k samples". Raises ConfigError on anything else."""
        if isinstance(text, Duration):
            return text
        found = _GRAMMAR.fullmatch(text) if isinstance(text, str) else None
        if not found:
            raise ConfigError(f"duration {text!r} has no unit or is not a number", do=_HELP)
        number, scale, word = found.groups()
        digits, _, decimals = number.replace("_", "").partition(".")
        count, rest = divmod(int(digits + decimals) * _SCALE[scale.lower()], 10 ** len(decimals))
        if rest:
            raise ConfigError(f"duration {text!r} is not a whole number of {word}", do=_HELP)
        return cls(count, _WORDS[word.lower()])

    def __str__(self) -> str:
        return f"{self.count}{self.unit}"


@dataclass(frozen=True, slots=True)
class Window:
    """A few steps: first <= step < stop, counted from 0."""

    first: int
    stop: int

    @classmethod
    def parse(cls, text: str) -> Window:
        """Read "steps=10:13" or "10:13", the steps 10, 11 and 12. Raises ConfigError on anything else."""
        found = re.fullmatch(r"\s*(?:steps?\s*=\s*)?(\d+)\s*:\s*(\d+)\s*", text)
        if not found or int(found[1]) >= int(found[2]):
            raise ConfigError(
                "these are no steps", found=repr(text), do="write the first and the one after the last: steps=10:13"
            )
        return cls(int(found[1]), int(found[2]))

    def __contains__(self, step: int) -> bool:
        return self.first <= step < self.stop


_HELP = "write a number and a unit: 500st (steps), 10ep (epochs), 1Msa (samples), 2Btok (tokens)"
