"""Room: Slurm's two small grammars, host lists (`node[01-03,7],gpu1`) and counts (`2(x3),1`). No scontrol.

The grammar is that of `scontrol show hostnames` (Slurm 22.05), except that forms which it reads wrongly without an
error (`c[1-`) are refused.
"""

from __future__ import annotations

import re
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from worldsize.errors import WorldError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PIECE = r"[^\[\],\s()]*"
_RANGES = r"\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\]"
_ITEM = re.compile(rf"(?:{_PIECE}{_RANGES})+|[^\[\],\s()]+")
_LIST = re.compile(rf"(?:{_ITEM.pattern})(?:,(?:{_ITEM.pattern}))*")
_PART = re.compile(rf"({_PIECE})({_RANGES})?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([1-9][0-9]*)\))?")
_NUMBERED = re.compile(r"(.*?)([0-9]+)")
_MOST = 65536


def expand(text: str) -> list[str]:
    """The names of a host list, in its order: "a[01-03,07],b5" -> a01, a02, a03, a07, b5.

    Raises:
        WorldError: the text is not a host list; it is quoted. Text after the last bracket of a name is none.
    """
    if not _LIST.fullmatch(text):
        raise _not_a_list(text)
    return [name for item in _ITEM.finditer(text) for name in _names(item.group(), text)]


def compress(names: Iterable[str]) -> str:
    """The shortest list of runs in the given order, so that `expand(compress(names)) == list(names)`.

    Raises:
        WorldError: a name holds a character that no host name in a list can have, or there is no name.
    """
    runs: list[tuple[str, list[tuple[str, str]]]] = []
    for name in names:
        prefix, digits = _split(name)
        ranges = runs[-1][1] if runs and runs[-1][0] == prefix and digits and runs[-1][1] else None
        if ranges is None:
            runs.append((prefix, [(digits, digits)] if digits else []))
        elif digits == _after(*ranges[-1]):
            ranges[-1] = (ranges[-1][0], digits)
        else:
            ranges.append((digits, digits))
    if not runs:
        raise _not_a_list("")
    return ",".join(_written(prefix, ranges) for prefix, ranges in runs)


def counts(text: str) -> list[int]:
    """One number a node, from Slurm's repetition form: "2(x3),1" -> 2, 2, 2, 1.

    Raises:
        WorldError: the text is not of that form; it is quoted.
    """
    found = [_COUNT.fullmatch(part) for part in text.split(",")]
    if not all(found):
        raise WorldError(f"{text!r} is not a list of counts per node", do="Slurm writes it like 2(x3),1")
    pairs = [(int(match[1]), int(match[2] or 1)) for match in found if match]
    return [count for count, times in pairs for _ in range(times)]


def _names(item: str, text: str) -> Iterator[str]:
    parts = [(prefix, ranges) for prefix, ranges in _PART.findall(item) if prefix or ranges]
    choices = [[n for part in ranges[1:-1].split(",") for n in _numbers(part, text)] for _, ranges in parts if ranges]
    if prod(map(len, choices)) > _MOST:
        raise _not_a_list(text)
    form = "".join(
        prefix.replace("{", "{{").replace("}", "}}") + ("{}" if ranges else "") for prefix, ranges in parts
    )
    # As Slurm does: the last bracket runs fastest, then the first, then the second.
    *slow, fast = choices or [[""]]
    for *numbers, last in product(*reversed(slow), fast):
        yield form.format(*reversed(numbers), last)


def _numbers(part: str, text: str) -> Iterator[str]:
    low, _, high = part.partition("-")
    first, last = int(low), int(high or low)
    if not first <= last < first + _MOST:
        raise _not_a_list(text)
    return (str(number).zfill(len(low)) for number in range(first, last + 1))


def _split(name: str) -> tuple[str, str]:
    if not re.fullmatch(r"[^\[\],\s()]+", name):
        raise _not_a_list(name)
    found = _NUMBERED.fullmatch(name)
    return (found[1], found[2]) if found else (name, "")


def _after(first: str, last: str) -> str:
    return str(int(last) + 1).zfill(len(first)) if int(last) - int(first) + 1 < _MOST else ""


def _written(prefix: str, ranges: list[tuple[str, str]]) -> str:
    parts = [first if first == last else f"{first}-{last}" for first, last in ranges]
    plain = not ranges or (len(ranges) == 1 and ranges[0][0] == ranges[0][1])
    return prefix + ("".join(parts) if plain else f"[{','.join(parts)}]")


def _not_a_list(text: str) -> WorldError:
    return WorldError(f"{text!r} is not a host list", do="write it as Slurm does: node1,gpu[01-04,7]")
