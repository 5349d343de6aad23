"""From what a rank left behind to one line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import traceback
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.errors import ConfigError
from worldsize.launch.failure import Failure, advice, follows, from_code, from_error_file, from_traceback, root

if TYPE_CHECKING:
    from pathlib import Path


def printed(folder: Path, text: str) -> str:
    """What Python prints on standard error for a program."""
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return subprocess.run([sys.executable, path], capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        ("def load(): raise ValueError('bad key x')\nload()", "ValueError: bad key x", "train.py:1 in load"),
        ("raise KeyError('k')", "KeyError: 'k'", "train.py:1"),
        ("raise RuntimeError", "RuntimeError", "train.py:1"),
        ("import json\njson.loads('{')", "JSONDecodeError: Expecting property name enclosed", "train.py:2"),
        ("try: 1/0\nexcept Exception as e: raise OSError('after') from e", "OSError: after", "train.py:2"),
        ("raise ValueError('one\\ntwo')", "ValueError: one", "train.py:1"),
        ("x = (", "SyntaxError: '(' was never closed", "train.py:1"),
        ("class Odd(Exception): pass\nraise Odd('x: y')", "Odd: x: y", "train.py:2"),
        ("import subprocess\nsubprocess.run(['false'], check=True)", "CalledProcessError: Command", "train.py:2"),
        ("raise ExceptionGroup('many', [ValueError(1)])", "ExceptionGroup: many (1 sub-exception)", "train.py:1"),
    ],
)
def test_the_exception_of_a_real_traceback(tmp_path: Path, text: str, what: str, where: str) -> None:
    """B094: kind without its module, the message's first line, and the last line of the user's own code."""
    found = from_traceback(printed(tmp_path, text))
    assert found is not None
    assert found.what.startswith(what)
    assert found.where == where


def test_a_traceback_that_torch_printed_for_its_rank(tmp_path: Path) -> None:
    """Torch begins every line with [rank1]: once process groups are up."""
    text = "".join(f"[rank1]: {line}\n" for line in printed(tmp_path, "raise ValueError('bad')").splitlines())
    found = from_traceback(text)
    assert found is not None
    assert (found.what, found.where) == ("ValueError: bad", "train.py:1")


def test_lines_after_the_traceback_change_nothing(tmp_path: Path) -> None:
    """What native libraries print while the process goes down is not the exception."""
    text = printed(tmp_path, "raise ValueError('bad')") + "[W1] ProcessGroup: was not destroyed\nterminate called\n"
    found = from_traceback(text)
    assert found is not None
    assert found.what == "ValueError: bad"


@given(st.text(max_size=300))
def test_any_text_is_no_traceback_or_one(text: str) -> None:
    """The parser raises on nothing."""
    found = from_traceback(text)
    assert found is None or "\n" not in found.what


@given(st.binary(max_size=200))
def test_any_bytes_may_lie_in_the_error_file(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """A half-written error file is no error of ours."""
    path = tmp_path_factory.getbasetemp() / "error.json"
    path.write_bytes(data)
    assert from_error_file(path) is None


def test_the_error_file_as_torch_writes_it(tmp_path: Path) -> None:
    """Torch's @record: message and call stack."""
    try:
        int("x")
    except ValueError as error:
        extra = {"py_callstack": traceback.format_exc(), "timestamp": "1700000000"}
        body = {"message": {"message": f"ValueError: {error}", "extraInfo": extra}}
    path = tmp_path / "error.json"
    path.write_text(json.dumps(body), encoding="utf-8")
    found = from_error_file(path)
    assert found is not None
    assert found.what == "ValueError: invalid literal for int() with base 10: 'x'"
    assert str(found.where).startswith("test_failure.py:")


def test_our_own_error_is_not_said_twice_in_one_line(tmp_path: Path) -> None:
    """A Run writes the whole sentence with rank and place; the launcher says those itself."""
    sentence = (
        f"worldsize: rank 1 of 4 on host-a: {ConfigError('micro_batch is 0', do='give at least 1')} (a.py:3 in f)"
    )
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": sentence, "extraInfo": {}}}), encoding="utf-8")
    found = from_error_file(path)
    assert found is not None
    assert found.what == "micro_batch is 0. Do: give at least 1."


def test_signals_in_words() -> None:
    """Promise 6: a signal is named with who may have sent it."""
    assert "out-of-memory killer" in from_code(-signal.SIGKILL, "")[0]
    assert "native code" in from_code(-signal.SIGSEGV, "")[0]
    assert "killed by signal 250" in from_code(-250, "")[0]


def test_the_line_has_everything() -> None:
    """Promise 6: rank, host, what, where, what to do, log; one line."""
    failure = Failure(
        "host-a", 1, "ValueError: bad key x", 1, 4, "train.py:31 in load", "see the docs", "/l/rank-0001.log"
    )
    assert failure.line == (
        "rank 1 of 4 on host-a failed: ValueError: bad key x (train.py:31 in load). Do: see the docs; log: /l/rank-0001.log"
    )


def test_the_root_cause_is_the_earliest_that_is_no_consequence() -> None:
    """A rank that only lost its peer comes after the peer, even if its message was first."""
    lost = Failure("h", 1, "RuntimeError: Connection closed by peer", rank=0, age=9.0, after=2)
    held = Failure("h", -15, "ValueError: only logged", rank=1, age=8.0, after=1)
    cause, later = (Failure("h", 1, "ValueError", rank=rank, age=age) for rank, age in ((2, 5.0), (3, 4.0)))
    assert root([lost, later, held, cause]) is cause
    assert root([lost, held]) is held


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3.",
        "RuntimeError: [1] is setting up NCCL communicator and retrieving ncclUniqueId: Broken pipe",
    ],
)
def test_what_only_says_that_a_peer_is_gone(text: str) -> None:
    """Gloo's, the store's and NCCL's words for a dead peer."""
    assert follows(text)
    assert not follows("ValueError: bad key x")


def test_advice_is_given_once() -> None:
    """Known causes come with what to do, unless the error says so itself."""
    assert advice("ModuleNotFoundError: No module named 'foo'") == "install foo, or start from its folder"
    assert advice("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB") is not None
    assert advice("disk full: No space left on device. Do: make room") is None
    assert advice("ValueError: bad") is None


@pytest.mark.parametrize(("code", "ours"), [(7, 7), (-9, 137), (-15, 143), (1, 1)])
def test_exit_codes_as_a_shell_counts(code: int, ours: int) -> None:
    """Signal n is 128 + n."""
    assert Failure("h", code, "x").exit_code == ours
