"""Collectives, measured on real gloo ranks, and what the judge makes of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.pools import together
from tests.tools.doctor.seeing import seen, wrong
from worldsize.runtime import env
from worldsize.tools.doctor import judge_gpus
from worldsize.tools.doctor.ranks import Probe

if TYPE_CHECKING:
    from worldsize.runtime.comm import Comm


def measured(_: Comm) -> dict[str, Any] | None:
    """What a rank found."""
    return Probe(env.here(), torch.device("cpu"), 0.01).seen()


def test_all_ranks_and_all_pairs_are_measured() -> None:
    """On one host; rank 0 has all of it."""
    found, *others = together(measured, 3)
    assert others == [None, None]
    assert found
    assert sorted(tuple(pair["ranks"]) for pair in found["pairs"]) == list(combinations(range(3), 2))
    for values in (found["whole"], *found["pairs"]):
        assert values["all_reduce"] > 1e6
        assert values["all_gather"] > 1e6
        assert 0 < values["latency"] < 1


def collectives(slow: str) -> dict[str, Any]:
    """Four hosts of one rank, one of them slow."""
    hosts = "abcd"
    pairs = [
        {"ranks": [one, other], "all_reduce": 1e7 if slow and slow in (hosts[one], hosts[other]) else 1e9}
        for one, other in combinations(range(4), 2)
    ]
    whole = {"all_reduce": 1e9, "all_gather": 1e9, "latency": 1e-4}
    places = [(number, 0) for number in range(4)]
    return {
        "backend": "gloo",
        "ranks": 4,
        "device": "cpu",
        "whole": whole,
        "places": places,
        "peers": {},
        "pairs": pairs,
    }


NVLINK = "".join(f"GPU {gpu}: X\n" + "\t Link 0: 26.562 GB/s\n" * 18 for gpu in range(2))
GPU = "{}, X, 1, 1980, 1980, 34, 118, 700, 0x0, 0, No, 5, 16, 16, 143771, 0, 0\n"
SMI = {"query": "".join(map(GPU.format, range(2)))}


@pytest.mark.parametrize(
    ("rate", "smi", "cards", "hosts", "level"),
    [
        (352e9, SMI | {"nvlink": NVLINK}, {}, "a", "ok"),
        (200e9, SMI | {"nvlink": NVLINK}, {}, "a", "warning"),
        (25e9, SMI | {"nvlink": NVLINK}, {}, "a", "problem"),
        (25e9, SMI, {}, "a", "ok"),
        (5e9, SMI, {}, "a", "problem"),
        (40e9, SMI | {"nvlink": NVLINK}, {"mlx5_0": 400.0}, "ab", "ok"),
        (10e9, SMI | {"nvlink": NVLINK}, {"mlx5_0": 400.0}, "ab", "problem"),
        (10e9, SMI, {}, "ab", "warning"),
    ],
)
def test_gpus_are_judged_by_their_links(
    rate: float, smi: dict[str, str], cards: dict[str, float], hosts: str, level: str
) -> None:
    """NVLink, else PCIe, inside a host; the cards of the network between hosts."""
    one = seen()
    for name in hosts:
        one.facts[name] = replace(one.facts[name], smi=smi, rdma=cards)
    one.order = list(hosts)
    whole = {"all_reduce": rate, "all_gather": rate, "latency": 1e-5}
    one.collectives = collectives("") | {"backend": "nccl", "device": "cuda", "whole": whole, "pairs": []}
    (found,) = [finding for finding in judge_gpus.collectives(one) if "nccl" in finding.what]
    assert found.level == level


@pytest.mark.parametrize("slow", ["", "a", "d"])
def test_a_rank_that_is_slow_in_every_pair_is_its_hosts_fault(slow: str) -> None:
    """And nobody else's."""
    one = seen()
    one.order, one.collectives = list("abcd"), collectives(slow)
    assert "".join(wrong(one)) == slow
