"""What follows from the doctor's findings at the start of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from worldsize.launch.slurm import exitfile
from worldsize.tools.doctor.finding import Finding, Level
from worldsize.tools.doctor.preflight import Answer, Request, decide, record


def bad(*hosts: str) -> list[Finding]:
    """One problem each."""
    return [Finding("network", Level.PROBLEM, "slow host", (host,), own=True) for host in hosts]


def request(folder: Path, **given: Any) -> Request:
    """Of a job of four nodes that needs four."""
    return Request(**{"folder": folder, "job": "7", "attempt": "0", "nodes": 4, "allocated": 4, **given})


def test_without_a_bad_node_it_goes_on(tmp_path: Path) -> None:
    """Problems of no single node keep nobody from training."""
    assert decide(request(tmp_path), []).text == "go"
    assert decide(request(tmp_path), [Finding("shared", Level.PROBLEM, "not shared")]).text == "go"


def test_spare_nodes_stand_in(tmp_path: Path) -> None:
    """The job goes on at once."""
    assert decide(request(tmp_path, nodes=3), bad("n2")).text == "go n2"


def test_without_spare_nodes_it_comes_again(tmp_path: Path) -> None:
    """Without all that were bad before, and those that it was not to have anyway."""
    (tmp_path / "exit-7-0").write_text("left-out n9 slow\nended 75\n", encoding="utf-8")
    assert decide(request(tmp_path, attempt="1", exclude="n[5-6]"), bad("n2")).text == "again n2,n5,n6,n9"


def test_it_comes_again_three_times(tmp_path: Path) -> None:
    """Then the cluster has too many bad nodes."""
    for attempt in range(3):
        (tmp_path / f"exit-7-{attempt}").write_text(f"left-out n{attempt} slow\n", encoding="utf-8")
    assert decide(request(tmp_path, attempt="3"), bad("n9")).word == "end"


def test_a_wanted_node_cannot_be_left_out(tmp_path: Path) -> None:
    """It would wait for ever."""
    answer = decide(request(tmp_path, wanted="n[1-4]"), bad("n2"))
    assert (answer.word, "nodelist" in answer.why) == ("end", True)


def test_where_most_nodes_are_bad_it_is_not_the_nodes(tmp_path: Path) -> None:
    """It goes on, and says so."""
    assert decide(request(tmp_path), bad("n1", "n2", "n3")).text == "go"


@given(st.sets(st.sampled_from(["n1", "n2", "n3", "n4", "n5", "n6"])), st.integers(1, 6))
def test_no_step_runs_on_a_bad_node_or_on_too_few(hosts: set[str], nodes: int) -> None:
    """Unless most are bad."""
    answer = decide(request(Path("/nowhere"), nodes=nodes, allocated=6), bad(*sorted(hosts)))
    if answer.word == "go" and len(hosts) <= 3:
        assert set(answer.without) == hosts
        assert 6 - len(hosts) >= nodes or not hosts


def test_what_was_left_out_is_on_record(tmp_path: Path) -> None:
    """For later attempts; an end is a failure of the node."""
    asked = request(tmp_path)
    record(asked, Answer("end", ("n2",), "too many"), bad("n2"))
    told = exitfile.read(tmp_path / "exit-7-0")
    assert told.left_out == ("n2",)
    assert told.failed is not None
    assert told.failed.host == "n2"
