"""What one host is, from files that say it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest

from worldsize.tools.doctor import facts
from worldsize.tools.doctor.facts import Facts

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, text: str) -> None:
    """With the folders around it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("said", "files", "limit"),
    [
        ("0::/job/step\n", {"job/memory.max": "1073741824\n", "job/step/memory.max": "max\n"}, 1024),
        ("0::/job\n", {"job/memory.max": "max\n"}, None),
        ("4:cpu,memory:/job\n1:cpuset:/x\n", {"memory/job/memory.limit_in_bytes": "2097152\n"}, 2),
        ("4:memory:/job\n", {"memory/job/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("", {}, None),
    ],
)
def test_the_tightest_control_group_counts(
    tmp_path: Path, said: str, files: dict[str, str], limit: int | None
) -> None:
    """Of this process or around it, in both versions."""
    write(tmp_path / "self", said)
    for name, text in files.items():
        write(tmp_path / "cgroup" / name, text)
    assert facts.cgroup_limit(tmp_path / "self", tmp_path / "cgroup") == limit


@pytest.mark.parametrize(
    ("files", "speed"),
    [
        ({"device/x": "", "speed": "100000\n"}, 100000),
        ({"bonding/x": "", "speed": "50000\n"}, 50000),
        ({"speed": "10000\n"}, None),
        ({"device/x": "", "speed": "-1\n"}, None),
        ({"device/x": ""}, None),
    ],
)
def test_only_a_real_card_has_a_speed(tmp_path: Path, files: dict[str, str], speed: int | None) -> None:
    """Virtual ones make one up."""
    for name, text in files.items():
        write(tmp_path / "eth0" / name, text)
    assert facts.card_speed("eth0", tmp_path) == speed


def test_cards_that_are_down_carry_nothing(tmp_path: Path) -> None:
    """Speeds of a device's ports are added up."""
    for name, state, rate in (
        ("m0/ports/1", "4: ACTIVE", "400 Gb/sec (4X NDR)"),
        ("m1/ports/1", "1: DOWN", "40 Gb/sec (4X)"),
    ):
        write(tmp_path / name / "state", state)
        write(tmp_path / name / "rate", rate)
    assert facts.rdma(tmp_path) == {"m0": 400.0}


def test_facts_survive_the_journey() -> None:
    """What an agent takes is what the doctor has."""
    import json

    taken = facts.take()
    assert Facts.of(json.loads(json.dumps(asdict(taken)))) == taken
    assert taken.python.count(".") == 2
    assert (taken.memory or 0) > 0
