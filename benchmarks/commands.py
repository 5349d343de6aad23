"""Room: how long our commands take to answer: help, a preview of a job, the script of a very large one. No peer."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measure

from worldsize.launch.profile import Profile
from worldsize.launch.slurm.places import Where
from worldsize.launch.slurm.script import script
from worldsize.launch.spec import JobSpec

PREVIEW = "submit train.py --nodes 2 --gpus-per-node 4 --time 2:00:00 --preview"
COMMANDS = ("jobs --help", "status --help", "why --help", "submit --help", PREVIEW)
LIMIT_S, RENDER_LIMIT_S = 0.3, 0.2
NODES, GPUS = 16_384, 4


def answered(words: list[str], folder: str) -> float:
    """Seconds from starting a command to its end. Raises RuntimeError where it fails."""
    began = time.monotonic()
    done = subprocess.run(
        measure.worldsize(*words), cwd=folder, env=measure.environment(), capture_output=True, text=True, check=False
    )
    took = time.monotonic() - began
    if done.returncode or not done.stdout:
        raise RuntimeError(f"{shlex.join(words)} ended with {done.returncode}\n{done.stderr}")
    return took


def rendered(folder: str) -> float:
    """Seconds from settings to the script of a job whose nodes are all named."""
    settings = {
        "program": ["train.py"],
        "nodes": NODES,
        "gpus_per_node": GPUS,
        "time": "2:00:00",
        "nodelist": f"node[00001-{NODES:05d}]",
        "chdir": folder,
    }
    profile, where = Profile(), Where(Path(folder, "job"), sys.executable)
    began = time.monotonic()
    text = script(JobSpec.of(settings), profile, where)
    took = time.monotonic() - began
    if f"--nodes={NODES}" not in text:
        raise RuntimeError(f"the script is not that of {NODES} nodes\n{text}")
    return took


def main() -> None:
    """Measure in turn, and print the best of each: what others do on this machine only ever adds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").touch()
        took: dict[str, list[float]] = {words: [] for words in COMMANDS}
        for _ in range(rounds):
            for words, found in took.items():
                found.append(answered(words.split(), folder))
        large = min(rendered(folder) for _ in range(rounds))
    print(f"  load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs", file=sys.stderr, flush=True)
    found = [_best(f"worldsize {words}", min(each), LIMIT_S) for words, each in took.items()]
    measure.report([*found, _best(f"a script for {NODES} nodes", large, RENDER_LIMIT_S)])


def _best(what: str, seconds: float, limit: float) -> measure.Comparison:
    return measure.Comparison(f"{what}, best", seconds, None, "s", "", limit=limit)


if __name__ == "__main__":
    main()
