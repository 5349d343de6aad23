"""The cluster in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.launch.slurm import lines
from worldsize.launch.slurm import nodes
from worldsize.launch.slurm.nodes import NodeFacts


def test_a_node_is_one_in_all_its_partitions() -> None:
    """Sinfo prints a line for each partition of a node."""
    assert [(node.name, node.partitions) for node in lines.around().nodes][:2] == [
        ("node1", ("short", "high", "main")),
        ("node2", ("short", "high", "main")),
    ]


def test_what_is_free_is_known() -> None:
    """Processors, memory, GPUs."""
    node = lines.around().nodes[0]
    assert (node.state, node.cpus, node.cpus_free, node.memory_free, node.gpus_free) == ("mixed", 8, 5, 14500, 4)


def test_a_drained_node_tells_why() -> None:
    """Reason, who, since when, and the way back."""
    node = lines.around().nodes[1]
    assert (node.words, node.reason, node.reason_user, node.since) == (
        "drained", "disk is full | ask ops", "ana", 1795842167,
    )  # fmt: skip
    assert node.resume == "scontrol update nodename=node2 state=resume"


def test_the_report_says_how_a_node_comes_back() -> None:
    """A line for each reason."""
    around = lines.around()
    assert nodes.report(around.nodes, around.partitions)[-1] == (
        f'node2 drained: "disk is full | ask ops" (ana, since {nodes.when(1795842167)}). '
        "An administrator resumes with: scontrol update nodename=node2 state=resume"
    )


def test_nodes_of_one_reason_share_a_line() -> None:
    """Their names are a host list, which scontrol takes."""
    bad = NodeFacts("n1", ("main",), "down", reason="power")
    found = nodes.report([replace(bad, name=f"n{number}") for number in (1, 2, 10)], [])
    assert found == [
        'n[1-2,10] down: "power". An administrator resumes with: scontrol update nodename=n[1-2,10] state=resume'
    ]


def test_a_partition_in_words() -> None:
    """What is there, what is free, what it allows."""
    around = lines.around()
    assert nodes.report(around.nodes, around.partitions)[2] == (
        "short: 2 nodes; 1 partly free, 1 drained; 5 of 16 CPUs free; 4 of 8 GPUs free; at most 00:10:00; "
        "at most 1 nodes a job"
    )


def test_a_partition_that_is_down_says_so() -> None:
    """It starts nothing, whatever its nodes do."""
    around = lines.around()
    assert nodes.report(around.nodes, around.partitions)[3].startswith("held (down: starts nothing): 2 nodes")


def test_limits_of_partitions() -> None:
    """Seconds and nodes; None where there is no limit."""
    main, _, short, held = lines.around().partitions
    assert (main.max_time, main.max_nodes, main.default, main.up) == (None, None, True, True)
    assert (short.max_time, short.max_nodes, short.total_nodes) == (600, 1, 2)
    assert (held.max_time, held.up) == (3600, False)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("idle", "free"),
        ("idle+drain", "drained"),
        ("mixed+drain", "draining"),
        ("allocated", "full"),
        ("down*", "not responding"),
        ("down+not_responding", "not responding"),
        ("idle+maint+reserved", "in maintenance"),
        ("idle+planned", "kept for a waiting job"),
        ("drained*", "not responding"),
        ("completing", "completing"),
        ("fail", "down"),
    ],
)
def test_states_of_nodes(state: str, expected: str) -> None:
    """Slurm's words and suffixes, of old and new versions."""
    name, flags = nodes._state(state)
    assert NodeFacts("n", (), name, flags).words == expected


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("gpu:4", 4),
        ("gpu:a100:4(S:0-1)", 4),
        ("gpu:a100:2,gpu:v100:2", 4),
        ("gpu:2(IDX:0-1)", 2),
        ("gpu:0(IDX:N/A)", 0),
        ("gres/gpu:2", 2),
        ("shard:8", 0),
        ("(null)", 0),
    ],
)
def test_gpus_are_counted(text: str, count: int) -> None:
    """Typed, untyped, with sockets or indices (B018)."""
    assert nodes.gpus(text) == count
