"""From what was counted to a verdict."""

from __future__ import annotations

from typing import Any

import pytest

from worldsize.errors import ConfigError
from worldsize.tools.plan import formula, judge, layouts, machine, planning, show
from worldsize.tools.trial import Layout

GIB = machine.GIB


def answer(peak: int, **more: Any) -> dict[str, Any]:
    """Of one rank: parameters, gradients and Adam's state of a billion numbers' worth, the rest activations."""
    parts = {"parameters": 4 * GIB, "gradients": 4 * GIB, "optimizer": 8 * GIB, "step": peak - 16 * GIB}
    batch = {
        "global_batch": 64,
        "micro_batch": 4,
        "shares": 8,
        "micro_batches": 16,
        "most": 2,
        "fewest": 2,
        "traced": 2,
    }
    return {
        "peak": peak, "parts": parts, "phases": {"step": {"size": peak, "parts": parts}}, "built": {"size": 0, "parts": {}},
        "batch": batch, "input": 0.0, "whole": {"parameters": GIB, "trained": GIB, "model": 4 * GIB, "optimizer": 8 * GIB},
        "notes": [], "precision": "fp32",
        "traffic": {"within": {"0": 1.0, "1": 3.0}, "between": {}, "calls": {}, "steps": 1}, **more,
    }  # fmt: skip


@pytest.mark.parametrize(("peak", "fits"), [(60, "yes"), (74, "tight"), (79, "no"), (200, "no")])
def test_a_layout_fits_only_with_its_margin(peak: int, fits: str) -> None:
    """A peak just below the GPU's memory leaves no room for context, NCCL and fragments."""
    found = judge.worst(Layout.parse("fsdp:8"), [answer(peak * GIB)], machine.find("h100-80g"))
    assert found.fits == fits
    assert found.needed > found.peak >= peak * GIB


def test_the_busiest_stage_decides() -> None:
    """Of a pipeline's ranks the one that needs most; a checkpoint has all of them."""
    found = judge.worst(Layout.parse("pp2:2"), [answer(20 * GIB), answer(30 * GIB)], machine.find("80GiB"))
    assert found.peak >= 30 * GIB
    assert found.whole["model"] == 8 * GIB


def test_parts_add_up_to_the_peak() -> None:
    """Whatever they were counted as."""
    found = judge.worst(Layout.parse("fsdp:8"), [answer(40 * GIB, input=float(GIB))], machine.find("h200-141g"))
    assert sum(judge.told(found.parts).values()) == found.peak


def test_micro_batches_that_were_not_run_are_sent_too() -> None:
    """Each like the first; the last one alone exchanges gradients."""
    more = {
        "global_batch": 64,
        "micro_batch": 4,
        "shares": 4,
        "micro_batches": 16,
        "most": 4,
        "fewest": 4,
        "traced": 2,
    }
    assert judge.worst(Layout.parse("fsdp:4"), [answer(20 * GIB, batch=more)], None).within == 1.0 + 1.0 + 1.0 + 3.0


def test_zero_cuts_more_with_each_stage() -> None:
    """Optimizer state, then gradients, then parameters; all are marked as formulas with a larger margin."""
    parts = [formula.applied(f"zero{stage}", answer(20 * GIB), 8)["parts"] for stage in (1, 2, 3)]
    assert [each["optimizer"] for each in parts] == [GIB, GIB, GIB]
    assert [each["gradients"] for each in parts] == [4 * GIB, GIB // 2, GIB // 2]
    assert [each["parameters"] for each in parts] == [4 * GIB, 4 * GIB, GIB // 2]
    assert not judge.worst(Layout.parse("zero2:8"), [formula.applied("zero2", answer(20 * GIB), 8)], None).traced


def test_an_unknown_gpu_is_an_error_with_the_known_ones() -> None:
    """Sizes are taken in both units."""
    assert machine.find("24GB").memory == 24 * 10**9
    with pytest.raises(ConfigError, match="h100-80g"):
        machine.find("h100-81g")


def test_the_usual_layouts_fill_the_gpus() -> None:
    """Each of them over all; tensor parts within a node."""
    found = layouts.usual(64, 8)
    assert {layout.ranks for layout in found} == {64}
    assert {"fsdp:64", "hsdp:64", "zero3:64", "fsdp+tp8:64", "pp4:64", "fsdp+tp8+pp2:64"} <= set(map(str, found))
    assert layouts.usual(1, 1) == [Layout("single", 1)]


def test_what_cannot_run_stands_below_the_table() -> None:
    """With its reason; the table has the others, the smallest first."""
    verdicts = [
        judge.worst(Layout.parse("ddp:8"), [answer(40 * GIB)], None),
        judge.worst(Layout.parse("fsdp:8"), [answer(20 * GIB)], None),
        judge.worst(Layout.parse("tp8:8"), [{"error": "no plan"}], None),
    ]
    saved = planning.saves(verdicts, 3, 1e9)
    assert [row[0] for row in show.cells(verdicts)[1:]] == ["fsdp:8", "ddp:8"]
    said = list(show.lines(verdicts, planning.Machine(8, 8), saved))
    assert "tp8:8: cannot run: no plan" in said
    assert saved.disk == 4 * 12 * GIB
