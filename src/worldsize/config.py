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


_HELP = "write a number and a unit: 500st (steps), 10ep (epochs), 1Msa (samples), 2Btok (tokens)"
