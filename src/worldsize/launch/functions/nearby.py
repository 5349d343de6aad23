"""Room: calls as processes of this machine, started as a node of a Slurm job starts them."""

from __future__ import annotations

import atexit
import os
import select
import selectors
import shlex
import signal
import sys
import threading
from concurrent.futures import wait
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from worldsize.launch import env, ports
from worldsize.launch.functions.here import CALL, EXIT_FILE, JOB, MEMBER
from worldsize.launch.functions.job import End, Job
from worldsize.launch.shell import Group
from worldsize.launch.slurm import ways

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from worldsize.launch.spec import JobSpec

R = TypeVar("R")
_ONE_HOST = "127.0.0.1"
_turns = threading.BoundedSemaphore(os.cpu_count() or 1)
"""How many of these jobs run at once."""
_open: set[LocalJob[object]] = set()


@dataclass(frozen=True, slots=True)
class Dependency:
    """What must have happened before."""

    kind: str
    jobs: tuple[Job[object], ...] = field(default=())

    def met(self) -> bool:
        """Whether it has, once all of them are over."""
        wait(self.jobs)
        failed = [job.cancelled() or job.exception() is not None for job in self.jobs]
        return {"afterok": not any(failed), "afternotok": all(failed)}.get(self.kind, True)


class LocalJob(Job[R]):
    """A call on this machine. It ends with this process; a program that comes to its own end waits for it."""

    def __init__(
        self, job_id: str, spec: JobSpec, folder: Path, member: int, after: Sequence[Dependency] = ()
    ) -> None:
        super().__init__(job_id, spec.job_name, folder)
        self._spec, self._member, self._after = spec, member, after
        self._stop: Callable[[], None] = lambda: None
        self._unwanted = threading.Event()

    def start(self) -> None:
        """Start it, when it is its turn."""
        _open.add(self)  # type: ignore[arg-type] # what it returns does not matter here
        self.add_done_callback(lambda _: _open.discard(self))
        threading.Thread(target=self._serve, name=f"worldsize-{self.job_id}", daemon=True).start()

    def _end(self) -> None:
        self._unwanted.set()
        self._stop()

    def _serve(self) -> None:
        if not all(each.met() for each in self._after):
            self._conclude(End(ok=False, words="never started: a job that it waits for did not end as asked"))
            return
        with _turns:
            if self.done():
                return
            try:
                code = self._run()
            except Exception as error:  # noqa: BLE001 - whoever waits must hear of it
                self._conclude(End(ok=False, words=f"not served to its end: {error}"))
                return
        words = "completed" if not code else f"failed: exit code {code}"
        self._conclude(End(not code, words))
        if code and not self.cancelled():
            with suppress(ValueError):
                sys.stderr.write(f"worldsize: job {self.job_id} ({self.name}), {words}; see {self.log}\n")

    def _run(self) -> int:
        self.state = "running here"
        with closing(ports.reserve()) as port, closing(Group()) as group:
            argv, values = self._command(port.getsockname()[1])
            child = group.start(argv, values)
            self._stop = lambda: child.send(signal.SIGTERM)
            if self._unwanted.is_set():
                self._stop()
            with closing(child):
                self._pass_on({child.stdout: "stdout", child.stderr: "stderr"})
                while (code := child.code) is None:
                    select.select([child.ended], [], [])
        return code

    def _command(self, port: int) -> tuple[list[str], dict[str, str]]:
        spec, folder = self._spec, self.folder
        ranks = spec.world_size
        way = "worldsize" if spec.launcher == ways.TASK_A_RANK else spec.launcher
        work = ways.Work(spec.program, sys.executable, log_dir=f"{folder}/logs-{self.job_id}", template=spec.command)
        argv = ways.command(way, work, ways.Place(0, (ranks,), _ONE_HOST, port, self.job_id, hosts=(_ONE_HOST,)))
        own = {CALL: str(folder), JOB: self.job_id, EXIT_FILE: f"{folder}/exit-{self.job_id}-0"}
        own |= {MEMBER: str(self._member), "SLURM_RESTART_COUNT": "0"}
        values = env.without_ranks(env.read()) | spec.env | own
        lines = [*spec.setup, f"exec {shlex.join(argv)}"]
        return ["/bin/bash", "-c", "\n".join(lines)], values

    def _pass_on(self, streams: dict[int, str]) -> None:
        """What it prints: to this program's own streams, which notebooks catch, and into its log."""
        assert self.log is not None
        with selectors.DefaultSelector() as selector, self.log.open("ab") as log:
            for descriptor in streams:
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fd)
                    log.write(data)
                    log.flush()
                    with suppress(ValueError):  # closed meanwhile: the log has it
                        getattr(sys, streams[key.fd]).write(data.decode(errors="replace"))


@atexit.register
def _finish() -> None:
    """A program's end waits for its local jobs; one that failed or was interrupted ends them."""
    if hasattr(sys, "last_value"):
        for job in list(_open):
            job.cancel()
    try:
        wait(list(_open))
    except KeyboardInterrupt:
        return
