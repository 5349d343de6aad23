"""Which host or pair is called slow, for any number of hosts and any of them slow."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.tools.doctor.seeing import FAST, HOSTS, named, seen, wrong
from worldsize.tools.doctor.judge_links import rates_of, suspects
from worldsize.tools.doctor.seen import Link

NAMES = [f"node{number}" for number in range(2, 9)]


@given(st.data())
def test_slow_hosts_are_named_and_no_others(data: Any) -> None:
    """As long as two hosts are not slow, and those are not fewer."""
    hosts = tuple(NAMES[: data.draw(st.integers(3, len(NAMES)))])
    bad = data.draw(st.sets(st.sampled_from(hosts), max_size=min((len(hosts)) // 2, len(hosts) - 2)))
    noise = st.floats(0.7, 1.0)
    factor = data.draw(st.floats(0.001, 0.2))
    found = wrong(seen(hosts, lambda one, _: FAST * data.draw(noise) * (factor if one in bad else 1.0)))
    assert set(found) == bad


@given(st.lists(st.floats(0.55, 1.0), min_size=6, max_size=6))
def test_what_differs_by_less_than_half_is_no_problem(noise: list[float]) -> None:
    """Networks are shared."""
    assert named(seen(rate=lambda one, other: FAST * noise[(ord(one) * ord(other)) % 6])) == []


def test_a_slow_pair_is_named_as_a_pair() -> None:
    """Both are fast with others."""
    one = seen(rate=lambda one, other: FAST / 10 if {one, other} == {"a", "b"} else FAST)
    assert [(check, set(where)) for check, where in named(one)] == [("network", {"a", "b"})]
    assert wrong(one) == {}


def test_of_two_hosts_a_slow_direction_is_a_problem_of_both() -> None:
    """Nobody knows who it is."""
    one = seen(("a", "b"), lambda sender, _: FAST / 100 if sender == "a" else FAST)
    assert named(one) == [("network", ("a", "b"))]
    assert wrong(one) == {}


def test_two_hosts_of_a_slow_network_are_told_so() -> None:
    """Without others and without a card's speed, a network of 1 Gbit/s is expected."""
    assert named(seen(("a", "b"), lambda *_: 5e6)) == [("network", ("a", "b"))]


@given(st.sets(st.sampled_from(HOSTS), max_size=2))
def test_suspects_are_the_pairs_that_would_be_a_finding(bad: set[str]) -> None:
    """They are measured again; a healthy network is not."""
    links = seen(rate=lambda one, other: FAST / 100 if {one, other} & bad else FAST).links
    pairs = suspects(rates_of(links))
    assert bool(pairs) is bool(bad)
    assert all(set(pair) & bad for pair in pairs)


def test_a_late_host_is_a_warning() -> None:
    """Its round trips are ten times the others'."""
    one = seen()
    one.links = [Link(x.one, x.other, x.there, x.back, 0.02 if "c" in (x.one, x.other) else 1e-4) for x in one.links]
    assert named(one) == []
