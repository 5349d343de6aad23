"""Commands that reach hosts, and what is said through them."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.launch import shell
from worldsize.launch.ssh import wire
from worldsize.launch.ssh.remote import Way, failed

if TYPE_CHECKING:
    from pathlib import Path

WORD = st.text(st.characters(exclude_characters="\0"), max_size=12)


@given(st.lists(WORD, max_size=5), st.dictionaries(WORD, WORD, max_size=3))
def test_a_job_arrives_as_it_was_sent(words: list[str], env: dict[str, str]) -> None:
    """Line breaks and bytes that are no text included; a shell finds nothing to read in its line."""
    sent = wire.Job(tuple(words), env, node=3, port=7)
    line = wire.job_line(sent)
    assert wire.job(wire.read(line.decode())[1]) == sent
    assert line.decode() == " ".join(shlex.split(line.decode())) + "\n"


@pytest.mark.parametrize("name", ["a b", "it's", "$HOME", "`x`", "a;b", "é", "!", "line\nline"])
def test_folder_and_path_reach_the_interpreter(tmp_path: Path, name: str) -> None:
    """Through two shells: the host's own, and ours."""
    folder = tmp_path / name
    folder.mkdir()
    python = folder / "python"
    python.write_text('#!/bin/sh\nprintf "%s|" "$PWD" "$PYTHONPATH" "$@"\n', encoding="utf-8")
    python.chmod(0o700)
    *_, command = Way("ssh", str(python), str(folder), path=name).start("a", "m")
    done = shell.call(["/bin/sh", "-c", command], {"PATH": os.environ["PATH"]}, timeout=20)
    assert (done.code, done.out) == (0, f"{folder}|{name}|-m|worldsize|host|--mark|m|")


def test_a_host_cannot_be_an_option() -> None:
    """What follows -- is none."""
    argv = Way("ssh", "p", "/").start("-oProxyCommand=x", "m")
    assert argv[argv.index("--") + 1] == "-oProxyCommand=x"


@pytest.mark.parametrize(
    ("code", "said", "says"),
    [
        (255, "ssh: connect to host a port 22: Connection refused", "cannot be reached. Found: ssh: connect"),
        (255, "me@a: Permission denied (publickey).", "without a password.*ssh-copy-id a"),
        (
            255,
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "another one than before",
        ),
        (
            127,
            "sh: 1: exec: /p: not found\npdsh@x: a: ssh exited with exit code 127",
            "no interpreter /p. Found: sh: 1",
        ),
        (3, "", "ended with 3 before it was ready"),
    ],
)
def test_why_a_host_did_not_come_up(code: int, said: str, says: str) -> None:
    """What, what was found, what to do."""
    error = failed(Way("ssh", "/p", "/"), "a", code, said)
    assert str(error).startswith("host a: ")
    with pytest.raises(type(error), match=says):
        raise error
