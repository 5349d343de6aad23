"""The device of a rank, on real devices where there are some."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from worldsize.errors import WorldError
from worldsize.runtime.device import choose_device, describe, identity
from worldsize.world import World

NONE_VISIBLE = {"CUDA_VISIBLE_DEVICES": ""}


def in_a_process(code: str, visible: str | None = None) -> str:
    """What a fresh process prints, with CUDA_VISIBLE_DEVICES set to `visible`, or unset."""
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environ |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, check=True, timeout=120
    ).stdout.strip()


ASK_FOR_THE_CPU = """
import torch
from worldsize.runtime.device import choose_device, describe
from worldsize.world import World
device = choose_device(World(), "cpu", {})
print(device, describe(device).startswith("cpu"), torch.cuda.is_initialized())
"""


def test_the_cpu_is_taken_without_touching_cuda() -> None:
    """Asked for the CPU, CUDA is not initialised: children forked afterwards could still use it."""
    assert in_a_process(ASK_FOR_THE_CPU) == "cpu True False"


@pytest.mark.parametrize("requested", ["auto", None])
def test_where_nothing_is_visible_it_is_the_cpu(requested: str | None) -> None:
    """B015: a rank that sees no device computes on the CPU, unless CUDA was asked for."""
    assert choose_device(World(), requested, NONE_VISIBLE) == torch.device("cpu")


@pytest.mark.parametrize("text", ["", "-1", "NoDevFiles"])
def test_cuda_where_nothing_is_visible_is_refused(text: str) -> None:
    """Asked for CUDA, a silent CPU would be a training that never ends: refused, with what was visible."""
    with pytest.raises(WorldError, match=f"CUDA_VISIBLE_DEVICES is '{text}'"):
        choose_device(World(), "cuda", {"CUDA_VISIBLE_DEVICES": text})


@pytest.mark.parametrize("requested", ["cuda:1", "gpu", ""])
def test_an_unknown_device_is_refused(requested: str) -> None:
    """The index is not the user's to choose: it follows from the local rank."""
    with pytest.raises(WorldError, match="none of auto, cpu, cuda"):
        choose_device(World(), requested, {})


def test_the_cpu_is_described_by_its_threads_and_has_no_identity() -> None:
    """Two ranks on one CPU are fine, so a CPU is nobody's own."""
    assert describe(torch.device("cpu")) == f"cpu ({torch.get_num_threads()} threads)"
    assert identity(torch.device("cpu")) is None


@pytest.mark.gpu
def test_each_local_rank_has_its_own_current_device() -> None:
    """B015: as many ranks as devices: each has another one, it is current, and the line names it."""
    seen, count = set(), torch.cuda.device_count()
    for rank in range(count):
        device = choose_device(World(rank, count, rank, count), "auto", {})
        assert (device, torch.cuda.current_device()) == (torch.device("cuda", rank), rank)
        assert str(identity(device)) in describe(device)
        assert torch.cuda.get_device_name(rank) in describe(device)
        seen.add(identity(device))
    assert len(seen) == count


@pytest.mark.gpu
def test_one_rank_more_than_devices_is_refused() -> None:
    """B015: the shortage is named before anything starts."""
    ranks = torch.cuda.device_count() + 1
    with pytest.raises(WorldError, match="1 too few"):
        choose_device(World(0, ranks, 0, ranks), "auto", {})


CHOOSE = """
from worldsize.errors import WorldError
from worldsize.runtime.device import choose_device
from worldsize.runtime.env import read
from worldsize.world import World
try:
    print(choose_device(World(), None, read()))
except WorldError as error:
    print(error)
"""


@pytest.mark.gpu
def test_a_list_of_devices_that_do_not_exist_is_no_cpu() -> None:
    """Promise 7: devices are listed and the driver shows none: an error with the list, not a silent CPU."""
    assert "CUDA_VISIBLE_DEVICES=99" in in_a_process(CHOOSE, "99")
    assert in_a_process(CHOOSE, "0") == "cuda:0"


COUNT_BOTH = """
import os, torch
from worldsize.runtime.visible import entries, visible_count
print(visible_count(entries(os.environ["CUDA_VISIBLE_DEVICES"]), 99), torch.cuda.device_count())
"""


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["", "-1", "NoDevFiles", "0", "0,", " 0", "0,-1", "0,x,0", "UUID", "UUID,"])
def test_the_driver_sees_as_many_devices_as_the_parser(text: str) -> None:
    """B017: for every form of the list, torch counts what `entries` counts."""
    uuid = str(identity(torch.device("cuda", 0)))
    ours, torchs = in_a_process(COUNT_BOTH, text.replace("UUID", uuid)).split()
    assert ours == torchs


@pytest.mark.gpu
def test_a_repeated_device_really_hides_all() -> None:
    """B017: why a device listed twice is refused: the driver shows none."""
    assert in_a_process("import torch; print(torch.cuda.device_count())", "0,0") == "0"
