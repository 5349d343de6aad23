"""Host lists and counts per node, as Slurm writes them."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.errors import WorldError
from worldsize.runtime.hostlist import compress, counts, expand

if TYPE_CHECKING:
    from pathlib import Path

LISTS = {
    "alpha,beta,gamma": ["alpha", "beta", "gamma"],
    "linux[1,2]": ["linux1", "linux2"],
    "host[001,003-004,006]": ["host001", "host003", "host004", "host006"],
    "r[1-2]n[01-02]": ["r1n01", "r1n02", "r2n01", "r2n02"],
    "r[1-2][3-4]": ["r13", "r14", "r23", "r24"],
    "node[08-11]": ["node08", "node09", "node10", "node11"],
    "a[01-03,07],b5": ["a01", "a02", "a03", "a07", "b5"],
    "jean-zay-ia810": ["jean-zay-ia810"],
    "jean-zay-ia[810-811]": ["jean-zay-ia810", "jean-zay-ia811"],
    "host-[001-002]": ["host-001", "host-002"],
    "c[1-2]": ["c1", "c2"],
    "n[8-010]": ["n8", "n9", "n10"],
    "n[9-10]": ["n9", "n10"],
    "n[0099-0101]": ["n0099", "n0100", "n0101"],
    "[1-2]": ["1", "2"],
    "a1,a2,a1": ["a1", "a2", "a1"],
    "gpu1.site.org": ["gpu1.site.org"],
}
NAMES = st.from_regex(r"[a-z0-9.-]{1,4}[0-9]{0,3}", fullmatch=True)


@pytest.mark.parametrize(("text", "names"), LISTS.items())
def test_a_list_is_expanded_in_its_order(text: str, names: list[str]) -> None:
    """B001, B002, B004: plain names, commas in brackets, padding, several brackets and hyphens, as Slurm has them."""
    assert expand(text) == names


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs Slurm's client: apt-get install slurm-client")
@pytest.mark.parametrize("text", LISTS)
def test_slurm_itself_expands_to_the_same_names(text: str, tmp_path: Path) -> None:
    """`scontrol show hostnames`, which needs a configuration file but no cluster, answers the same."""
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    environ = {**os.environ, "SLURM_CONF": str(conf)}
    answer = subprocess.run(
        ["scontrol", "show", "hostnames", text], env=environ, capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == expand(text)


@pytest.mark.parametrize(
    "text",
    ["x[1-5:2]", "a[3-1]", "a[]", "node[1-3]-ib0", "c[1-", "a[1-2", "a1-2]", "a[[1]]", "a[1,]", "a[-1]"],
)
def test_a_malformed_list_is_refused_and_quoted(text: str) -> None:
    """B004: what is not a host list is an error that quotes it, never a silent single node."""
    with pytest.raises(WorldError) as refusal:
        expand(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize(
    "text", ["", ",", "a,", "a,,b", "a b", "a[1 -2]", "a[1-2]b[3]c", "n[1-100000]", "n[1-300][1-300]", "1(x2)"]
)
def test_a_list_with_holes_or_without_bounds_is_refused(text: str) -> None:
    """Slurm skips empty parts and takes blanks for commas; a list that was cut or blown up is refused here."""
    with pytest.raises(WorldError) as refusal:
        expand(text)
    assert repr(text) in str(refusal.value)


@given(st.lists(NAMES, min_size=1, max_size=12))
def test_compressing_loses_nothing(names: list[str]) -> None:
    """Any list of names, in any order and with repetitions, comes back from its compressed form."""
    assert expand(compress(names)) == names


@given(st.integers(0, 2000), st.integers(1, 60), st.integers(1, 5), st.sampled_from(["n", "rack-1-n", "a.b-"]))
def test_a_run_of_nodes_is_one_short_range(first: int, length: int, width: int, prefix: str) -> None:
    """Consecutive names of one width become one bracket, and come back with their padding."""
    names = [f"{prefix}{number:0{width}d}" for number in range(first, first + length)]
    text = compress(names)
    assert expand(text) == names
    assert len(text) <= len(prefix) + 2 * 5 + 3


@pytest.mark.parametrize("name", ["", "a[1]", "a,b", "a b"])
def test_a_name_that_no_list_can_hold_is_not_compressed(name: str) -> None:
    """A name with a character of the grammar is refused instead of becoming another list."""
    with pytest.raises(WorldError):
        compress(["a1", name])


def test_no_names_are_no_list() -> None:
    """An empty list has no written form."""
    with pytest.raises(WorldError):
        compress([])


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("4", [4]), ("1(x2)", [1, 1]), ("2(x3),1", [2, 2, 2, 1]), ("16(x2),8(x1)", [16, 16, 8]), ("3,1", [3, 1])],
)
def test_counts_per_node_know_repetition(text: str, numbers: list[int]) -> None:
    """B007: "2(x3),1" is 2, 2, 2, 1."""
    assert counts(text) == numbers


@pytest.mark.parametrize("text", ["", "2(x0)", "2(x", "2x3", "(x3)", "a", "1,,2", "-1"])
def test_malformed_counts_are_refused_and_quoted(text: str) -> None:
    """B007: what is not a list of counts is an error that quotes it."""
    with pytest.raises(WorldError) as refusal:
        counts(text)
    assert repr(text) in str(refusal.value)


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(1, 5)), min_size=1, max_size=6))
def test_counts_come_back_from_any_writing(runs: list[tuple[int, int]]) -> None:
    """Whatever runs Slurm forms, the flat list is the same."""
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert counts(text) == [count for count, times in runs for _ in range(times)]
