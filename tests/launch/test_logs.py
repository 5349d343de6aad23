"""What ranks print: byte for byte in files, by whole lines on the console, tracebacks held back."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.launch.commands import RUN, alive, finish, lines, script, start, until
from worldsize.launch import logs
from worldsize.launch.logs import ERR, OUT, LogFile, Stream
from worldsize.launch.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Iterator

TRACEBACK = b'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: x\n'


class Kept:
    """A console that keeps what it is given."""

    full = False

    def __init__(self) -> None:
        self.bytes = {OUT: b"", ERR: b""}

    def write(self, stream: int, data: bytes) -> None:
        """Keep."""
        self.bytes[stream] += data

    def when_room(self, call: object) -> None:
        """There is always room."""

    def flush(self) -> None:
        """All is written."""


@contextmanager
def stream(path: Path, kind: int = ERR, prefix: bytes = b"[rank 1] ") -> Iterator[tuple[Stream, Kept, Loop]]:
    """A stream with its console and loop."""
    kept, loop = Kept(), Loop()
    log = LogFile(path, kept)
    yield Stream(loop, kept, kind, log, prefix), kept, loop
    log.close()
    loop.close()


pieces = st.lists(
    st.sampled_from([b"a", b"\n", b"\r", b"\r\n", b"\x00\xff", "é".encode(), b"long " * 50]), max_size=40
)


@given(pieces, st.integers(1, 7))
def test_any_bytes_in_any_pieces(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], size: int) -> None:
    """However the bytes are cut, the file has them exactly, and the console is the same bytes with prefixes."""
    data = b"".join(parts)
    path = tmp_path_factory.getbasetemp() / "any.log"
    path.unlink(missing_ok=True)
    with stream(path, OUT) as (one, kept, _):
        for at in range(0, len(data), size):
            one.feed(data[at : at + size])
        one.end()
        assert path.read_bytes() == data
        whole = data if data.endswith(b"\n") or not data else data + b"\n"
        assert kept.bytes[OUT].replace(b"[rank 1] ", b"") == whole
        assert kept.bytes[OUT].count(b"[rank 1] ") == len(whole.splitlines())


def test_a_traceback_is_held_back_while_the_rank_may_be_ending(tmp_path: Path) -> None:
    """Nothing of it is shown, what came before is, and `trace` has it."""
    with stream(tmp_path / "log") as (one, kept, _):
        one.feed(b"before\n" + TRACEBACK)
        one.end()
        assert kept.bytes[ERR] == b"[rank 1] before\n"
        assert (one.holding, one.trace) == (True, TRACEBACK)


def test_a_traceback_is_shown_when_the_rank_goes_on_printing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program only logged is shown before what it prints later, in order."""
    monkeypatch.setattr(logs, "_HOLD_S", 0.0)
    with stream(tmp_path / "log") as (one, kept, _):
        one.feed(TRACEBACK)
        assert kept.bytes[ERR] == b""
        one.feed(b"going on\n")
    assert kept.bytes[ERR].replace(b"[rank 1] ", b"") == TRACEBACK + b"going on\n"
    assert not one.holding


def test_a_traceback_is_shown_when_the_rank_lives_on_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some time the process cannot be ending any more."""
    monkeypatch.setattr(logs, "_SILENT_S", 0.05)
    with stream(tmp_path / "log") as (one, kept, loop):
        one.feed(TRACEBACK)
        loop.run(lambda: bool(kept.bytes[ERR]))
    assert kept.bytes[ERR].replace(b"[rank 1] ", b"") == TRACEBACK


def test_a_traceback_stays_held_while_the_ranks_are_being_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Farewells of libraries after it release nothing."""
    monkeypatch.setattr(logs, "_HOLD_S", 0.0)
    with stream(tmp_path / "log") as (one, kept, _):
        one.hold_on()
        one.feed(TRACEBACK)
        one.feed(b"[W] not destroyed\n")
    assert (kept.bytes[ERR], one.holding) == (b"", True)


def test_one_rank_shows_its_traceback_as_it_comes(tmp_path: Path) -> None:
    """Without a prefix nothing is held back from the console."""
    with stream(tmp_path / "log", prefix=b"") as (one, kept, _):
        one.feed(TRACEBACK)
        one.end()
        assert kept.bytes[ERR] == TRACEBACK


def test_a_line_without_end_does_not_grow_for_ever(tmp_path: Path) -> None:
    """A megabyte without a line break is shown in parts."""
    with stream(tmp_path / "log", OUT) as (one, kept, _):
        for _ in range(64):
            one.feed(b"x" * 16384)
        assert kept.bytes[OUT].count(b"x") > 900_000


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_file_and_not_the_training() -> None:
    """The console says once that the file ends, and goes on showing."""
    with stream(Path("/dev/full"), OUT) as (one, kept, _):
        one.feed(b"one\n")
        one.feed(b"two\n")
        assert kept.bytes[OUT] == b"[rank 1] one\n[rank 1] two\n"
        assert kept.bytes[ERR] == b"worldsize: /dev/full ends here: No space left on device\n"


def test_a_reader_that_does_not_read_hides_no_dead_rank(tmp_path: Path) -> None:
    """Rank 0 prints megabytes that nobody reads; rank 1 dies: rank 0 is ended all the same."""
    text = f"open({str(tmp_path / 'pid')!r} + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
    text += "if os.environ['RANK'] == '0':\n    while True: print('x' * 1000)\n"
    text += f"while not os.path.exists({str(tmp_path / 'die')!r}): time.sleep(0.01)\nsys.exit(7)"
    process = start("-n", "2", script(tmp_path, text))
    until(lambda: all(lines(tmp_path / f"pid{rank}") for rank in (0, 1)))
    time.sleep(0.5)
    (tmp_path / "die").touch()
    pids = [int(lines(tmp_path / f"pid{rank}")[0]) for rank in (0, 1)]
    until(lambda: not any(map(alive, pids)))
    assert finish(process).code == 7


def test_a_reader_that_leaves_ends_nothing(tmp_path: Path) -> None:
    """`worldsize run ... | head -1`: the ranks go on to their end, and the log has everything."""
    path = script(tmp_path, "for n in range(20000): print(n)")
    process = subprocess.Popen(
        [*RUN, "--log-dir", str(tmp_path / "logs"), str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(30) == 0
    process.stderr.close()
    assert lines(tmp_path / "logs/attempts/0/rank-0000.log")[-1] == "19999"


def test_a_terminal_that_is_a_file_works(tmp_path: Path) -> None:
    """Output sent to a file, as in a batch job: complete, in order."""
    path = script(tmp_path, "for n in range(3000): print(n)")
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([*RUN, str(path)], stdout=out, check=True)
    assert lines(tmp_path / "out") == [str(n) for n in range(3000)]


def test_closed_standard_streams_are_no_error(tmp_path: Path) -> None:
    """Started without standard output and error (a daemon): the program runs, and its log is kept."""
    path = script(tmp_path, "print('here')")
    line = f"exec {sys.executable} -m worldsize run --log-dir {tmp_path}/logs {path} <&- >&- 2>&-"
    assert subprocess.run(["/bin/sh", "-c", line], check=False).returncode == 0
    assert lines(tmp_path / "logs/attempts/0/rank-0000.log") == ["here"]


def test_signals_here_are_what_they_were() -> None:
    """Importing the launcher leaves the handlers of its program alone."""
    code = "import signal, worldsize.launch.local; print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
