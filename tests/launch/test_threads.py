"""Threads of a rank that Slurm started."""

from __future__ import annotations

import pytest

from worldsize.launch.threads import narrow, share


@pytest.mark.parametrize(
    ("environ", "allowed", "tasks", "ranks", "threads"),
    [
        ({"SLURM_CPUS_PER_TASK": "32", "SLURM_CPUS_ON_NODE": "32"}, 32, 1, 4, "8"),
        ({"SLURM_CPUS_PER_TASK": "8", "SLURM_CPUS_ON_NODE": "32"}, 32, 4, 1, "8"),
        ({"SLURM_CPUS_PER_TASK": "8", "SLURM_CPUS_ON_NODE": "32"}, 8, 4, 1, "8"),
        ({"SLURM_CPUS_ON_NODE": "32"}, 64, 4, 1, "8"),
        ({"SLURM_CPUS_ON_NODE": "32"}, 64, 1, 4, "8"),
        ({"SLURM_CPUS_ON_NODE": "1"}, 64, 1, 4, "1"),
        ({}, 12, 1, 4, "3"),
    ],
)
def test_a_node_of_32_cpus_gives_4_ranks_8_threads_by_any_launcher(
    environ: dict[str, str], allowed: int, tasks: int, ranks: int, threads: str
) -> None:
    """One task a rank or one a node, bound or not (B050)."""
    assert share(environ, allowed, tasks=tasks, ranks=ranks) == {"OMP_NUM_THREADS": threads}


def test_the_users_own_number_stays() -> None:
    """Nothing is set (B050)."""
    assert share({"OMP_NUM_THREADS": "3"}, 32, tasks=1, ranks=4) == {}


def test_a_task_on_fewer_cpus_than_it_was_given_says_so() -> None:
    """All its loaders would share one core (B014)."""
    told = narrow({"SLURM_CPUS_PER_TASK": "8"}, 1)
    assert told is not None
    assert "given 8 CPUs and may run on 1" in told
    assert narrow({"SLURM_CPUS_PER_TASK": "8"}, 8) is None
    assert narrow({}, 1) is None
