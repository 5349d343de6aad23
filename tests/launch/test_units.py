"""Slurm's time, memory and array indices, as text and as numbers."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.errors import ConfigError
from worldsize.launch.units import (
    MAX_INDEX,
    MAX_SECONDS,
    Array,
    array,
    mebibytes,
    memory_text,
    seconds,
    time_text,
)

if TYPE_CHECKING:
    from pathlib import Path

MINUTE, HOUR, DAY = 60, 3600, 86400
TIMES: dict[str | int, int | None] = {
    "10": 10 * MINUTE,
    90: 90 * MINUTE,
    "4:00": 4 * MINUTE,
    "1:30": 90,
    "1:00:00": HOUR,
    "25:00:00": 25 * HOUR,
    "2-12": 60 * HOUR,
    "14-0": 14 * DAY,
    "3-0:00": 3 * DAY,
    "3-1:30": 3 * DAY + HOUR + 30 * MINUTE,
    "1-00:00:00": DAY,
    "1:90": 150,
    "0": None,
    "00:00": None,
    "UNLIMITED": None,
    "infinite": None,
}
NO_TIMES = ["", " 5", "1.5", ":30", "1:", "1:2:3:4", "1-1:1:1:1", "4m", "1-", "-1", "+5", "1-2-", "٣", "soon"]
MEMORY: dict[str | int, int] = {
    "16": 16,
    16: 16,
    "512m": 512,
    "1k": 1,
    "1025k": 2,
    "4G": 4096,
    "4GiB": 4096,
    "4gb": 4096,
    "2.5GB": 2560,
    "1.5G": 1536,
    "0.1G": 103,
    "1T": 2**20,
    "0": 0,
    "0G": 0,
    "all": 0,
}


def as_sbatch_reads(option: str, tmp_path: Path) -> dict[str, str]:
    """What sbatch says of its options before it looks for a cluster, which there is none of."""
    conf, script = tmp_path / "slurm.conf", tmp_path / "job.sh"
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    script.write_text("#!/bin/sh\n")
    argv = ["sbatch", "-vv", "--test-only", option, str(script)]
    environ = {**os.environ, "SLURM_CONF": str(conf)}
    told: dict[str, str] = {}
    with subprocess.Popen(argv, env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        for line in process.stderr:
            name, colon, value = line.removeprefix("sbatch: ").partition(" : ")
            if colon:
                told[name.strip()] = value.strip()
            if "end of defined options" in line:
                break
        process.kill()
    return told


needs_sbatch = pytest.mark.skipif(
    shutil.which("sbatch") is None, reason="needs Slurm's client: apt-get install slurm-client"
)


@pytest.mark.parametrize(("text", "limit"), TIMES.items())
def test_times_mean_what_slurm_makes_of_them(text: str | int, limit: int | None) -> None:
    """B020: two fields are minutes and seconds, a bare number is minutes, days come before a hyphen, 0 is no limit."""
    assert seconds(text) == limit


@needs_sbatch
@pytest.mark.parametrize("text", TIMES)
def test_sbatch_reads_the_same_time(text: str | int, tmp_path: Path) -> None:
    """Sbatch itself takes every time that is accepted, and reads it alike; its own limits are whole minutes."""
    told = as_sbatch_reads(f"--time={text}", tmp_path)["time"]
    limit = seconds(text)
    whole = None if limit is None else -(-limit // MINUTE) * MINUTE
    assert seconds(told) == whole


@pytest.mark.parametrize("text", NO_TIMES)
def test_other_times_are_refused(text: str) -> None:
    """What sbatch refuses, or takes for something else than it looks like, is refused with the forms to choose from."""
    with pytest.raises(ConfigError, match="days-hours") as caught:
        seconds(text)
    assert repr(text) in str(caught.value)


def test_times_that_overflow_are_refused() -> None:
    """Slurm makes 54 years of 190 (99999999 minutes): longer than it can count is refused."""
    with pytest.raises(ConfigError, match="UNLIMITED"):
        seconds("99999999")


@given(st.none() | st.integers(1, MAX_SECONDS))
def test_times_come_back(limit: int | None) -> None:
    """A number of seconds, written and read, is the same number."""
    assert seconds(time_text(limit)) == limit


@given(st.text(alphabet="0123456789:-", max_size=12))
def test_a_time_is_read_or_refused(text: str) -> None:
    """Any text is refused with a ConfigError, or is written in one form that is read as the same time."""
    with contextlib.suppress(ConfigError):
        assert seconds(time_text(seconds(text))) == seconds(text)


@pytest.mark.parametrize(("text", "mib"), MEMORY.items())
def test_memory_is_whole_mebibytes(text: str | int, mib: int) -> None:
    """B021: units count in 1024s, decimals and kilobytes are rounded up, a bare number is MiB."""
    assert mebibytes(text) == mib


@needs_sbatch
@pytest.mark.parametrize(
    "text", [text for text in MEMORY if text != "all" and "." not in str(text) and text != "4GiB"]
)
def test_sbatch_reads_the_same_memory(text: str | int, tmp_path: Path) -> None:
    """Sbatch itself reads every spelling that it knows alike (it says "0?" for all of the node)."""
    told = as_sbatch_reads(f"--mem={text}", tmp_path)["mem"].removesuffix("?")
    assert mebibytes(told) == mebibytes(text)


@pytest.mark.parametrize("text", ["", "abc", "-1", "2.5", "1P", "4B", "4G4", "1e3", "4 G", "1.G", "٣G"])
def test_other_memory_is_refused(text: str) -> None:
    """What is no amount of memory is refused, and so are decimals without a unit."""
    with pytest.raises(ConfigError, match="64G") as caught:
        mebibytes(text)
    assert repr(text) in str(caught.value)


@given(st.integers(0, 2**50))
def test_memory_comes_back(mib: int) -> None:
    """A number of MiB, written and read, is the same number."""
    assert mebibytes(memory_text(mib)) == mib


@given(st.integers(0, 10**6), st.integers(0, 999), st.sampled_from("KMGT"))
def test_memory_is_never_less_than_was_asked(whole: int, thousandths: int, unit: str) -> None:
    """Rounding goes up, by less than one MiB."""
    kib = (whole * 1000 + thousandths) * {"K": 1, "M": 2**10, "G": 2**20, "T": 2**30}[unit]
    assert 0 <= mebibytes(f"{whole}.{thousandths:03}{unit}") * 1024 * 1000 - kib < 1024 * 1000


@pytest.mark.parametrize(
    ("text", "indices", "at_once"),
    [
        ("0-3%2", (0, 1, 2, 3), 2),
        ("1,3,5-9:2", (1, 3, 5, 7, 9), None),
        ("0-10:3", (0, 3, 6, 9), None),
        (5, (5,), None),
        ("7,1", (1, 7), None),
        ("01", (1,), None),
    ],
)
def test_array_indices(text: str | int, indices: tuple[int, ...], at_once: int | None) -> None:
    """Indices, ranges and steps, and after % how many run at once."""
    assert array(text) == Array(indices, at_once)


@pytest.mark.parametrize(
    "text",
    ["", "a", "1-", "%3", "1%0", "1%3,4", "5-1", "0-10:0", "1,1", "1-3,2", "[0-3]", f"0-{MAX_INDEX + 1}", "1 - 3"],
)
def test_other_arrays_are_refused(text: str) -> None:
    """What is no list of indices is refused here: sbatch would pass it on, and the controller says only "invalid"."""
    with pytest.raises(ConfigError) as caught:
        array(text)
    assert repr(text) in str(caught.value)


@given(st.sets(st.integers(0, 200), min_size=1), st.none() | st.integers(1, 50))
def test_arrays_come_back(indices: set[int], at_once: int | None) -> None:
    """Any members, written as runs and read, are the same members."""
    members = Array(tuple(sorted(indices)), at_once)
    assert array(str(members)) == members
