"""Room: what a program runs with, in words that can be compared: Python, packages, the commit of its code."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldsize.errors import WorldsizeError
from worldsize.launch import git, shell

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FILE = "fingerprint.json"

_DIST = re.compile(r"(?P<name>[^-]+(?:-[^-0-9][^-]*)*)-(?P<version>[^-]+)(?:-.*)?\.(?:dist|egg)-info", re.IGNORECASE)
_SHOWN = 6
_GIT_S, _PYTHON_S = 5.0, 30.0
_TAKE = "from worldsize.launch.fingerprint import show; show()"


@dataclass(frozen=True)
class Fingerprint:
    """What a program runs with.

    Attributes:
        python: version and kind of the interpreter.
        platform: system, processor, C library.
        packages: name -> version of what is installed for it.
        commit: of the code, where git has it; changes: of what was edited since, a digest, or "".
    """

    python: str
    platform: str
    packages: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    changes: str | None = None

    @property
    def digest(self) -> str:
        """One word for all of it."""
        return _digest(json.dumps(asdict(self), sort_keys=True))


def take(code: Path | None = None) -> Fingerprint:
    """That of this interpreter, and of the code in a folder."""
    libc = "-".join(platform.libc_ver())
    system = f"{platform.system()} {platform.machine()} {libc}".strip()
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return Fingerprint(python, system, dict(sorted(_packages())), *(_code(code) if code else (None, None)))


def of(python: str, code: Path | None, environ: Mapping[str, str]) -> Fingerprint | None:
    """That of another interpreter; None where it cannot be asked from here."""
    if python == sys.executable:
        return take(code)
    try:
        done = shell.call([python, "-c", _TAKE, *([str(code)] if code else [])], environ, timeout=_PYTHON_S)
        return read(json.loads(done.out)) if done.code == 0 else None
    except (WorldsizeError, ValueError):
        return None


def show() -> None:
    """Print that of this interpreter."""
    sys.stdout.write(json.dumps(asdict(take(Path(sys.argv[1]) if sys.argv[1:] else None))))


def read(values: Mapping[str, Any]) -> Fingerprint:
    """From its values by name, whichever of them an older version wrote."""
    return Fingerprint(**{name: values[name] for name in Fingerprint.__dataclass_fields__ if name in values})


def differences(then: Fingerprint, now: Fingerprint) -> list[str]:
    """What differs, a line each; the first few of many packages."""
    pairs = (("Python", then.python, now.python), ("system", then.platform, now.platform))
    lines = [f"{name}: {old} then, {new} now" for name, old, new in pairs if old != new]
    if then.commit and now.commit and then.commit != now.commit:
        lines.append(f"code: commit {then.commit[:10]} then, {now.commit[:10]} now")
    elif then.commit and now.commit and then.changes != now.changes:
        lines.append("code: files were edited since")
    names = sorted({*then.packages, *now.packages})
    changed = [
        f"{name}: {then.packages.get(name, 'none')} then, {now.packages.get(name, 'none')} now"
        for name in names
        if then.packages.get(name) != now.packages.get(name)
    ]
    # What a result depends on first.
    changed.sort(key=lambda line: not line.startswith(("torch", "numpy", "worldsize", "deepspeed", "nvidia")))
    more = [f"and {len(changed) - _SHOWN} more packages"] if len(changed) > _SHOWN else []
    return lines + changed[:_SHOWN] + more


def _packages() -> Iterator[tuple[str, str]]:
    """By the names of folders: reading what is in them takes a hundred times as long. Python takes the first it finds."""
    seen: set[str] = set()
    for folder in map(Path, dict.fromkeys(sys.path)):
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        for found in filter(None, map(_DIST.fullmatch, names)):
            name = re.sub(r"[-_.]+", "-", found["name"]).lower()
            if name not in seen:
                seen.add(name)
                yield name, found["version"]


def _code(folder: Path) -> tuple[str | None, str | None]:
    """Commit and a digest of the edits since; None where git does not say."""
    commit = git.say(folder, "rev-parse", "HEAD", timeout=_GIT_S)
    changes = git.say(folder, "diff", "HEAD", "--no-ext-diff", "--no-color", timeout=_GIT_S) if commit else None
    return (commit.strip() if commit else None), (_digest(changes) if changes else changes)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
