"""Room: a function on fresh processes of this machine, with torchrun's environment; its results, or its error."""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle

from worldsize.errors import EXIT_STOPPED, LaunchError
from worldsize.launch import env, local, program
from worldsize.launch.logs import Printed
from worldsize.launch.plan import Plan
from worldsize.launch.scratch import Scratch
from worldsize.launch.spawned import pack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from worldsize.launch.verdict import Verdict

T = TypeVar("T")

_CHILD = """\
import json, sys
with open(sys.argv[1] + "/path.json") as file:
    sys.path[:] = json.load(file)
from worldsize.launch.spawned import main
main(sys.argv[1])"""


def spawn(fn: Callable[..., T], nproc: int | str, args: Sequence[Any] = ()) -> list[T]:
    """Call `fn(*args)` in `nproc` fresh processes of this machine and return what they returned, by rank.

    The processes find torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, ...), so `fn` may use a Run, or
    `torch.distributed.init_process_group()`. It works from notebooks and scripts alike: the function travels by
    value, nothing is imported again, and no `if __name__ == "__main__"` is needed. What the ranks print is printed
    here, each line with its rank.

    Args:
        fn: any function, lambdas and those of a notebook included.
        nproc: the number of processes, or "auto", "gpu" or "cpu" as in `worldsize run --nproc-per-node`.
        args: its arguments; pickled once, equal for all ranks.

    Raises:
        Exception: the exception of the rank that failed first; a note says which rank where, with its traceback.
        LaunchError: a rank ended without an exception: killed, or by its own exit code.
        KeyboardInterrupt: Ctrl-C; the processes have ended.
        SystemExit: with code 75, where the ranks stopped on request with everything committed.
    """
    with Scratch("spawn") as scratch:
        folder = scratch.path
        (folder / "call.pkl").write_bytes(pack(fn, tuple(args)))
        (folder / "path.json").write_text(json.dumps(sys.path), encoding="utf-8")
        plan = Plan(
            argv=(sys.executable, "-u", "-c", _CHILD, str(folder)),
            nproc=program.ranks(str(nproc), env.read(), None),
            log_dir=folder,
        )
        verdict = local.supervise(plan, Printed(), say=False)
        if verdict.code:
            raise _error(verdict, folder)
        return [cloudpickle.loads((folder / f"rank-{rank:04d}.result").read_bytes()) for rank in range(plan.nproc)]


def _error(verdict: Verdict, folder: Path) -> BaseException:
    cause = verdict.cause
    if cause is None:
        if verdict.code == EXIT_STOPPED:
            return SystemExit(EXIT_STOPPED)
        return KeyboardInterrupt() if verdict.code == 128 + signal.SIGINT else LaunchError(str(verdict.line))
    raised = folder / f"rank-{cause.rank:04d}.raised"
    who = f"rank {cause.rank} of {cause.world} on {cause.host}"
    if not raised.exists():
        return LaunchError(f"{cause.what} ({who}{f', {cause.where}' if cause.where else ''})", do=cause.do)
    sent, trace = cloudpickle.loads(raised.read_bytes())
    error: BaseException = sent
    if sent is None:
        error = LaunchError(f"{cause.what} ({who}; the exception cannot be sent here)")
    error.add_note(f"\nOn {who}{f' ({cause.where})' if cause.where else ''}:\n{trace}")
    return error
