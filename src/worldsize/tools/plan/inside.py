"""Room: the process in which a program is planned: it poses as a rank, and each layout gets a copy of it.

    python -m worldsize.tools.plan.inside REQUEST.json

Each layout's answer is a file beside the request: what was measured, or why it cannot run.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldsize.errors import WorldsizeError
from worldsize.runtime import env, failure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType


def main(request: Path) -> None:
    """Answer every question of a request, one after another."""
    asked = json.loads(request.read_text(encoding="utf-8"))
    from worldsize.tools.plan import standing

    for question in asked["questions"]:
        answer = request.parent / f"{question['name']}.json"
        child = os.fork()
        if not child:
            os._exit(_answered(asked, question, answer, standing.Trace))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not answer.exists():
            answer.write_text(
                json.dumps({"error": f"the program ended by itself, with code {code}"}), encoding="utf-8"
            )


def _answered(asked: Mapping[str, Any], question: Mapping[str, Any], answer: Path, trace: Any) -> int:
    """Run the program. Writes its answer as soon as it is known; the process ends there."""

    def write(found: Mapping[str, Any]) -> None:
        answer.with_suffix(".part").write_text(json.dumps(found), encoding="utf-8")
        answer.with_suffix(".part").rename(answer)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def said(error: WorldsizeError, trace: TracebackType | None = None) -> None:
        del trace
        write({"error": str(error)})

    try:
        failure.say = said  # commands say an error, and end their process themselves
        env.export(question["options"])
        trace(question, write).begin()
        for name in asked["unmasked"] if question["cuda"] else ():
            _unmask(name)
        _run(asked["program"], asked["args"], module=asked["module"])
        write(
            {"error": "the program ended before its second step: plan programs that train with ws.Run or ws.Trainer"}
        )
    except WorldsizeError as error:
        write({"error": str(error)})
    except BaseException as error:  # noqa: BLE001 - whatever the program ended with is the answer
        traceback.print_exc()
        write({"error": f"{type(error).__name__}: {error}".splitlines()[0], "where": _where(error)})
    return 0


def _run(program: str, args: Sequence[str], *, module: bool) -> None:
    sys.argv = [program, *args]
    if module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")


def _unmask(name: str) -> None:
    module, _, path = name.partition(":")
    kind, _, method = path.partition(".")
    setattr(getattr(import_module(module), kind), method, lambda *_: None)


def _where(error: BaseException) -> str:
    """The last line that is not torch's."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if "/torch/" not in each.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
