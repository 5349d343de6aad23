"""The same from a shell, over several commands."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.testing.slurm.looking import fresh, left

if TYPE_CHECKING:
    from pathlib import Path


def call(folder: Path, command: str, *words: str) -> tuple[int, str]:
    """The exit code and output of one command."""
    argv = [sys.executable, "-m", "worldsize.testing.slurm", command, "--dir", str(folder), *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slurm
def test_a_cluster_from_a_shell() -> None:
    """up, env, exec, kill-node, status, start-node, cut, join, down."""
    folder = fresh()
    assert f'eval "$(python -m worldsize.testing.slurm env --dir {folder})"' in call(folder, "up", "--nodes", "2")[1]
    assert call(folder, "env") == (0, f"export SLURM_CONF={folder}/etc/slurm.conf\n")
    assert call(folder, "exec", "node2", "--", "sh", "-c", "hostname; exit 3") == (3, "node2\n")
    assert call(folder, "kill-node", "node1") == (0, "")
    assert "node1    off" in call(folder, "status")[1]
    assert call(folder, "start-node", "node1") == (0, "")
    for command in ("cut", "join"):
        assert call(folder, command, "node2") == (0, "")
    code, said = call(folder, "kill-node", "node7")
    assert (code, said) == (
        2,
        "python -m worldsize.testing.slurm: there is no node node7. Found: ctl, node1, node2.\n",
    )
    assert call(folder, "down") == (0, "")
    assert left(folder) == []
    assert call(folder, "status")[0] == 2
    shutil.rmtree(folder.parent)
