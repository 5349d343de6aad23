"""Room: what the starter and its hosts say to each other: lines of a word and values. Pure.

To a host: `job`, `go`, `signal`, and empty lines as signs of life, over its standard input. From a host: `ready` or
`error` on a line that begins with this start's own mark; everything else that it prints is the console's.
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

MARK = "worldsize-host"
BEAT_S, SILENT_S = 10.0, 60.0
"""How often the starter gives a sign of life, and after how long without one a host takes it for dead."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one host is to run.

    Attributes:
        words: the command line of `worldsize run` there, without its endpoint.
        env: variables it gets in addition to its own.
        node: its number.
        address: where node 0 is reached, port: and on which port; None: node 0 finds out.
        beats: whether the starter gives signs of life.
    """

    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    node: int = 0
    address: str | None = None
    port: int | None = None
    beats: bool = True


def to_host(word: str, **values: Any) -> bytes:
    """One line. Values travel as they are, bytes that are no text included; a shell finds nothing to read in it."""
    return f"{word} {_packed(values)}\n".encode()


def read(line: str) -> tuple[str, dict[str, Any]]:
    """The inverse of `to_host`. Raises ValueError on another line."""
    word, _, packed = line.strip().partition(" ")
    found: dict[str, Any] = json.loads(base64.b64decode(packed, validate=True) or b"{}")
    return word, found


def to_starter(mark: str, word: str, **values: Any) -> str:
    """One line, with its mark."""
    return f"\n{MARK} {mark} {word} {_packed(values)}\n"


def from_host(mark: str, line: bytes) -> tuple[str, dict[str, Any]] | None:
    """What a host says in this line; None where it is the console's."""
    begin = f"{MARK} {mark} ".encode()
    return read(line[len(begin) :].decode()) if line.startswith(begin) else None


def job(values: Mapping[str, Any]) -> Job:
    """The job of a `job` line."""
    return Job(**{**values, "words": tuple(values["words"])})


def job_line(asked: Job) -> bytes:
    """Its inverse."""
    return to_host("job", **asdict(asked))


def _packed(values: Mapping[str, Any]) -> str:
    # Words of a command line may hold bytes that are no UTF-8; JSON's escapes keep them.
    return base64.b64encode(json.dumps(values).encode()).decode()
