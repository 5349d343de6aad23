"""Room: the programs under examples/ as a person starts them: a fresh process, its own folder, its words and its code."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.track.jsonl import latest, read

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits"
STRATEGIES = ROOT / "examples" / "strategies"
TUTORIAL = ROOT / "examples" / "tutorial" / "basic_parallelization"
PYTHON = (sys.executable,)
RUN = (sys.executable, "-m", "worldsize", "run")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what it printed on both streams."""

    code: int
    text: str

    @property
    def lines(self) -> list[str]:
        """What it printed, without the launcher's prefixes."""
        return [line.partition("] ")[2] if line.startswith("[rank ") else line for line in self.text.splitlines()]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment, with commands of this interpreter first, one thread a process, and `extra`.

    PYTHONUNBUFFERED would make two writes of each printed line, and ranks that share a pipe would speak into each other's.
    """
    here = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{here.get('PATH', '')}"
    return {**here, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(extra or {})}


def said(page: Path, *words: str) -> list[str]:
    """Lines of a page's shell blocks in which all these words stand, without what is only a comment there."""
    texts = re.findall(r"^```bash\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line.partition("  #")[0].rstrip() for text in texts for line in text.splitlines()]
    return [line for line in lines if all(word in line.split() for word in words)]


def start(*command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a program in `cwd`."""
    return subprocess.Popen(
        list(map(str, command)),
        cwd=cwd,
        env=environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 200) -> Ended:
    """Wait for its end; it is killed where that does not come in time."""
    try:
        text, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Ended(process.returncode, text)


def call(*command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> Ended:
    """Start a program in `cwd` and wait for its end."""
    return finish(start(*command, cwd=cwd, env=env))


def load(path: Path) -> ModuleType:
    """A program of the examples as a module, its `main` not run."""
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def losses(run: Path) -> dict[int, float]:
    """Of every step."""
    found: dict[int, float] = latest(read(run / "metrics.jsonl"), "loss")
    return found


def alone(folder: Path, *words: str) -> dict[int, float]:
    """The losses of the program of strategies in one process, without any engine."""
    ended = call(*PYTHON, "train.py", "-s", "single", *words, "--run_dir", "runs/single", cwd=folder)
    assert ended.code == 0, ended.text
    return losses(folder / "runs" / "single")
