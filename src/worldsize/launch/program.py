"""Room: from what a person named (script, module, executable) to the argv of a rank, and how many ranks fit here."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError
from worldsize.runtime import visible

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def argv(program: str, args: Sequence[str], *, module: bool = False, python: bool = True) -> tuple[str, ...]:
    """What every rank executes. The arguments are passed on as they are.

    Args:
        program: a Python script, a module with `module`, or anything executable: a path, or a name on PATH.
        args: the program's own.
        module: `program` is a module, as in `python -m`.
        python: False: `program` is executed as it is, whatever it looks like.

    Raises:
        ConfigError: there is no such program, or it is one that may not be executed.
    """
    if module and not python:
        raise ConfigError("--module and --no-python contradict each other", do="drop one of them")
    if module:
        return (sys.executable, "-u", "-m", program, *args)
    path = Path(program)
    if path.is_file() and not os.access(path, os.X_OK) and not (python and _is_python(path)):
        raise ConfigError(f"{program!r} is not executable", do=f"chmod +x {program}")
    if python and (
        path.is_dir() or (path.is_file() and (path.suffix in {".py", ".pyz"} or not os.access(path, os.X_OK)))
    ):
        return (sys.executable, "-u", program, *args)
    if path.is_file() and os.access(path, os.X_OK):
        return (str(path.absolute()), *args)
    found = shutil.which(program)
    if found is None:
        raise ConfigError(
            f"there is no program {program!r}",
            found=f"working folder {Path.cwd()}",
            do="name a script, an executable, or a module with -m",
        )
    return (found, *args)


def _is_python(path: Path) -> bool:
    """Whether Python should read it: by its name, or where no first line names another interpreter."""
    with path.open("rb") as file:
        first = file.readline(256)
    return path.suffix in {".py", ".pyz"} or not first.startswith(b"#!") or b"python" in first


def ranks(asked: str, environ: Mapping[str, str], device: str | None) -> int:
    """How many ranks `--nproc-per-node` means here: a number, "gpu", "cpu" (processors), or "auto" (GPUs, or one).

    Raises:
        ConfigError: neither a number of at least 1 nor one of those words; no GPU for "gpu"; `device` is "cuda" and
            there are fewer GPUs than ranks.
    """
    gpus = count_gpus(environ) if asked in {"gpu", "auto"} or device == "cuda" else 0
    counts = {"gpu": gpus, "auto": gpus if gpus and device != "cpu" else 1, "cpu": len(os.sched_getaffinity(0))}
    count = counts[asked] if asked in counts else int(asked) if asked.isascii() and asked.isdigit() else 0
    if count < 1:
        found = "no GPU is visible" if asked == "gpu" else repr(asked)
        raise ConfigError("--nproc-per-node has no ranks", found=found, do="give a number, auto, gpu or cpu")
    if device == "cuda" and count > gpus:
        raise ConfigError(
            f"{count} ranks need {count} GPUs, one each",
            found=f"{gpus} visible, CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES', 'unset')}",
            do=f"use --nproc-per-node {gpus}" if gpus else "use --device cpu",
        )
    return count


def count_gpus(environ: Mapping[str, str]) -> int:
    """GPUs that a process started with `environ` would see. No torch."""
    listed = visible.entries(environ.get(visible.VISIBLE))
    return visible.visible_count(listed, installed_gpus() if listed is None else 0)


def installed_gpus() -> int:
    """GPUs of this machine, as far as its driver sees them. No torch."""
    try:
        import pynvml
    except ImportError:
        return sum(device.name.removeprefix("nvidia").isdigit() for device in Path("/dev").glob("nvidia[0-9]*"))
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
