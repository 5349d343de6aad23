from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.strategies.fitting import Fit, micro, opened, placed
from tests.strategies.models import Blocks, Dicts, Records
from worldsize.errors import ConfigError
from worldsize.runtime import session
from worldsize.strategies.outputs import tensors
from worldsize.strategies.precision import Precision

if TYPE_CHECKING:
    from worldsize.testing.ranks import RankPool


def _trained(name: str, precision: str) -> dict[str, Any]:
    strategy = opened(name, precision)
    made = Fit(strategy, placed(strategy, Blocks))
    for index in range(3):
        made.step(index)
    return made.outcome() | {"dtypes": sorted({str(value.dtype) for value in made.model.parameters()})}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["ddp", "fsdp", pytest.param("horovod", marks=pytest.mark.horovod)])
def test_low_precision_is_close_to_float32_and_equal_on_ranks(name: str, precision: str, two: RankPool) -> None:
    """Weights stay in float32, the curve within the precision's reach, the ranks' weights equal bit for bit."""
    wanted = _trained("single", "fp32")
    session.close()
    first, second = two.run(_trained, name, precision)
    assert first["state"] == second["state"]
    assert first["dtypes"] == ["torch.float32"]
    np.testing.assert_allclose(first["losses"], wanted["losses"], rtol=1e-2)
    assert first["losses"] != wanted["losses"]


def _widened(name: str) -> set[torch.dtype]:
    strategy = opened(name, "bf16")
    x = micro(0, 0)[0].float()
    outputs = [placed(strategy, build)(x) for build in (Blocks, Dicts, Records)]
    return {value.dtype for output in outputs for value in tensors(output)}


def test_outputs_come_back_in_float32(two: RankPool) -> None:
    """Whatever structure the model returns, losses are computed from float32."""
    assert _widened("single") == {torch.float32}
    session.close()
    for name in ("ddp", "fsdp"):
        assert two.run(_widened, name) == [{torch.float32}] * 2


def test_an_unknown_precision_names_the_known_ones() -> None:
    """A misspelt precision is an error with the choice."""
    with pytest.raises(ConfigError, match="fp32, fp64, bf16, fp16"):
        Precision.of("bf61")
