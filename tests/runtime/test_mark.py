"""How far an attempt has come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from worldsize.runtime.mark import Mark, read

if TYPE_CHECKING:
    from pathlib import Path

CHILD = """
import os, signal, sys
from pathlib import Path
from worldsize.runtime.mark import Mark
mark = Mark(Path(sys.argv[1]))
for made in range(1, 43):
    mark(made)
os.kill(os.getpid(), signal.SIGKILL)
"""

FULL = """
import os, sys
from pathlib import Path
from worldsize.runtime.mark import Mark
from worldsize.testing.faults import use_up
folder = Path(sys.argv[1])
use_up(folder / "other")
mark = Mark(folder / "at", print)
for made in range(1, 43):
    if made == 42:
        (folder / "other").unlink()
    mark(made)
"""


def test_it_survives_a_kill(tmp_path: Path) -> None:
    """The last step, and when it was made."""
    began = time.time()
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path / "at")], check=False)
    assert done.returncode == -signal.SIGKILL
    found = read(tmp_path / "at")
    assert found is not None
    assert found[0] == 42
    assert began <= found[1] <= time.time()


def test_without_a_step_there_is_none(tmp_path: Path) -> None:
    """Nor without a file, nor in one of another kind."""
    Mark(tmp_path / "at")
    (tmp_path / "other").write_bytes(os.urandom(3))
    assert [read(tmp_path / name) for name in ("at", "nothing", "other")] == [None, None, None]


def test_a_full_disk_is_said_once_and_ends_nothing(small_disk: Path) -> None:
    """When there is room again, the next step is marked."""
    done = subprocess.run([sys.executable, "-c", FULL, small_disk], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert "'at': No space left on device" in line
    assert (read(small_disk / "at") or ())[:1] == (42,)


def test_no_file_no_mark(tmp_path: Path) -> None:
    """Where not even the file can be made, steps are made all the same."""
    said: list[str] = []
    mark = Mark(tmp_path / "nowhere" / "at", said.append)
    mark(1)
    mark(2)
    assert len(said) == 1
