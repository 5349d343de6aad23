"""Which devices and CPUs a process may use, by the variables that say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.errors import WorldError
from worldsize.runtime.env import detect
from worldsize.runtime.visible import (
    choose,
    entries,
    gpu_count,
    gpus_on_node,
    mig_note,
    own_list,
    threads_per_rank,
    visible_count,
)

MIG = "MIG-11111111-2222-3333-4444-555555555555"
OLD_MIG = "MIG-GPU-aaaaaaaa-2222-3333-4444-555555555555/7/0"
SEEN = Path(__file__).parent / "slurm_env"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (None, None),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("all", []),
        ("0,1,", ["0", "1"]),
        ("0, 1", ["0", "1"]),
        ("0,-1,1", ["0"]),
        ("GPU-aaaa-1,GPU-bbbb-2", ["GPU-aaaa-1", "GPU-bbbb-2"]),
        (MIG, [MIG]),
        (OLD_MIG, [OLD_MIG]),
    ],
)
def test_entries_are_opaque_and_end_at_the_first_invalid_one(text: str | None, names: list[str] | None) -> None:
    """B017: indices, UUIDs and MIG slices are strings; nothing is visible behind an invalid entry."""
    assert entries(text) == names


def test_a_device_listed_twice_is_refused() -> None:
    """B017: the driver shows no device at all for such a list, which would look like a machine without any."""
    with pytest.raises(WorldError, match="twice"):
        entries("0,1,0")


def test_a_process_sees_one_mig_slice_and_is_told_so() -> None:
    """B017: of two MIG slices one process can use the first only."""
    listed = entries(f"{MIG},{OLD_MIG}")
    assert visible_count(listed, 8) == 1
    assert "2 MIG slices" in str(mig_note(listed))
    assert mig_note([MIG]) is None


def test_an_unset_list_shows_all_devices() -> None:
    """Without CUDA_VISIBLE_DEVICES every device of the host is visible, with it only those listed."""
    assert (visible_count(None, 8), visible_count([], 8), visible_count(["3", "5"], 8)) == (8, 0, 2)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("a100:4", 4),
        ("a100:2,v100:2", 4),
        ("8", 8),
        ("gpu:a100:4(S:0-1)", 4),
        ("gpu:a100:4(S:0,1),gpu:v100:2", 6),
        ("", None),
        ("gpu", 1),
        ("gpu:2", 2),
        ("gres:gpu:2", 2),
        ("gres/gpu:a100:2", 2),
        ("gres/gpu=1", 1),
        ("1g.10gb:7", 7),
    ],
)
def test_a_typed_request_of_gpus_is_a_number(text: str, count: int | None) -> None:
    """B018: types, lists and sockets in Slurm's GPU requests do not hide the count."""
    assert gpu_count(text) == count


@pytest.mark.parametrize("text", ["x y", "4,", "gpu:", "a100:", "cpu=8", "1:2"])
def test_a_malformed_request_of_gpus_is_refused_and_quoted(text: str) -> None:
    """B018: what is no count of GPUs is an error that quotes it."""
    with pytest.raises(WorldError) as refusal:
        gpu_count(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_NODE": "a100:8"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:2,v100:2"}, 4),
        ({"SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({}, None),
    ],
)
def test_gpus_of_the_node_come_from_what_says_it_best(environ: dict[str, str], count: int | None) -> None:
    """B018: the count on the node, then the request, then the lists."""
    assert gpus_on_node(environ) == count


@pytest.mark.parametrize("count", [0, 1, 4, 8])
@pytest.mark.parametrize("local_rank", range(8))
def test_each_of_eight_ranks_gets_a_device_or_the_cpu(count: int, local_rank: int) -> None:
    """B015: no device: the CPU; one of its own: the first; all of them: the one of its local rank."""
    if count == 4:
        with pytest.raises(WorldError, match="4 too few"):
            choose(local_rank, 8, count)
        return
    assert choose(local_rank, 8, count, own=count == 1) == {0: None, 1: 0, 8: local_rank}[count]


def test_a_shortage_is_named_before_anything_starts() -> None:
    """B015: two devices for eight ranks is an error that names both numbers."""
    with pytest.raises(WorldError, match=r"8 ranks .* share 2 visible CUDA"):
        choose(3, 8, 2)


