"""What the judges make of what was measured: the host that is at fault is named, and no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.tools.doctor.seeing import HOSTS, named, seen, warned, wrong
from worldsize.tools.doctor.disk import Written
from worldsize.tools.doctor.finding import Finding, Level, problems, report
from worldsize.tools.doctor.judge import judge


def test_healthy_hosts_have_no_problem_and_no_warning() -> None:
    """Every check says ok, with its figure."""
    assert {finding.level for finding in judge(seen())} == {Level.OK}


def test_every_problem_says_what_to_do() -> None:
    """And what was expected."""
    one = seen()
    one.lost["e"] = "no route"
    one.clocks["a"] = (60.0, 1e-3)
    one.disks["b"]["run folder"] = Written(path="/x", full=True)
    one.closed = [("a", "b", 29500, "refused")]
    one.names["c"]["d"] = ["10.9.9.9"]
    found = problems(judge(one))
    assert len(found) == 5
    assert all(finding.do and finding.expected for finding in found)


@pytest.mark.parametrize("seconds", [60.0, -60.0])
def test_a_clock_that_is_off_is_named(seconds: float) -> None:
    """Whatever this host's own clock says: the median of the others is right."""
    one = seen()
    one.clocks = dict.fromkeys(HOSTS, (7.0, 1e-3)) | {"c": (7.0 + seconds, 1e-3)}
    assert list(wrong(one)) == ["c"]


def test_a_clock_is_not_blamed_for_a_slow_answer() -> None:
    """What the round trip leaves open is not counted."""
    one = seen()
    one.clocks["c"] = (6.0, 6.0)
    assert named(one) == []


def test_a_name_that_leads_elsewhere_on_one_host_is_that_hosts_fault() -> None:
    """The host whose table is wrong, not the one that is meant."""
    one = seen()
    one.names["b"]["c"] = ["10.0.0.77"]
    assert list(wrong(one)) == ["b"]


def test_a_name_that_leads_elsewhere_everywhere_is_nobodys_fault() -> None:
    """It is the DNS: leaving one host out would not help."""
    one = seen()
    for viewer in HOSTS:
        one.names[viewer]["c"] = ["10.0.0.77"]
    assert wrong(one) == {}
    assert len(named(one)) == len(HOSTS)


def test_names_need_not_be_known_where_nobody_meets_by_them() -> None:
    """Over ssh addresses are used."""
    one = seen()
    one.names["b"]["c"] = []
    assert list(wrong(one)) == ["b"]
    one.slurm = False
    assert wrong(one) == {}
    assert [finding.where for finding in warned(one)] == [("b",)]


def test_an_own_name_that_is_loopback_is_a_warning() -> None:
    """As Debian writes it into /etc/hosts."""
    one = seen()
    one.names["a"]["a"] = ["127.0.1.1"]
    assert named(one) == []
    assert [finding.where for finding in warned(one)] == [("a",)]


def test_a_host_behind_a_firewall_is_named_alone() -> None:
    """All others cannot reach it; they reach each other."""
    one = seen()
    one.closed = [(name, "c", 29500, "timed out") for name in ("a", "b", "d")]
    assert list(wrong(one)) == ["c"]


def test_a_pair_that_cannot_connect_is_named_as_a_pair() -> None:
    """Nobody knows whose fault it is."""
    one = seen()
    one.closed = [("a", "b", 29500, "timed out")]
    assert wrong(one) == {}
    assert named(one) == [("ports", ("a", "b"))]


def test_a_full_disk_is_named() -> None:
    """Its place is said."""
    one = seen()
    one.disks["d"]["temporary files"] = Written(path="/scratch", full=True, error="No space left on device")
    (finding,) = problems(judge(one))
    assert (finding.where, "/scratch" in finding.do) == (("d",), True)


def test_a_slow_disk_is_a_warning() -> None:
    """Against the others' median."""
    one = seen()
    one.disks["d"]["run folder"] = Written(path="/x", free=9999, speed=50.0)
    assert [finding.where for finding in warned(one)] == [("d",)]


def test_a_host_that_does_not_see_the_folder_is_named() -> None:
    """It misses everybody's files, and all others miss its file alone."""
    one = seen()
    assert one.shared
    one.shared = replace(one.shared, unseen={"a": ["c"], "b": ["c"], "d": ["c"], "c": ["a", "b", "c", "d"]})
    assert list(wrong(one)) == ["c"]
    assert len(named(one)) == 1


def test_a_folder_that_nobody_shares_is_one_problem_of_all() -> None:
    """No host can be left out for it."""
    one = seen()
    assert one.shared
    one.shared = replace(one.shared, unseen={name: [other for other in HOSTS if other != name] for name in HOSTS})
    assert named(one) == [("shared", ())]


def test_a_folder_without_exclusive_creation_is_a_problem() -> None:
    """Two hosts would own one run."""
    one = seen()
    assert one.shared
    one.shared = replace(one.shared, twice=["claim0"])
    assert named(one) == [("shared", ())]


def test_another_torch_on_one_host_is_its_fault() -> None:
    """The version that most hosts have is right."""
    one = seen()
    one.facts["b"] = replace(one.facts["b"], packages={"torch": "2.11.0"})
    assert list(wrong(one)) == ["b"]


def test_a_lost_host_is_named_with_its_reason() -> None:
    """What was said of it is the measurement."""
    one = seen()
    one.lost["e"] = "cannot reach the doctor"
    assert [finding.measured for finding in problems(judge(one))] == ["cannot reach the doctor"]


def test_few_open_files_are_a_warning() -> None:
    """With the command that raises them."""
    one = seen()
    one.facts["a"] = replace(one.facts["a"], files=1024)
    assert ["ulimit -n" in finding.do for finding in warned(one)] == [True]


def test_the_report_ends_with_the_worst() -> None:
    """And with how many of each."""
    lines = list(report([Finding("x", Level.PROBLEM, "bad"), Finding("x", Level.OK, "good")]))
    assert [line.split()[0] for line in lines] == ["ok", "problem", "1"]
    assert lines[-1] == "1 ok, 0 warning, 1 problem"
