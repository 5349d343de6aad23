"""What is left of a cluster on this machine, and waiting for what Slurm says of a job."""

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from worldsize.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from worldsize.testing.slurm import Cluster


def fresh() -> Path:
    """A folder that does not exist, with a path short enough for sockets."""
    return Path(tempfile.mkdtemp(prefix="ws-")) / "c"


def left(folder: Path) -> list[str]:
    """Processes, mounts and sockets that know this folder; the folder itself."""
    found = [str(folder)] if folder.exists() else []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and any(str(folder) in word for word in process.cmdline()):
                found.append(f"{process.pid} {process.cmdline()}")
    for table in ("mounts", "net/unix"):
        lines = Path(f"/proc/self/{table}").read_text(encoding="utf-8").splitlines()
        found += [line for line in lines if str(folder) in line]
    return found


def links() -> set[str]:
    """This host's ends of clusters' cables."""
    return {name for name in psutil.net_if_addrs() if name.startswith("wsslurm")}


def submit(cluster: Cluster, *options: str, script: str) -> str:
    """The id of a new job of one shell line."""
    done = cluster.run(["sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={script}"])
    assert done.code == 0, done.err
    return done.out.strip()


def job(cluster: Cluster, number: str) -> tuple[str, str]:
    """(state, nodes) as squeue says it, ended jobs too."""
    done = cluster.run(["squeue", "-h", "-t", "all", "-j", number, "-o", "%T|%N"])
    state, _, nodes = done.out.strip().partition("|")
    return state, nodes


def wait(cluster: Cluster, number: str, fact: Callable[[str, str], bool], timeout: float = 60.0) -> tuple[str, str]:
    """Wait until `fact` holds of (state, nodes) of a job, and return both."""
    end = time.monotonic() + timeout
    while not fact(*(now := job(cluster, number))):
        if time.monotonic() > end:
            raise LaunchError(f"job {number} is {now}", found=f"{cluster.states()}")
        time.sleep(0.1)
    return now
