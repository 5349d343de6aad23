"""Jobs of a real Slurm that live until they are told to stop, and our commands about them."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

from worldsize.launch import shell

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from worldsize.testing.slurm.cluster import Cluster

LIVES = """
import os, signal, sys, time
rank, here = os.environ["RANK"], sys.argv[1]
stop = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda *_: stop.append(1))
at = here + "/step"
step = int(open(at).read()) if os.path.exists(at) else 0
print(f"rank {rank} resumes from step {step}" if step else f"rank {rank} begins", flush=True)
while not stop and not os.path.exists(here + "/end"):
    time.sleep(0.05)
if os.path.exists(here + "/end"):
    sys.exit(int(open(here + "/end").read() or 0))
if rank == "0":
    open(at, "w").write(str(step + 3))
    open(os.environ["WORLDSIZE_EXIT_FILE"], "a").write(f"stopped {step + 3}\\n")
sys.exit(75)
"""
"""Saves when it is told to stop; ends when a file says so, with the code in it."""


class Desk:
    """A user of a cluster, with a home of his own."""

    def __init__(self, cluster: Cluster, home: Path) -> None:
        self.cluster, self.home = cluster, home
        self.job = ""

    @property
    def folder(self) -> Path:
        """The job's own."""
        return self.home / "job"

    @property
    def log(self) -> str:
        """What the job printed."""
        path = self.folder / f"slurm-{self.job}.out"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def ask(self, *words: str, timeout: float = 120) -> shell.Done:
        """Call `worldsize`, from a folder that says nothing of the job."""
        argv = [sys.executable, "-m", "worldsize", *words]
        env = {**self.cluster.env, "HOME": str(self.home), "PATH": "/usr/bin:/bin"}
        return shell.call(argv, env, timeout=timeout, cwd=self.home.parent)

    def said(self, *words: str) -> Any:
        """What a command that succeeds prints for programs."""
        done = self.ask(*words, "--json")
        assert done.code == 0, done.err
        return json.loads(done.out)

    def submit(self, *options: str, program: str = LIVES) -> str:
        """Hand a job over; its id."""
        (self.home / "train.py").write_text(program, encoding="utf-8")
        places = ("--chdir", str(self.home), "--job-dir", str(self.folder), "--launcher", "srun")
        done = self.ask("submit", "train.py", *places, *options, "--", str(self.home))
        assert done.code == 0, done.err
        self.job = done.out.strip()
        return self.job

    def live(self, *options: str) -> str:
        """Hand one over that runs, and has begun; its id."""
        self.submit(*options)
        self.until(lambda: "begins" in self.log)
        return self.job

    def end(self, code: int = 0) -> None:
        """Let it end with this code."""
        (self.home / "end").write_text(str(code), encoding="utf-8")

    def state(self, job: str | None = None) -> str:
        """As Slurm says it."""
        asked = ["squeue", "--noheader", "--states=all", "--jobs", job or self.job, "--format=%T"]
        return self.cluster.run(asked).out.strip()

    def until(self, fact: Callable[[], bool], timeout: float = 90) -> None:
        """Wait for it."""
        end = time.monotonic() + timeout
        while not fact():
            assert time.monotonic() < end, (self.cluster.run(["squeue", "--states=all"]).out, self.log)
            time.sleep(0.2)
