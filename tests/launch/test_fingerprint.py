"""The fingerprint of an environment: what it knows, what it costs, how two are compared."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from worldsize.launch import env, fingerprint
from worldsize.launch.fingerprint import Fingerprint, differences

if TYPE_CHECKING:
    from pathlib import Path

THEN = Fingerprint("CPython 3.11.2", "Linux x86_64", {"torch": "2.11.0", "rich": "13"}, "a" * 40, "")


def test_it_knows_every_installed_package_with_its_version() -> None:
    """The same as the packages' own metadata say, without reading them: of several copies the first on the path."""
    found = fingerprint.take().packages
    stated = {
        dist.metadata["Name"].lower().replace("_", "-").replace(".", "-"): dist.version
        for dist in reversed(list(importlib.metadata.distributions()))
    }
    assert {name: found.get(name) for name in stated} == stated


def test_it_costs_little() -> None:
    """Well under a third of a second of work; the best of several, on a machine that others use."""

    def took() -> float:
        began = time.process_time()
        fingerprint.take()
        return time.process_time() - began

    assert min(took() for _ in range(3)) < 0.3


def test_another_interpreter_is_asked() -> None:
    """It answers as this one does for itself; one that is not there answers nothing."""
    alike = f"{sys.exec_prefix}/bin/../bin/python"
    assert fingerprint.of(alike, None, env.read()) is not None
    assert fingerprint.of("/none/python", None, {}) is None


def test_edits_of_the_code_show(tmp_path: Path) -> None:
    """A commit, and then what was edited since; no repository has neither."""
    assert fingerprint.take(tmp_path).commit is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "a.py").write_text("1")
    for words in (["init"], ["add", "."], ["commit", "-m", "x"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    clean = fingerprint.take(tmp_path)
    (tmp_path / "a.py").write_text("2")
    edited = fingerprint.take(tmp_path)
    assert (clean.changes, edited.commit) == ("", clean.commit)
    assert differences(clean, edited) == ["code: files were edited since"]
    assert clean.digest != edited.digest


def test_what_differs_is_a_few_lines() -> None:
    """What results depend on first, then the rest, then how many more."""
    many = {f"p{number}": "1" for number in range(20)}
    now = Fingerprint("CPython 3.12.1", "Linux x86_64", {"torch": "2.13.0", "rich": "13", **many}, "b" * 40, "")
    lines = differences(THEN, now)
    assert lines[:3] == [
        "Python: CPython 3.11.2 then, CPython 3.12.1 now",
        f"code: commit {'a' * 10} then, {'b' * 10} now",
        "torch: 2.11.0 then, 2.13.0 now",
    ]
    assert (len(lines), lines[-1]) == (9, "and 15 more packages")


def test_the_same_twice_is_no_difference() -> None:
    """Whichever version of it wrote the other."""
    assert differences(THEN, fingerprint.read({**THEN.__dict__, "later": 1})) == []
