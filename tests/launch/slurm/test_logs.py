"""Which files hold what a job printed, and how they are read on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from worldsize.launch.slurm import logs
from worldsize.launch.slurm.known import Known
from worldsize.launch.slurm.logs import Merged, Reader, Source
from worldsize.launch.slurm.states import JobFacts, State

if TYPE_CHECKING:
    from pathlib import Path

TWO = (
    "from before\nworldsize: job 7, attempt 0, on 2 nodes: a,b\nold\nworldsize: job 7, attempt 0, ended with code 1\n"
)
TWO += "worldsize: job 7, attempt 1, on 2 nodes: a,b\nnew\n"


def known(folder: Path, job: str = "7", facts: JobFacts | None = None, **spec: Any) -> Known:
    """A job of ours."""
    state = State(job, "RUNNING", "squeue", final=False, facts=facts)
    return Known(state, folder, spec={"job_name": "digits", "chdir": str(folder), **spec})


def ranks(folder: Path, attempt: int, *names: int) -> None:
    """Logs as the supervisor keeps them."""
    place = folder / "logs-7" / "attempts" / str(attempt)
    place.mkdir(parents=True)
    for rank in names:
        (place / f"rank-{rank:04d}.log").write_text(f"{attempt}.{rank}\n")


def read(*sources: Source) -> str:
    """All of them."""
    taken: list[bytes] = []
    merged = Merged(taken.append)
    merged.add(sources)
    merged.finish()
    return b"".join(taken).decode()


@pytest.mark.parametrize(
    ("job", "spec", "name"),
    [
        ("7", {}, "slurm-7.out"),
        ("7_3", {"array": "0-9"}, "slurm-7_3.out"),
        ("7", {"output": "logs/%x-%j.txt"}, "logs/digits-7.txt"),
        ("7_3", {"array": "0-9", "output": "%A/%4a.txt"}, "7/0003.txt"),
    ],
)
def test_the_log_of_a_job_that_slurm_has_forgotten(tmp_path: Path, job: str, spec: dict[str, Any], name: str) -> None:
    """Its own spec says where it is."""
    assert [source.path for source in logs.of_job(known(tmp_path, job, **spec))] == [tmp_path / name]


def test_errors_apart_are_shown_with_the_rest(tmp_path: Path) -> None:
    """Both files, and which of them a line is from."""
    facts = JobFacts("7", 7, stdout=str(tmp_path / "out"), stderr=str(tmp_path / "err"))
    (tmp_path / "out").write_text("a\n")
    (tmp_path / "err").write_text("b\n")
    assert read(*logs.select([known(tmp_path, facts=facts)])) == "a\n[stderr] b\n"


def test_one_attempt(tmp_path: Path) -> None:
    """From its first line to the next one's; the line of its end belongs to it."""
    (tmp_path / "slurm-7.out").write_text(TWO)
    both = [read(*logs.select([known(tmp_path)], (), attempt)) for attempt in (0, 1)]
    assert both[0].splitlines()[1:] == ["old", "worldsize: job 7, attempt 0, ended with code 1"]
    assert both[1].splitlines()[1:] == ["new"]


def test_the_newest_attempt(tmp_path: Path) -> None:
    """Its number and text; an older one's errors are not in it."""
    (tmp_path / "slurm-7.out").write_text(TWO)
    assert logs.newest(tmp_path / "slurm-7.out") == (1, "worldsize: job 7, attempt 1, on 2 nodes: a,b\nnew\n")
    assert logs.newest(tmp_path / "none") == (None, "")


def test_ranks_are_read_over_all_attempts(tmp_path: Path) -> None:
    """In the order of time; lines say their rank where several are asked for."""
    ranks(tmp_path, 0, 0, 1)
    ranks(tmp_path, 1, 0, 1)
    job = known(tmp_path, launcher="worldsize")
    assert read(*logs.select([job], (1,))) == "0.1\n1.1\n"
    assert read(*logs.select([job], (logs.ALL,), 1)) == "[rank 0] 1.0\n[rank 1] 1.1\n"
    assert logs.select([job], (7,)) == []


def test_ranks_without_files_are_picked_out(tmp_path: Path) -> None:
    """By the rank that lines begin with, as srun or torch write it."""
    (tmp_path / "slurm-7.out").write_text("0: a\n1: b\n[rank1]: c\n11: d\nend\n")
    assert read(*logs.select([known(tmp_path, launcher="srun")], (1,))) == "1: b\n[rank1]: c\n"


def test_members_are_labelled(tmp_path: Path) -> None:
    """Each line with the member it is from, whole lines only."""
    for task in (0, 1):
        (tmp_path / f"slurm-7_{task}.out").write_text(f"{task}\nhalf")
    both = [known(tmp_path, f"7_{task}", array="0-1") for task in (0, 1)]
    assert read(*logs.select(both)) == "[7_0] 0\n[7_1] 1\n[7_0] half\n[7_1] half\n"


def test_a_file_may_come_late_grow_and_be_cut_short(tmp_path: Path) -> None:
    """What is new is read, once; a file that begins again is read from its beginning."""
    path = tmp_path / "log"
    reader = Reader(Source(path))
    assert reader.read() == b""
    path.write_text("one\ntw")
    assert reader.read() == b"one\ntw"
    with path.open("a") as file:
        file.write("o\n")
    assert reader.read() == b"o\n"
    path.write_text("new\n")
    assert (reader.read(), reader.read()) == (b"new\n", b"")
    path.rename(tmp_path / "old")
    path.write_text("another file\n")
    assert reader.read() == b"another file\n"


def test_lines_that_are_told_apart_are_whole(tmp_path: Path) -> None:
    """A line that comes in two pieces is shown once it is there."""
    path = tmp_path / "log"
    path.write_bytes(b"one\ntw")
    reader = Reader(Source(path, "rank 3"))
    assert reader.read() == b"[rank 3] one\n"
    path.write_bytes(b"one\ntwo\xff")
    assert (reader.read(), reader.rest()) == (b"", b"[rank 3] two\xff\n")
