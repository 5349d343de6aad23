"""Room: what a thread of this process waits for: which collective, by its group and number; and in which line of the program.

Torch's flight recorder counts the collectives of each group, those of NCCL and gloo alike, also where DDP or FSDP calls them
from C++. The board (see `board`) counts its own questions.
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldsize.runtime.stacks import is_users

if TYPE_CHECKING:
    from types import FrameType

    from worldsize.runtime.board import Board

_BOARD = "board"
_FILES = ("distributed_c10d.py", "board.py", "comm.py", "mpi_ops.py")
"""Of torch, of ours, of Horovod: who is in one of them waits for others."""


@dataclass(frozen=True, slots=True)
class Call:
    """A collective that this process has begun and that is not over.

    Attributes:
        group: torch's name of the group, or the board.
        number: which one of the group, counted alike on every rank.
        name: such as "all_reduce".
    """

    group: str
    number: int
    name: str

    @property
    def words(self) -> str:
        """For a person."""
        if self.group == _BOARD:
            return "the agreement between ranks"
        return f"{self.name} ({self.number} of group {self.group})"


@dataclass(frozen=True, slots=True)
class Waiting:
    """Where a thread stands.

    Attributes:
        open: collectives under way, the oldest first.
        begun: by group, how many this process has begun.
        ranks: by group, whose they are; a group that is not there belongs to all.
        inside: whether the thread is in the code that waits for other ranks.
        line: the innermost line of the user's program: "train.py:31 in main".
    """

    open: tuple[Call, ...] = ()
    begun: dict[str, int] = field(default_factory=dict)
    ranks: dict[str, list[int]] = field(default_factory=dict)
    inside: bool = False
    line: str = ""


def look(thread: int, board: Board | None) -> Waiting:
    """Where a thread of this process stands, and which collectives are under way.

    Args:
        thread: its `threading.get_ident`.
        board: where questions and small sums are answered here, if there is one.
    """
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - the one way to another thread's frames
    found, begun, ranks = _recorded()
    files = []
    line = ""
    while frame is not None:
        files.append(frame.f_code.co_filename)
        line = line or _line(frame)
        frame = frame.f_back
    inside = any(Path(file).name in _FILES and not is_users(file) for file in files)
    if board is not None:
        begun[_BOARD] = board.begun
        if any(Path(file).name == "board.py" and not is_users(file) for file in files):
            found = [Call(_BOARD, board.begun, "agreement"), *found]
    return Waiting(tuple(found), begun, ranks, inside, line)


def main() -> int:
    """The thread that calls, as `look` names it."""
    return threading.get_ident()


def _line(frame: FrameType) -> str:
    file = frame.f_code.co_filename
    return f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}" if is_users(file) else ""


def _recorded() -> tuple[list[Call], dict[str, int], dict[str, list[int]]]:
    """What the flight recorder has: collectives under way, how many were begun by group, ranks by group."""
    module = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(module, "_dump_fr_trace_json", None) or getattr(module, "_dump_nccl_trace_json", None)
    if dump is None:
        return [], {}, {}
    body: dict[str, Any] = json.loads(dump(True, False))  # noqa: FBT003 - of C++, by position only
    entries = body.get("entries", [])
    found = [_call(each) for each in entries if not each["retired"] and each["state"] != "completed"]
    begun: dict[str, int] = {}
    for each in entries:
        if not each["is_p2p"]:
            group = each["process_group"][0]
            begun[group] = max(begun.get(group, 0), each["collective_seq_id"])
    return found, begun, {name: _numbers(facts) for name, facts in body.get("pg_config", {}).items()}


def _call(entry: dict[str, Any]) -> Call:
    name, group = entry["profiling_name"].rpartition(":")[2], entry["process_group"][0]
    if entry["is_p2p"]:
        return Call(f"{group}, between two", entry["p2p_seq_id"], name)
    return Call(group, entry["collective_seq_id"], name)


def _numbers(facts: dict[str, Any]) -> list[int]:
    """[0, 1] of {"ranks": "[0, 1]"}; nothing where torch does not say it."""
    try:
        return [int(word) for word in str(facts.get("ranks", "")).strip("[]").split(",") if word.strip()]
    except ValueError:
        return []
