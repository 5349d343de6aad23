"""Sequences in parts over real ranks: the curve of one rank, or a refusal where it would be another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.pools import pool
from tests.strategies import decoder
from tests.strategies.decoder import LENGTH, WIDTH, Decoder, Dropping, DroppingInAttention
from tests.strategies.fitting import attempt

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.testing.ranks import RankPool


class Placed(Decoder):
    """Is told where it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> Any:
        """Logits."""
        if position_ids is None:
            position_ids = torch.arange(ids.shape[1]).unsqueeze(0)
        x = self.embed(ids) + self.places(position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Counting(Placed):
    """Counts for itself where it stands."""

    def forward(self, ids: torch.Tensor) -> Any:  # type: ignore[override]
        """Logits."""
        return super().forward(ids, torch.arange(ids.shape[1]).unsqueeze(0))


class Looking(Decoder):
    """Looks along the sequence by something else than attention."""

    def forward(self, ids: torch.Tensor) -> Any:
        """Logits."""
        return super().forward(ids).cumsum(1)


class Masked(Decoder):
    """Makes a mask of its own."""

    def forward(self, ids: torch.Tensor) -> Any:
        """Logits."""
        x = self.embed(ids).unsqueeze(1)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        return self.head(functional.scaled_dot_product_attention(x, x, x, mask).squeeze(1))


class Normed(Decoder):
    """Normalises over samples and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)


CASES: dict[str, tuple[type[Decoder], dict[str, Any]]] = {
    "plain": (Decoder, {}),
    "drop-out": (Dropping, {}),
    "recomputed": (Dropping, {"activation_checkpointing": True}),
    "positions": (Placed, {}),
    "meta": (Decoder, {"init": "meta"}),
}


WITHIN = {"plain", "drop-out"}
"""Cases that are part of others by default: of "positions" and of three parts; of "recomputed" and of four ranks."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, one: RankPool) -> dict[str, Any]:
    """One rank's runs by case, made when asked for."""

    class Made(dict[str, Any]):
        def __missing__(self, case: str) -> dict[str, Any]:
            kind, options = CASES[case]
            (self[case],) = one.run(decoder.train, tmp_path_factory.mktemp("alone"), kind, options=options)
            return dict(self[case])

    return Made()


def _check(ranks: RankPool, folder: Path, case: str, wanted: dict[str, Any], **layout: Any) -> None:
    kind, options = CASES[case]
    for found in ranks.run(decoder.train, folder, kind, options=options, timeout=280, **layout):
        decoder.same(found, wanted)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.matrix if case in WITHIN else ()) for case in CASES]
)
def test_two_parts(case: str, tmp_path: Path, two: RankPool, alone: dict[str, Any]) -> None:
    """A whole run in float64: losses, clipped norms, rates, scores, weights, average and predictions of one rank."""
    _check(two, tmp_path, case, alone[case], cp=2)


@pytest.mark.parametrize(
    "layout",
    [
        {"strategy": "fsdp"},
        {"strategy": "hsdp", "replicas": 2},
        pytest.param({"strategy": "ddp"}, marks=pytest.mark.matrix),
    ],
)
def test_four_ranks(layout: dict[str, Any], tmp_path: Path, four: RankPool, alone: dict[str, Any]) -> None:
    """Parts of sequences and shares of the batch; in the last step of an epoch one share has nothing to do."""
    _check(four, tmp_path, "drop-out", alone["drop-out"], cp=2, **layout)


@pytest.mark.parametrize("layout", [{}, pytest.param({"strategy": "fsdp"}, marks=pytest.mark.matrix)])
def test_parts_of_sequences_and_of_tensors(
    layout: dict[str, Any], tmp_path: Path, four: RankPool, alone: dict[str, Any]
) -> None:
    """Drop-out is cut both ways."""
    options = {"tp_plan": {**decoder.PLAN, "layers.*.inner": "colwise"}}
    for found in four.run(decoder.train, tmp_path, Dropping, options=options, timeout=280, cp=2, tp=2, **layout):
        decoder.same(found, alone["drop-out"])


def test_three_parts(tmp_path: Path, three: RankPool, alone: dict[str, Any]) -> None:
    """No power of two."""
    _check(three, tmp_path, "plain", alone["plain"], cp=3)


@pytest.mark.parametrize("layouts", [({"cp": 2}, {"strategy": "fsdp"}), ({"strategy": "ddp"}, {"cp": 2})])
def test_what_one_layout_wrote_another_resumes(
    layouts: tuple[dict[str, Any], ...], tmp_path: Path, two: RankPool, alone: dict[str, Any]
) -> None:
    """Two steps in one, the rest in the other: what the undisturbed run has."""
    found: dict[str, Any] = {}
    for layout, until in zip(layouts, (2, decoder.STEPS), strict=True):
        found = two.run(decoder.train, tmp_path, Dropping, {}, until, timeout=280, **layout)[0]
    assert min(found["losses"]) == 2
    decoder.same(found, alone["drop-out"])


def _refused(folder: Path, kind: type[Decoder], layout: dict[str, Any]) -> str:
    return attempt(lambda: decoder.train(folder, kind, until=1, **layout))


@pytest.mark.parametrize(
    ("kind", "layout", "said"),
    [
        (Counting, {}, "computes something else on parts of a sequence"),
        (Looking, {}, "computes something else on parts of a sequence"),
        (Masked, {}, "without a mask"),
        (DroppingInAttention, {}, "dropout_p=0.2"),
        (Normed, {}, "Found: batch, cp=2"),
        (Decoder, {"strategy": "zero1"}, "cp=2"),
        (Decoder, {"strategy": "horovod"}, "cp=2"),
        (Decoder, {"pp": 2}, "cp=2, tp=1, pp=2"),
    ],
)
def test_what_would_be_another_curve_is_refused(
    kind: type[Decoder], layout: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Before the first step, with what it was."""
    for line in pool(4 if "pp" in layout else 2).run(_refused, tmp_path, kind, {"cp": 2, **layout}):
        assert said in line


def test_a_length_that_does_not_divide_is_refused(tmp_path: Path, four: RankPool) -> None:
    """With both numbers."""
    for line in four.run(_refused, tmp_path, Decoder, {"cp": 4}):
        assert f"length {LENGTH}, cp=4" in line
