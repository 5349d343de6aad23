"""Hosts and slots, as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.errors import ConfigError
from worldsize.launch.ssh.hosts import Host, chosen, filed, listed

NAME = st.from_regex(r"[a-z][a-z0-9-]{0,8}[a-z0-9]", fullmatch=True)


def counts(hosts: list[Host]) -> dict[str, int | None]:
    """Name -> number of slots."""
    return {host.name: None if host.slots is None else len(host.slots) for host in hosts}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a:4,b:2", {"a": 4, "b": 2}),
        ("a, me@b.example", {"a": None, "me@b.example": None}),
        ("n[01-03]:8,gpu", {"n01": 8, "n02": 8, "n03": 8, "gpu": None}),
        ("10.0.0.1:2,[2001:db8::1]:4,[::1]", {"10.0.0.1": 2, "2001:db8::1": 4, "::1": None}),
    ],
)
def test_a_list_of_hosts(text: str, found: dict[str, int | None]) -> None:
    """Names, addresses, Slurm's lists, each with its ranks or without."""
    assert counts(listed(text)) == found


@pytest.mark.parametrize(
    "text", ["", ",", "a:", "a:0", "a:x", "-oProxyCommand=x", "a b", "a,,b", "a,a", "n[1-", "$(x)", "a;b"]
)
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    """A word that ssh would take for an option too."""
    with pytest.raises(ConfigError):
        listed(text)


@given(st.dictionaries(NAME, st.integers(1, 64), min_size=1, max_size=5))
def test_every_form_of_hostfile_says_the_same(hosts: dict[str, int]) -> None:
    """DeepSpeed's, Open MPI's, MPICH's, and a line a rank as batch systems write it."""
    forms = ("{0} slots={1}", "{0} slots={1} max_slots={1}  # x", "{0}:{1}\n\n# x")
    files = ["\n".join(form.format(*pair) for pair in hosts.items()) for form in forms]
    assert [counts(filed(text, "hosts")) for text in files] == [hosts] * 3
    several = {name: count + 1 for name, count in hosts.items()}
    assert counts(filed("\n".join(name for name, n in several.items() for _ in range(n)), "hosts")) == several


@pytest.mark.parametrize(
    "line", ["b slots=x", "b slots=0", "b slots=4 max_slots=2", "b 4", "b slots = 4", "a slots=1"]
)
def test_a_wrong_line_is_named(line: str) -> None:
    """Or the host that comes twice."""
    with pytest.raises(ConfigError, match=r"hosts:3|a is named twice"):
        filed(f"# all\na slots=2\n{line}\n", "hosts")


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("b@a:0,2", None, {"a": (0, 2), "b": (0, 1)}),
        ("b", None, {"b": (0, 1)}),
        (None, "a", {"b": (0, 1)}),
        (None, "a:1@b:0", {"a": (0, 2, 3), "b": (1,)}),
        (None, "b:0,1", {"a": (0, 1, 2, 3)}),
    ],
)
def test_filters_are_deepspeeds(include: str | None, exclude: str | None, left: dict[str, tuple[int, ...]]) -> None:
    """Hosts and single slots, in the order of the file."""
    found = chosen(listed("a:4,b:2"), include, exclude)
    assert {host.name: host.slots for host in found} == left


@pytest.mark.parametrize(
    ("include", "exclude"), [("c", None), ("a:4", None), ("a:x", None), ("a", "b"), (None, "a@b"), ("", "a@@b")]
)
def test_a_filter_that_fits_nothing_is_refused(include: str | None, exclude: str | None) -> None:
    """A host or slot that is not there is a slip, not an empty choice."""
    with pytest.raises(ConfigError):
        chosen(listed("a:4,b:2"), include, exclude)
