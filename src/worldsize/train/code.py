"""Room: which code a training runs: the commit, and a digest of what was edited since, or of the program's file."""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import suppress
from pathlib import Path

from worldsize.runtime import env

FINGERPRINT = "WORLDSIZE_FINGERPRINT"


def fingerprint() -> dict[str, str]:
    """Plain words by name: program, and as far as they can be known digest, commit and changes (of a submitted job)."""
    program = Path(sys.argv[0]).absolute()
    found = {"program": str(program)}
    with suppress(OSError):
        found["digest"] = hashlib.sha256(program.read_bytes()).hexdigest()[:16]
    with suppress(OSError, ValueError):
        found |= {"commit": commit} if (commit := head(program.parent)) else {}
    with suppress(OSError, ValueError):
        said = (
            json.loads(Path(env.read()[FINGERPRINT]).read_text(encoding="utf-8")) if FINGERPRINT in env.read() else {}
        )
        found |= {name: said[name] for name in ("commit", "changes") if said.get(name)}
    return found


def head(folder: Path) -> str | None:
    """The commit that is checked out around a folder, from git's own files; None outside of a repository."""
    marks = (above / ".git" for above in (folder, *folder.parents))
    found = next((mark for mark in marks if mark.exists()), None)
    if found is None:
        return None
    if found.is_file():  # a worktree or submodule: "gitdir: path"
        found = found.parent / found.read_text(encoding="utf-8").partition(":")[2].strip()
    said = (found / "HEAD").read_text(encoding="utf-8").strip()
    if not said.startswith("ref: "):
        return said
    shared = (
        found / (found / "commondir").read_text(encoding="utf-8").strip() if (found / "commondir").exists() else found
    )
    for place in (found, shared):
        if (place / said[5:]).exists():
            return (place / said[5:]).read_text(encoding="utf-8").strip()
    packed = (shared / "packed-refs").read_text(encoding="utf-8").splitlines()
    return next((line.split()[0] for line in packed if line.endswith(f" {said[5:]}")), None)
