from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.pools import pool
from tests.strategies.models import Blocks, TiedBlocks
from worldsize.checkpoint.weights import read_weights
from worldsize.errors import CheckpointError
from worldsize.runtime import env, session
from worldsize.strategies.deepspeed import strategy

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


def _written(folder: Path, stage: int, build: type[nn.Module]) -> dict[str, Tensor]:
    """DeepSpeed's own checkpoint after two steps of a program that knows nothing of us. Returns the weights then."""
    here = session.session("cpu")
    here.need_group()
    deepspeed: Any = strategy._join(here)
    torch.manual_seed(1)
    model = build()
    groups = [{"params": [v for v in model.parameters() if (v.dim() > 1) is wide]} for wide in (True, False)]
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_batch_size": 2 * here.world.size, "zero_optimization": zero}
    with env.lent({"LOCAL_RANK": "0", "RANK": str(here.world.rank), "WORLD_SIZE": str(here.world.size)}):
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, 0.01), config=config)
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 6)).square().sum())
        engine.step()
    engine.save_checkpoint(str(folder))
    found = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([value], enabled=stage == 3):
            found[name] = value.detach().clone()
    return found


@pytest.mark.parametrize("build", [Blocks, TiedBlocks])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_deepspeed_wrote_is_read_in_one_process(
    ranks: int, stage: int, build: type[nn.Module], tmp_path: Path
) -> None:
    """Every parameter under its name, whatever the stage and the number of ranks that wrote (B087)."""
    wanted, *_ = pool(ranks).run(_written, tmp_path, stage, build)
    found = read_weights(tmp_path, names=wanted.keys(), trust=True)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def test_a_rank_whose_file_is_missing_is_named_at_once(tmp_path: Path) -> None:
    """Before anything is put together (B087)."""
    pool(2).run(_written, tmp_path, 2, Blocks)
    (missing,) = tmp_path.glob("global_step2/*pp_rank_1_mp_rank_00_optim_states.pt")
    missing.unlink()
    began = time.monotonic()
    with pytest.raises(
        CheckpointError, match=r"1 of 2 files with optimizer states are missing. Found: none of rank 1\."
    ):
        read_weights(tmp_path, trust=True)
    assert time.monotonic() - began < 1


def test_reading_asks_for_trust(tmp_path: Path) -> None:
    """DeepSpeed's files are pickles of its own objects."""
    pool(2).run(_written, tmp_path, 1, Blocks)
    with pytest.raises(CheckpointError, match="--trust"):
        read_weights(tmp_path)


def _universal(native: Path, target: Path) -> None:
    from argparse import Namespace

    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        Namespace(
            input_folder=str(native), output_folder=str(target), num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=True, inject_missing_state=True,
        )
    )  # fmt: skip


@pytest.mark.parametrize("stage", [2, 3])
def test_universal_checkpoints_are_read(stage: int, tmp_path: Path) -> None:
    """As DeepSpeed's own converter makes them."""
    wanted, *_ = pool(2).run(_written, tmp_path / "native", stage, Blocks)
    pool(1).run(_universal, tmp_path / "native" / "global_step2", tmp_path / "universal")
    found = read_weights(tmp_path / "universal", names=wanted.keys(), trust=True)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)
    shutil.rmtree(tmp_path / "universal" / "zero")