@given(st.integers(1, 16), st.integers(0, 16), st.booleans())
def test_ranks_that_share_a_list_never_share_a_device(local_size: int, count: int, own: bool) -> None:
    """For any number of ranks and devices: different devices, or each the first of its own, or CPU, or an error."""
    try:
        chosen = [choose(rank, local_size, count, own=own) for rank in range(local_size)]
    except WorldError:
        assert not own
        assert 0 < count < local_size
    else:
        assert chosen in ([None] * local_size, list(range(local_size)), [0] * local_size if own else None)


def tasks(file: str, case: str) -> list[dict[str, str]]:
    """The environments of all tasks of one recorded case."""
    seen = json.loads((SEEN / file).read_text())[case]
    return [environ for name, environ in sorted(seen.items()) if name.startswith("task")]


def chosen(file: str, case: str) -> list[int | None]:
    """The device index every task of a recorded case would take."""
    found = []
    for environ in tasks(file, case):
        world, listed = detect(environ), entries(environ.get("CUDA_VISIBLE_DEVICES"))
        own = own_list(world.launcher, environ)
        found.append(choose(world.local_rank, world.local_size, visible_count(listed, 4), own=own))
    return found


@pytest.mark.parametrize("file", ["22.05-loopback.json", "22.05-namespaces-cgroup.json", "24.11.json"])
@pytest.mark.parametrize(
    ("case", "indices"),
    [
        ("2n2t_gpus_per_task1", [0, 0, 0, 0]),
        ("2n2t_gres2", [0, 1, 0, 1]),
        ("2n2t_gpus_per_node2", [0, 1, 0, 1]),
        ("2n1t_gres4_cpt8", [0, 0]),
        ("gpus_total", [0, 1, 2, 0]),
        ("het", [0, 0, 1, 0, 1]),
    ],
)
def test_tasks_of_a_real_step_take_their_devices(file: str, case: str, indices: list[int]) -> None:
    """B015: bound by --gpus-per-task each task takes its only device, unbound the one of its local rank."""
    assert chosen(file, case) == indices


def test_tasks_bound_one_by_one_take_their_only_device() -> None:
    """B015: --gpu-bind=single:1 is told by the list being shorter than the GPUs of the node."""
    assert chosen("22.05-bound.json", "gpu_bind_single") == [0, 0]


def test_two_tasks_put_on_one_gpu_are_a_shortage() -> None:
    """--ntasks-per-gpu=2 gives both tasks the same device, which is no device each."""
    with pytest.raises(WorldError, match="1 too few"):
        chosen("22.05-bound.json", "ntasks_per_gpu2")


@pytest.mark.parametrize(
    ("launcher", "text", "own"),
    [
        ("torchrun", "0", False),
        ("worldsize", "0", False),
        ("env", "0", True),
        ("env", "0,1", False),
        ("pmi", "3", True),
    ],
)
def test_whose_list_it_is_follows_from_the_launcher(launcher: str, text: str, own: bool) -> None:
    """Under torchrun and worldsize one list is for all ranks; under MPI or by hand one entry is the rank's own."""
    assert own_list(launcher, {"CUDA_VISIBLE_DEVICES": text}) is own


@pytest.mark.parametrize(
    ("environ", "allowed", "ranks", "threads"),
    [
        ({}, 32, 4, 8),
        ({}, 4, 2, 2),
        ({}, 2, 8, 1),
        ({"OMP_NUM_THREADS": "3"}, 32, 4, None),
        ({"OMP_NUM_THREADS": ""}, 32, 4, 8),
        ({"SLURM_STEP_ID": "0", "SLURM_CPUS_PER_TASK": "8"}, 64, 4, 2),
        ({"SLURM_STEP_ID": "0", "SLURM_CPUS_PER_TASK": "8"}, 64, 1, 8),
        ({"SLURM_CPUS_PER_TASK": "8", "SLURM_CPUS_ON_NODE": "32"}, 64, 4, 8),
        ({"SLURM_CPUS_PER_TASK": "8", "SLURM_CPUS_ON_NODE": "32"}, 16, 4, 4),
    ],
)
def test_ranks_divide_the_cpus_they_share(
    environ: dict[str, str], allowed: int, ranks: int, threads: int | None
) -> None:
    """B050: allowed CPUs over ranks, at least one, bounded by what Slurm gave; a user's value is left alone."""
    assert threads_per_rank(environ, allowed, ranks) == threads
