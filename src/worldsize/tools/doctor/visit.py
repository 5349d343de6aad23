"""Room: one visit of the doctor: agents started, hosts examined, findings judged, everything ended."""

from __future__ import annotations

import re
import signal
import sys
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worldsize.errors import NotStartedError
from worldsize.tools.doctor.examine import QUICK, Examination, Limits
from worldsize.tools.doctor.hub import Hub
from worldsize.tools.doctor.judge import judge
from worldsize.tools.doctor.seen import Seen
from worldsize.tools.doctor.start import Started

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from worldsize.tools.doctor.finding import Finding
    from worldsize.tools.doctor.start import Way

_LATE_S = 60.0
"""How much later than the first host the others may come."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is looked at.

    Attributes:
        run_dir: the folder for runs.
        shared: whether it was named: then all hosts must share it.
        quick: shorter measurements.
        torch: whether collectives are measured; None: if not quick, or where there are GPUs.
        patience: seconds to wait for the first host.
    """

    run_dir: str
    shared: bool = False
    quick: bool = False
    torch: bool | None = None
    patience: float = 600.0


def visit(way: Way, ask: Ask, environ: Mapping[str, str], say: Callable[[str], None]) -> list[Finding]:
    """The findings about the hosts of a way.

    Raises:
        NotStartedError: no host answered, or the command that reaches them is not there.
    """
    limits = QUICK if ask.quick else Limits()
    with _orderly(), closing(Started()) as started, Hub(here=way.here) as hub:
        started.start(way, hub.door, environ)
        hub.gather(lambda: started.expected(way.count, hub.hosts), ask.patience, _LATE_S)
        hub.sort(way.hosts.index if way.hosts else _natural)
        lost = _lost(way, hub, started)
        if not hub.hosts:
            raise NotStartedError("no host answered the doctor", found="; ".join(lost.values()), do="see why")
        seen = Seen(lost=lost, slurm=way.nodes is not None, shared_asked=ask.shared)
        examination = Examination(hub, limits, seen)
        examination.facts()
        gpus = any(facts.gpus for facts in seen.facts.values())
        torch = ask.torch if ask.torch is not None else gpus or not ask.quick
        say(f"the doctor looks at {', '.join(hub.hosts)}: {limits.total(torch=torch):.0f} s at most where all answer")
        return judge(examination.rest(ask.run_dir, torch=torch))


def _lost(way: Way, hub: Hub, started: Started) -> dict[str, str]:
    """Hosts that did not come, and why; where srun started them, those of the job whose name is not among them."""
    if way.hosts:
        return {host: started.why(host) for host in way.hosts if host not in hub.hosts}
    missing = way.count - len(hub.hosts)
    names = [name for name in way.names if name not in hub.hosts] or [f"{missing} of {way.count} hosts"]
    return dict.fromkeys(names, started.why("")) if missing > 0 else {}


@contextmanager
def _orderly() -> Iterator[None]:
    """In this block SIGTERM ends as SIGINT does: srun is heard out, so that Slurm gets its nodes back."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _natural(name: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
