"""Room: the true peak of a rank: a program, run as it is for three steps, and what the allocator says then. JSON by rank.

worldsize run --nproc-per-node 4 peak.py FOLDER program.py its arguments

On CUDA torch's allocator is asked. On the CPU storages are counted by the planner's own meter, in a real run with real tensors.
Where there are fewer GPUs than ranks, ranks share them: each still has an allocator of its own.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from worldsize.runtime import device, session
from worldsize.tools.plan.meter import Meter
from worldsize.train import commit, engine, loop, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STEPS = 3


class Real(Meter):
    """Counts what has memory: a pipeline looks for shapes with tensors that have none."""

    def take(self, tensor: torch.Tensor, phase: str | None = None) -> None:
        """See `Meter`."""
        if not isinstance(tensor, FakeTensor):
            super().take(tensor, phase)


def main() -> None:
    """Run the program; it ends after the last measured step."""
    folder, program, *args = sys.argv[1:]
    meter = None if torch.cuda.is_available() else Real(dict)
    _share()
    _follow(Path(folder), meter)
    sys.argv = [program, *args]
    sys.path[0] = str(Path(program).resolve().parent)
    runpy.run_path(program, run_name="__main__")


def _share() -> None:
    """Let several ranks have one GPU: to NCCL each is a host of its own."""
    os.environ["NCCL_HOSTID"] = f"rank{os.environ.get('RANK', '0')}"
    device.choose = lambda local_rank, _size, count, **_: local_rank % count if count else None  # type: ignore[assignment]
    session.identity = lambda _: None  # type: ignore[assignment]


def _follow(folder: Path, meter: Meter | None) -> None:
    offer, place, make = loop.Loop._offer, engine.Engine.place, run.Run.optimizer  # noqa: SLF001
    commit.Committer.prepare = commit.Committer.commit = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    made = [0]

    def offered(this: Any, current: Any) -> Iterator[Any]:
        if meter is None:
            yield from offer(this, current)
        else:
            with meter:
                yield from offer(this, current)
        made[0] += 1
        if made[0] == STEPS:
            _write(folder, meter)
            this.engine.comm.barrier()
            os._exit(0)

    loop.Loop._offer = offered  # type: ignore[method-assign] # noqa: SLF001
    if meter is not None:
        meter.follow()
        engine.Engine.place = _inside(meter, place)  # type: ignore[method-assign]
        run.Run.optimizer = _inside(meter, make)  # type: ignore[method-assign]


def _inside(meter: Meter, call: Callable[..., Any]) -> Any:
    def within(*args: Any, **kwargs: Any) -> Any:
        with meter:
            return call(*args, **kwargs)

    return within


def _write(folder: Path, meter: Meter | None) -> None:
    rank = int(os.environ.get("RANK", "0"))
    if meter is not None:
        found: dict[str, Any] = {"peak": meter.peak.size, "reserved": meter.peak.size, "outside": 0}
    else:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        stats = torch.cuda.memory_stats()
        found = {
            "peak": stats["allocated_bytes.all.peak"], "reserved": stats["reserved_bytes.all.peak"],
            "used": total - free, "now": stats["reserved_bytes.all.current"], "total": total,
        }  # fmt: skip
    (folder / f"rank-{rank}.json").write_text(json.dumps({"rank": rank, **found}), encoding="utf-8")


if __name__ == "__main__":
    main()
