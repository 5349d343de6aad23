"""Which program, and how many ranks."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.errors import ConfigError
from worldsize.launch.plan import seconds
from worldsize.launch.program import argv, count_gpus, ranks

if TYPE_CHECKING:
    from pathlib import Path


def test_a_python_script_is_python_even_if_it_is_executable(tmp_path: Path) -> None:
    """`.py` runs by this interpreter, unbuffered."""
    path = tmp_path / "a.py"
    path.touch(mode=0o700)
    assert argv(str(path), ["-x"]) == (sys.executable, "-u", str(path), "-x")


def test_a_folder_with_a_main_is_python(tmp_path: Path) -> None:
    """As `python folder`."""
    assert argv(str(tmp_path), [])[:2] == (sys.executable, "-u")


def test_module_and_no_python_contradict() -> None:
    """Both are an error, before anything starts."""
    with pytest.raises(ConfigError, match="contradict"):
        argv("m", [], module=True, python=False)


@pytest.mark.parametrize(
    ("visible", "count"),
    [("", 0), ("-1", 0), ("NoDevFiles", 0), ("0", 1), ("0,1,", 2), ("GPU-aaaa,GPU-bbbb", 2), ("3,-1,2", 1)],
)
def test_gpus_are_counted_as_the_driver_reads_the_list(visible: str, count: int) -> None:
    """B017: opaque entries, up to the first that is none."""
    assert count_gpus({"CUDA_VISIBLE_DEVICES": visible}) == count


TWO = {"CUDA_VISIBLE_DEVICES": "0,1"}
NONE = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("asked", "environ", "device", "count"),
    [
        ("3", NONE, None, 3),
        ("gpu", TWO, None, 2),
        ("auto", TWO, None, 2),
        ("auto", NONE, None, 1),
        ("auto", TWO, "cpu", 1),
        ("cpu", TWO, None, len(os.sched_getaffinity(0))),
        ("2", TWO, "cuda", 2),
        ("4", TWO, "cpu", 4),
    ],
)
def test_how_many_ranks_a_word_means(asked: str, environ: dict[str, str], device: str | None, count: int) -> None:
    """--nproc-per-node N, auto, gpu, cpu."""
    assert ranks(asked, environ, device) == count


@pytest.mark.parametrize("asked", ["0", "-1", "two", "", "1.5", "²"])
def test_what_is_no_number_of_ranks(asked: str) -> None:
    """Refused with what was given."""
    with pytest.raises(ConfigError, match="no ranks"):
        ranks(asked, {}, None)


def test_gpu_without_gpus_is_refused() -> None:
    """No silent fall back to one rank."""
    with pytest.raises(ConfigError, match="no GPU is visible"):
        ranks("gpu", NONE, None)


def test_more_ranks_than_gpus_are_refused_before_the_start() -> None:
    """B015: both numbers are in the message."""
    with pytest.raises(ConfigError, match=r"8 ranks need 8 GPUs.*2 visible"):
        ranks("8", TWO, "cuda")


@pytest.mark.parametrize(("text", "value"), [("30", 30), ("1.5s", 1.5), ("500ms", 0.5), ("2m", 120), ("1 h", 3600)])
def test_lengths_of_time(text: str, value: float) -> None:
    """A number and a unit; seconds without one."""
    assert seconds(text) == value


@given(st.text(max_size=12))
def test_any_text_is_a_time_or_an_error(text: str) -> None:
    """Nothing else comes out."""
    try:
        value = seconds(text)
    except ConfigError:
        return
    assert value >= 0
