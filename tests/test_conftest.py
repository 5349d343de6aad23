"""What a session says and how it ends where tests did not run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SHOULD_RUN_ALL = os.geteuid() == 0 and Path("/etc/debian_version").exists()


def session(folder: Path, test: str, *, ci: bool) -> tuple[int, str]:
    """The exit code and output of a session over `test` under this project's conftest and settings."""
    shutil.copy(HERE / "conftest.py", folder)
    shutil.copy(HERE.parent / "pyproject.toml", folder)
    (folder / "test_it.py").write_text(f"import pytest\ndef test_runs(): pass\n{test}\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "1", "test_it.py"]
    environment = {**os.environ, "CI": "true" if ci else "", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_what_is_not_run_is_listed(tmp_path: Path) -> None:
    """A skipped test stands at the end with its reason, and outside CI the session is good."""
    code, said = session(tmp_path, "@pytest.mark.skip(reason='no moon tonight')\ndef test_moon(): pass", ci=False)
    assert code == 0, said
    assert "no moon tonight (1):\n    test_it.py::test_moon" in said


def test_skips_fail_ci_where_all_should_run(tmp_path: Path) -> None:
    """In CI as root on Debian a skipped test fails the session and is named."""
    code, said = session(tmp_path, "def test_moon(): pytest.importorskip('no_such_module')", ci=True)
    assert code == (1 if SHOULD_RUN_ALL else 0), said
    assert ("should have run on this machine: test_it.py::test_moon" in said) == SHOULD_RUN_ALL


def test_missing_gpus_are_excused(tmp_path: Path) -> None:
    """A test that asks for more GPUs than there are is skipped with both numbers, and CI stays good."""
    code, said = session(tmp_path, "@pytest.mark.gpu(1000)\ndef test_big(): raise AssertionError", ci=True)
    assert code == 0, said
    assert "needs 1000 CUDA devices, " in said


@pytest.mark.parametrize("test", ["pytest.skip('all of it', allow_module_level=True)", "del test_runs"])
def test_a_session_without_tests_is_no_success(tmp_path: Path, test: str) -> None:
    """In CI a session in which no test ran fails, whether all were skipped or none was found."""
    code, said = session(tmp_path, test, ci=True)
    assert code == 5, said
