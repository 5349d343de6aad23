"""Room: Slurm's grammar for time, memory and array indices: text to numbers and back. Pure.

What is accepted is what sbatch 22.05 accepts, less the forms that it reads as something else than they look like.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain, pairwise

from worldsize.errors import ConfigError

MAX_SECONDS = 2**31 - 1
"""68 years. Slurm counts in 32 bits, and makes a short limit of a longer one."""
MAX_INDEX = 4_000_000
"""The largest array index that Slurm can be configured for."""

_N = r"([0-9]+)"
_TIMES: tuple[tuple[re.Pattern[str], tuple[int, ...]], ...] = (
    (re.compile(_N), (60,)),
    (re.compile(f"{_N}:{_N}"), (60, 1)),
    (re.compile(f"{_N}:{_N}:{_N}"), (3600, 60, 1)),
    (re.compile(f"{_N}-{_N}"), (86400, 3600)),
    (re.compile(f"{_N}-{_N}:{_N}"), (86400, 3600, 60)),
    (re.compile(f"{_N}-{_N}:{_N}:{_N}"), (86400, 3600, 60, 1)),
)
_MEMORY = re.compile(r"([0-9]+)(?:\.([0-9]+))?(?:([kmgt])(?:i?b)?)?", re.IGNORECASE)
_KIB = {"k": 1, "m": 2**10, "g": 2**20, "t": 2**30}
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+)(?::([0-9]+))?)?")
_TIME_HELP = (
    "write minutes (90), minutes:seconds (90:00), hours:minutes:seconds (1:30:00), days-hours (2-12) or UNLIMITED"
)
_MEMORY_HELP = "write a number of MiB or a number with K, M, G or T (64G), or all for all of the node"
_ARRAY_HELP = "write indices and ranges, and after % how many may run at once: 0-19%4, 1,3,5, 0-100:10"


def seconds(text: str | int) -> int | None:
    """A time limit in seconds; None is no limit. A bare number counts minutes, "4:00" is four minutes.

    Raises:
        ConfigError: sbatch would refuse it, or read it as another time.
    """
    word = _word(text)
    if word.upper() in {"UNLIMITED", "INFINITE"}:
        return None
    found = [(match, scale) for pattern, scale in _TIMES if (match := pattern.fullmatch(word))]
    if not found:
        raise ConfigError(f"{text!r} is no length of time to Slurm", do=_TIME_HELP)
    match, scale = found[0]
    total = sum(int(number) * unit for number, unit in zip(match.groups(), scale, strict=True))
    if total > MAX_SECONDS:
        raise ConfigError(f"{text!r} is longer than Slurm can count", found=f"{total} s", do="write UNLIMITED")
    return total or None  # a limit of zero asks for none


def time_text(limit: int | None) -> str:
    """Seconds as days-hours:minutes:seconds, or UNLIMITED; `seconds` reads the same number back."""
    if limit is None:
        return "UNLIMITED"
    assert limit > 0, limit
    minutes, rest = divmod(limit, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hours:02}:{minutes:02}:{rest:02}"


def mebibytes(text: str | int) -> int:
    """Memory in MiB, rounded up; 0 is all of the node. K, M, G, T count in 1024s, with B or iB behind them too.

    "4GB" is what sbatch makes of it, 4 GiB, which is never less than was meant.

    Raises:
        ConfigError: it is no amount of memory, or a decimal whose unit is not said.
    """
    word = _word(text)
    if word.lower() == "all":
        return 0
    found = _MEMORY.fullmatch(word)
    if not found or (found[2] and not found[3]):
        raise ConfigError(f"{text!r} is no amount of memory", do=_MEMORY_HELP)
    number, decimals, unit = found[1], found[2] or "", (found[3] or "m").lower()
    # -(-a // b) rounds up; whole numbers throughout, so that 0.1G is not a little more than it is.
    kib: int = int(number + decimals) * _KIB[unit]
    return -(-kib // (1024 * int("1" + "0" * len(decimals))))


def memory_text(mib: int) -> str:
    """MiB as sbatch takes them; 0, all of the node, is its "0"."""
    return f"{mib}M" if mib else "0"


@dataclass(frozen=True, slots=True)
class Array:
    """The members of a job array."""

    indices: tuple[int, ...]
    """Ascending, each once."""
    at_once: int | None = None
    """How many may run at the same time; None: as many as fit."""

    def __str__(self) -> str:
        limit = "" if self.at_once is None else f"%{self.at_once}"
        return ",".join(first if first == last else f"{first}-{last}" for first, last in _runs(self.indices)) + limit


def array(text: str | int) -> Array:
    """Read Slurm's array indices: "0-19%4", "1,3,5-9:2".

    Raises:
        ConfigError: it is no such list, or an index comes twice or is larger than Slurm has.
    """
    members, percent, limit = _word(text).partition("%")
    ranges = [_RANGE.fullmatch(part) for part in members.split(",")]
    if not all(ranges) or (percent and not re.fullmatch("[1-9][0-9]*", limit)):
        raise ConfigError(f"{text!r} is no list of array indices", do=_ARRAY_HELP)
    found = list(chain.from_iterable(_indices(match, text) for match in ranges if match))
    if len(set(found)) < len(found):
        raise ConfigError(f"{text!r} names an array index twice", do="name each once")
    return Array(tuple(sorted(found)), int(limit) if percent else None)


def _indices(match: re.Match[str], text: str | int) -> range:
    first, step = int(match[1]), int(match[3] or 1)
    last = int(match[2] or first)
    if step < 1 or not first <= last <= MAX_INDEX:
        raise ConfigError(
            f"{text!r} is no list of array indices",
            found=match[0],
            do=f"ranges go up, in steps of 1 or more, to {MAX_INDEX} at most",
        )
    return range(first, last + 1, step)


def _runs(indices: tuple[int, ...]) -> list[tuple[str, str]]:
    starts = [0, *(at for at, (a, b) in enumerate(pairwise(indices), start=1) if b != a + 1), len(indices)]
    return [(str(indices[at]), str(indices[end - 1])) for at, end in pairwise(starts)]


def _word(text: str | int) -> str:
    return text if isinstance(text, str) else str(text)
