"""Room: what we write for DeepSpeed, loaded by DeepSpeed itself."""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.states import path_of
from tests.checkpoint.trained import Net, make, trained
from worldsize.checkpoint import export, universal
from worldsize.checkpoint.export import Weights
from worldsize.checkpoint.opened import Opened
from worldsize.errors import CheckpointError, ConfigError
from worldsize.testing.ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

STAGES = (1, 2, 3)


def weights(path: Path) -> Weights:
    """Those of the only model."""
    return Weights.choose(Opened(path), None, None, average=False)


def load(folder: Path, stage: int) -> dict[str, dict[str, Tensor]]:
    """Load into an engine of DeepSpeed. Returns what it holds of each parameter, and of its groups."""
    deepspeed, utils = (import_module(name) for name in ("deepspeed", "deepspeed.utils"))
    net = Net()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": True},
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=make(net), config=config, dist_init_required=False)
    engine.load_checkpoint(str(folder))
    found: dict[str, dict[str, Tensor]] = {}
    own = {name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad}
    for name, parameter in own.items():
        states = {
            key: utils.safe_get_full_optimizer_state(parameter, key).clone() for key in ("exp_avg", "exp_avg_sq")
        }
        found[name] = {"fp32": utils.safe_get_full_fp32_param(parameter).clone(), **states}
    found["groups"] = {"lr": torch.tensor([group["lr"] for group in engine.optimizer.optimizer.param_groups])}
    found["groups"]["steps"] = torch.tensor(engine.global_steps)
    return found


def load_all(folder: Path) -> list[dict[str, dict[str, Tensor]]]:
    """Every stage, one after the other, on these ranks."""
    from worldsize.runtime import session

    session.session("cpu")
    if not dist.is_initialized():  # one rank needs no group of its own
        dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=0, world_size=1)
    # It would be compiled, and wait for ever behind the lock of a process that was killed while it did.
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    import_module("deepspeed").init_distributed("gloo")
    return [load(folder, stage) for stage in STAGES]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of fsdp on two ranks, and its universal checkpoint."""
    folder = tmp_path_factory.mktemp("universal")
    trained(folder / "run", "fsdp")
    universal.deepspeed(weights(path_of(folder / "run", 4)), folder / "ds")
    return path_of(folder / "run", 4), folder / "ds"


@pytest.mark.parametrize("ranks", [1, 2])
def test_deepspeed_loads_it(exported: tuple[Path, Path], ranks: int) -> None:
    """ZeRO 1, 2 and 3 on one and two ranks hold the weights and the optimizer's state that our run had, bit for bit."""
    path, folder = exported
    opened = Opened(path)
    for answers in run_ranks(load_all, ranks, folder, timeout=300):
        for found in answers:
            groups = found.pop("groups")
            assert groups["lr"].tolist() == pytest.approx([1e-4, 1e-4])
            assert groups["steps"] == 4
            assert {"emb.weight", "emb.bias", "norm.weight", "norm.bias", "out.weight"} == found.keys()
            for name, held in found.items():
                assert torch.equal(held["fp32"], opened.tensor(f"model/net/{name}"))
                for key in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(held[key], opened.tensor(f"optim/0/net.{name}/{key}"))


def test_what_deepspeed_does_not_restore_is_there(exported: tuple[Path, Path]) -> None:
    """Buffers and frozen parameters lie in the file of model states, beside the progress and the schedule."""
    path, folder = exported
    states = torch.load(folder / "step-00000004" / "mp_rank_00_model_states.pt", weights_only=True)
    assert set(states["module"]) == {
        "frozen.weight", "frozen.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
    }  # fmt: skip
    assert torch.equal(states["module"]["norm.running_var"], Opened(path).tensor("model/net/norm.running_var"))
    assert (states["global_steps"], states["global_samples"]) == (4, 32)
    assert states["lr_scheduler"]["step_size"] == 2
    assert states["lr_scheduler"]["last_epoch"] == 4


def test_steps_that_differ_are_refused(exported: tuple[Path, Path], tmp_path: Path) -> None:
    """DeepSpeed has one number of steps for a group: a training that has several is not bent to fit."""
    chosen = weights(exported[0])
    slots = chosen.opened.train["optim"]["0"]["slots"]
    before = json.dumps(slots)
    slots["net.emb.weight"]["pairs"][0] = ["step", 3]
    try:
        with pytest.raises(CheckpointError, match="one number of steps"):
            universal.deepspeed(chosen, tmp_path / "ds")
    finally:
        slots.update(json.loads(before))
    assert list(tmp_path.iterdir()) == []


def test_several_optimizers_are_refused(exported: tuple[Path, Path], tmp_path: Path) -> None:
    """DeepSpeed has one optimizer."""
    chosen = weights(exported[0])
    chosen.opened.train["optim"]["1"] = chosen.opened.train["optim"]["0"]
    with pytest.raises(ConfigError, match="not just one optimizer"):
        export.torch_file(chosen, tmp_path / "x.pt", optimizer=True)
    with pytest.raises(ConfigError, match="not just one optimizer"):
        universal.deepspeed(chosen, tmp_path / "ds")
