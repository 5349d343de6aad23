"""Room: questions about layouts, and the process that answers them by running the program. No torch here."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldsize.errors import LaunchError
from worldsize.launch import env, shell

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TOLD = {
    "WORLDSIZE_STALL": "off", "WORLDSIZE_NONFINITE": "ignore", "WORLDSIZE_DEVICE": "cpu", "WORLDSIZE_TRACK": "",
    "WORLDSIZE_PROFILE_STEPS": "", "WORLDSIZE_LEDGER": "", "WORLDSIZE_STOP_AFTER": "",
    "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1",
}  # fmt: skip
"""Whatever the program asks for: planned are forward, backward and update."""
_TAIL = 12


@dataclass(frozen=True, slots=True)
class Program:
    """What is planned.

    Attributes:
        program: a script, or with `module` a module.
        args: its own arguments.
        unmasked: functions (`module:Class.name`) that make attention masks here, where a GPU's kernel needs none.
    """

    program: str
    args: tuple[str, ...] = ()
    module: bool = False
    unmasked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """One rank of one layout.

    Attributes:
        name: of the answer.
        rank, ranks: who the process poses as, among how many.
        local: ranks of a node.
        options: what the program is told, as a command line would.
        live: after how many micro-batches of a step the rest are like the last of them; 0 where all must be run.
        cuda: whether the CPU's own kernels stand for themselves, or for a GPU's.
    """

    name: str
    rank: int
    ranks: int
    local: int
    options: Mapping[str, str] = field(default_factory=dict)
    live: int = 2
    cuda: bool = True


def answers(program: Program, questions: Sequence[Question]) -> list[dict[str, Any]]:
    """What each was answered: see `standing.Trace`; {"error": …} where the layout cannot run.

    Raises:
        LaunchError: the process came to an end without answers.
    """
    with tempfile.TemporaryDirectory(prefix="worldsize-plan-") as name:
        folder = Path(name)
        request = folder / "request.json"
        asked = [
            {**asdict(each), "options": {**each.options, "WORLDSIZE_RUN_DIR": str(folder / f"{each.name}.run")}}
            for each in questions
        ]
        request.write_text(json.dumps({**asdict(program), "questions": asked}), encoding="utf-8")
        told = {**env.without_ranks(env.read()), **_TOLD}
        done = shell.call([sys.executable, "-m", "worldsize.tools.plan.inside", str(request)], told)
        found = [_read(folder / f"{each.name}.json") for each in questions]
    if done.code or None in found:
        tail = "\n".join((done.out + done.err).strip().splitlines()[-_TAIL:])
        raise LaunchError(
            f"planning ended with code {done.code}", found=tail or None, do="run the program by itself first"
        )
    return [
        answer | ({"said": done.err[-2000:]} if "error" in answer else {}) for answer in found if answer is not None
    ]


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
