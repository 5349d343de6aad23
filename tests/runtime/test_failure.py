"""Last words where something cannot be written: they are said where they can be, and the exit code stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LINE = "worldsize: micro_batch is 0. Do: give at least 1."
BEGIN = """
import os, sys
from worldsize.errors import ConfigError
from worldsize.runtime import failure
failure.install()
error = ConfigError("micro_batch is 0", do="give at least 1")
"""
WAYS = {
    "ours": ("raise error", 2, LINE),
    "theirs": ("raise ValueError('bad key')", 1, "ValueError: bad key"),
    "another's": ("failure.say_for(error, 1, os.environ['TORCHELASTIC_ERROR_FILE'])\nos._exit(5)", 5, LINE),
    "told elsewhere": ("sys.excepthook = failure.leave\nraise error", 1, ""),
    "a tracker fails": ("failure.before_end(lambda line: 1 / 0)\nraise error", 2, LINE),
}
"""What a program does, its exit code, and what it says on standard error."""


def ended(folder: Path, body: str, *redirected: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """The exit code of a program, and what it wrote to standard error; a shell redirects its streams."""
    program = folder / "train.py"
    program.write_text(BEGIN + body, encoding="utf-8")
    command = ("/bin/sh", "-c", " ".join(('exec "$0" "$1"', *redirected)), sys.executable, str(program))
    # What is printed must still be on its way when the program ends.
    variables = {**os.environ, "PYTHONUNBUFFERED": "", **(env or {})}
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False, env=variables
    )
    return done.returncode, done.stderr


def unwritable(folder: Path, how: str) -> Path:
    """An error file that cannot be written."""
    path = folder / how / "error.json"
    if how == "a folder":
        path.mkdir(parents=True)
    elif how == "below a file":
        path.parent.touch()
    else:
        path.parent.mkdir()
        path.symlink_to("/dev/full")
    return path


@pytest.mark.parametrize("how", ["a folder", "below a file", "full"])
@pytest.mark.parametrize("way", list(WAYS))
def test_an_error_file_that_cannot_be_written_changes_nothing(tmp_path: Path, way: str, how: str) -> None:
    """The line is said, and the code is the error's."""
    body, expected, line = WAYS[way]
    code, said = ended(tmp_path, body, env={"TORCHELASTIC_ERROR_FILE": str(unwritable(tmp_path, how))})
    assert code == expected, said
    assert line in said
    assert "Error in sys.excepthook" not in said


@pytest.mark.parametrize("stream", ["2>/dev/full", "2>&-", ">/dev/full", ">&-", ">/dev/full 2>/dev/full", ">&- 2>&-"])
@pytest.mark.parametrize("way", ["ours", "another's", "a tracker fails"])
def test_a_stream_that_cannot_be_written_changes_nothing(tmp_path: Path, way: str, stream: str) -> None:
    """The error file has the line, and so has standard error where it works; the code is the error's."""
    body, expected, line = WAYS[way]
    file = tmp_path / "error.json"
    code, said = ended(tmp_path, f"print('unsent')\n{body}", stream, env={"TORCHELASTIC_ERROR_FILE": str(file)})
    assert code == expected, said
    assert line in json.loads(file.read_text(encoding="utf-8"))["message"]["message"]
    assert ("2>" in stream) or line in said


def test_a_broken_pipe_changes_nothing(tmp_path: Path) -> None:
    """Nor does whoever read the output, and is gone."""
    broken = "reads, writes = os.pipe()\nos.close(reads)\nos.dup2(writes, {})\nprint('unsent')\nraise error"
    code, said = ended(tmp_path, broken.format(1))
    assert (code, said.count(LINE[:-1])) == (2, 1), said
    code, said = ended(tmp_path, broken.format(2))
    assert (code, said) == (2, "")


def test_half_an_error_file_does_not_stay(tmp_path: Path) -> None:
    """Torchrun would end over one that it cannot read, and start nothing again."""
    file = tmp_path / "error.json"
    short = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\nraise error"
    code, said = ended(tmp_path, short, env={"TORCHELASTIC_ERROR_FILE": str(file)})
    assert (code, file.exists()) == (2, False), said
    assert LINE[:-1] in said
