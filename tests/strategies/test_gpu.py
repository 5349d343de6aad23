from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.strategies.fitting import Fit, opened, placed
from tests.strategies.models import Blocks, Dropping, ForMeta, NormBlocks, TiedInRoot
from worldsize.testing.ranks import run_ranks

if TYPE_CHECKING:
    from torch import nn

    from worldsize.testing.ranks import RankPool

pytestmark = pytest.mark.gpu(count=2)

CASES: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "blocks": (Blocks, {}),
    "drop-out, recomputed": (Dropping, {"activation_checkpointing": True}),
    "norms": (NormBlocks, {}),
    "tied": (TiedInRoot, {}),
    "meta": (ForMeta, {"init": "meta"}),
    "compiled": (Blocks, {"compile": True}),
    "offloaded": (Blocks, {"offload": True}),
}
_made: dict[tuple[str, str], Any] = {}


def _fit_all(name: str, precision: str) -> dict[str, Any]:
    strategy, found = opened(name, precision, "cuda"), {}
    for case, (build, options) in CASES.items():
        made = Fit(strategy, placed(strategy, build, **options))
        for index in range(5):
            made.step(index)
        devices = {value.device.type for value in made.model.parameters()}
        found[case] = {**made.outcome(), "devices": sorted(devices), "memory": torch.cuda.max_memory_allocated()}
    return found


def _alone(precision: str) -> dict[str, Any]:
    if ("single", precision) not in _made:
        _made["single", precision] = run_ranks(_fit_all, 1, "single", precision, timeout=280)
    found: dict[str, Any] = _made["single", precision][0]
    return found


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_curves_on_two_devices(name: str, precision: str, two: RankPool) -> None:
    """Every case trains on two devices as on one, within the precision's reach, with equal weights on the ranks."""
    wanted, found = _alone(precision), two.run(_fit_all, name, precision, timeout=280)
    close = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2}[precision]
    for case in CASES:
        assert found[0][case]["state"] == found[1][case]["state"], case
        np.testing.assert_allclose(found[0][case]["losses"], wanted[case]["losses"], rtol=close, err_msg=case)
        offloaded = case == "offloaded" and name == "fsdp"
        assert found[0][case]["devices"] == ["cpu" if offloaded else "cuda"], case
