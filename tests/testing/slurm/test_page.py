"""docs/slurm-on-a-laptop.md is run as written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing.slurm.looking import fresh, left

PAGE = Path(__file__).parents[3] / "docs" / "slurm-on-a-laptop.md"


def block(language: str) -> str:
    """The one block in that language."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(found) == 1
    return str(found[0])


@pytest.mark.slurm
def test_the_page_is_true() -> None:
    """Its commands in their order, in a temporary folder of their own, and its Python."""
    folder = fresh().parent
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "TMPDIR": str(folder), "PATH": path}
    told = ("bash", "-O", "expand_aliases", "-e", "-c", block("bash")), (sys.executable, "-c", block("py"))
    for argv in told:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr + done.stdout
    assert left(folder) == [str(folder)]
    shutil.rmtree(folder)
