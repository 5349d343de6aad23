"""Handing programs over to a real cluster by the command, and what became of them."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from worldsize.launch import shell

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.testing.slurm.cluster import Cluster

TELLS = """
import json, os, sys
seen = {"words": sys.argv[1:], "env": dict(os.environ), "path": sys.path, "python": sys.executable, "file": __file__}
print("rank", os.environ["RANK"], "begins", flush=True)
"""
LEAVES = 'open(os.path.join(os.environ["SEEN"], os.environ["RANK"]), "w").write(json.dumps(seen))\n'
_OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


@dataclass(frozen=True)
class Home:
    """A folder of a user who hands programs over."""

    cluster: Cluster
    path: Path

    def call(
        self, *options: str | Path, env: dict[str, str] | None = None, words: tuple[str, ...] = ()
    ) -> shell.Done:
        """`worldsize submit train.py OPTIONS -- WORDS`."""
        (self.path / "seen").mkdir(exist_ok=True)
        base = {**self.cluster.env, "HOME": str(self.path), "PATH": "/usr/local/bin:/usr/bin:/bin"}
        argv = [sys.executable, "-m", "worldsize", "submit", *map(str, options)]
        places = ["--job-dir", str(self.path / "job"), "--env", f"SEEN={self.path / 'seen'}"]
        return shell.call([*argv, *places, "--", *words], {**base, **(env or {})}, timeout=60, cwd=self.path)

    def job(self, *options: str | Path, env: dict[str, str] | None = None, words: tuple[str, ...] = ()) -> str:
        """The same; the job's id."""
        done = self.call(*options, env=env, words=words)
        assert done.code == 0, done.err
        return done.out.strip()

    def ended(self, job: str) -> tuple[str, str]:
        """Wait for the end of a job: its state and its log."""
        end = time.monotonic() + 120
        while True:
            asked = self.cluster.run(["squeue", "--noheader", "--states=all", "--jobs", job, "--format=%T"])
            if asked.out.strip() in _OVER:
                return asked.out.strip(), self.log(job)
            assert time.monotonic() < end, self.log(job)
            time.sleep(0.2)

    def completed(self, job: str) -> str:
        """Wait until it has ended well; its log."""
        state, log = self.ended(job)
        assert state == "COMPLETED", log
        return log

    def log(self, job: str) -> str:
        """What it printed so far."""
        path = self.path / "job" / f"slurm-{job}.out"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def seen(self) -> list[dict[str, Any]]:
        """What each rank told, by rank."""
        files = sorted((self.path / "seen").iterdir(), key=lambda path: int(path.name))
        return [json.loads(path.read_text(encoding="utf-8")) for path in files]

    def program(self, text: str = "", name: str = "train.py") -> Path:
        """A program that tells what it finds, after it has done this."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TELLS + text + "\n" + LEAVES, encoding="utf-8")
        return path
