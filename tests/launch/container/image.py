"""An image for Charliecloud, made of what this machine has: a few programs of its own, libraries and Python bound.

Slurm's commands are not in it, nor is any other program of the host.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

_FOLDERS = (
    "usr/bin",
    "usr/lib",
    "usr/lib64",
    "etc",
    "dev",
    "proc",
    "sys",
    "tmp",
    "run",
    "root",
    "home",
    "var/tmp",
    "srv",
)
_PROGRAMS = ("env", "sh")
_SYSTEM = "/usr"
"""Where the system's own Python is: beside all other programs, so that it alone is copied."""
ROOT = Path(__file__).parents[3]


def make(folder: Path) -> Path:
    """An image in this folder."""
    for name in _FOLDERS:
        (folder / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (folder / name).symlink_to(f"usr/{name}")
    for name in _PROGRAMS:
        shutil.copy(str(shutil.which(name)), folder / "usr" / "bin" / name)
    if sys.base_prefix == _SYSTEM:
        for name in {"python3", Path(sys.executable).resolve().name}:
            shutil.copy(Path(sys.executable).resolve(), folder / "usr" / "bin" / name)
    for name in ("hosts", "resolv.conf", "passwd", "group"):
        (folder / "etc" / name).touch()
    (folder / "etc" / "image").write_text("ours", encoding="utf-8")
    for path in binds():
        (folder / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
    return folder


def binds() -> tuple[str, ...]:
    """Libraries, the interpreter and this project."""
    prefixes = {sys.base_prefix, sys.prefix, str(ROOT)} - {_SYSTEM}
    own = [path for path in prefixes if not any(path != other and path.startswith(f"{other}/") for other in prefixes)]
    return ("/usr/lib", "/usr/lib64", *sorted(own))
