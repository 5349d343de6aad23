from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.strategies import fitting
from tests.strategies.models import CASES
from worldsize.runtime import session
from worldsize.testing.ranks import run_ranks

if TYPE_CHECKING:
    from worldsize.testing.ranks import RankPool

LAYOUTS = [(name, ranks) for ranks in (2, 3) for name in ("ddp", "fsdp", "horovod")]
_made: dict[tuple[str, int], list[dict[str, Any]]] = {}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one rank makes of every case."""
    return run_ranks(fitting.fit_all, 1, "single", 1, timeout=280)[0]


def _ranks(pool: RankPool, name: str) -> list[dict[str, Any]]:
    if (name, pool.size) not in _made:
        _made[name, pool.size] = pool.run(fitting.fit_all, name, pool.size, timeout=280)
    return _made[name, pool.size]


@pytest.mark.parametrize(
    ("name", "ranks", "case"),
    [
        pytest.param(name, ranks, case, marks=pytest.mark.horovod if name == "horovod" else ())
        for name, ranks in LAYOUTS
        for case, wanted in CASES.items()
        if ranks in wanted.ranks
    ],
)
def test_curve(name: str, ranks: int, case: str, alone: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """Losses, gradient norms and final state are those of one rank, and the ranks' states equal bit for bit (B069)."""
    wanted = alone[case]
    found = [each[case] for each in _ranks(request.getfixturevalue({2: "two", 3: "three"}[ranks]), name)]
    assert isinstance(wanted, dict), wanted
    assert isinstance(found[0], dict), found[0]
    assert all(each["state"] == found[0]["state"] for each in found)
    for what in ("losses", "norms"):
        np.testing.assert_allclose(found[0][what], wanted[what], rtol=1e-12)
    assert found[0]["state"].keys() == wanted["state"].keys()
    for key, value in wanted["state"].items():
        np.testing.assert_allclose(found[0]["state"][key], value, rtol=0, atol=1e-12, err_msg=key)


def test_recomputation_changes_nothing(alone: dict[str, Any]) -> None:
    """Drop-out draws the same numbers in the second pass, so that the curve is that without recomputation."""
    assert alone["recomputed"] == alone["drop-out"]


def test_compilation_in_place_keeps_names(alone: dict[str, Any]) -> None:
    """A compiled model's state has the bare model's names (B059)."""
    assert list(alone["compiled"]["state"]) == list(alone["drop-out"]["state"])


@pytest.mark.parametrize(
    "layout", [("fsdp", "ddp"), ("ddp", "fsdp"), pytest.param(("horovod", "horovod"), marks=pytest.mark.horovod)]
)
def test_two_models_in_turns(layout: tuple[str, str], two: RankPool) -> None:
    """Models under different strategies train each in its own turn, and their gradients in others' turns count for nothing."""
    wanted = fitting.fit_pair("single", "single")
    session.close()
    for found in two.run(fitting.fit_pair, *layout):
        for model in ("maker", "critic"):
            np.testing.assert_allclose(found[model]["losses"], wanted[model]["losses"], rtol=1e-12)
            np.testing.assert_allclose(found[model]["norms"], wanted[model]["norms"], rtol=1e-12)
