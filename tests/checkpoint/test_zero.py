from __future__ import annotations

import contextlib
import re
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import worldsize as ws
from tests.pools import pool
from tests.strategies.models import Blocks, TiedBlocks
from worldsize.checkpoint.weights import read_weights
from worldsize.cli.checkpoint import command
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


def _lines(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The weights there, and what is said of them."""
    said: list[str] = []
    return read_weights(path, trust=True, say=said.append), said


def _newer(folder: Path, step: int) -> Path:
    """The same again as of a later step, which is the latest then."""
    copied = shutil.copytree(folder / "global_step2", folder / f"global_step{step}")
    (folder / "latest").write_text(copied.name)
    return copied


def test_an_incomplete_folder_is_skipped_and_named(tmp_path: Path) -> None:
    """Where an older one beside it is whole (B087)."""
    wanted, *_ = pool(2).run(_written, tmp_path, 2, Blocks)
    for step, rank in ((9, 1), (10, 0)):
        (missing,) = _newer(tmp_path, step).glob(f"*pp_rank_{rank}_mp_rank_00_optim_states.pt")
        missing.unlink()
    found, said = _lines(tmp_path)
    assert [line.partition(" is incomplete: ") for line in said[:2]] == [
        (
            f"skipped: {tmp_path / name}",
            " is incomplete: ",
            f"1 of 2 files with optimizer states are missing, none of rank {rank}",
        )
        for name, rank in (("global_step10", 0), ("global_step9", 1))
    ]
    torch.testing.assert_close(found["head.weight"], wanted["head.weight"], rtol=0, atol=0)


def _warmed(folders: list[Path]) -> str:
    """What this rank says to weights of which each sees other files under the same name."""
    with contextlib.chdir(folders[env.read().get("RANK") == "1"]):
        run = ws.Run("run", global_batch=2, micro_batch=1, duration="1st", strategy="ddp", device="cpu")
        try:
            run.warm_start(run.model(Blocks), "theirs", trust=True)
        except CheckpointError as error:
            return str(error)
        finally:
            run.close()
        return "passed"


def test_ranks_never_begin_with_weights_of_two_steps(tmp_path: Path) -> None:
    """Where one host's copy is incomplete, and an older one beside it is whole."""
    hosts = [tmp_path / "a", tmp_path / "b"]
    pool(2).run(_written, hosts[0] / "theirs", 2, Blocks)
    _newer(hosts[0] / "theirs", 9)
    shutil.copytree(hosts[0], hosts[1])
    next((hosts[1] / "theirs" / "global_step9").glob("*optim_states.pt")).unlink()
    for said in pool(2).run(_warmed, hosts):
        assert "ranks do not see the same weights in theirs" in said
        assert "rank 1 skipped: " in said


def test_all_incomplete_folders_are_refused(tmp_path: Path) -> None:
    """With what the latest lacks."""
    pool(2).run(_written, tmp_path, 3, Blocks)
    for folder in (tmp_path / "global_step2", _newer(tmp_path, 4)):
        for missing in folder.glob("*optim_states.pt"):
            missing.unlink()
    with pytest.raises(CheckpointError, match=r"global_step4 is incomplete: 2 of 2 files with optimizer states"):
        read_weights(tmp_path, trust=True)


@pytest.mark.parametrize(
    ("stage", "words"),
    [(0, " stays behind.*on any number"), (2, " of 2 ranks stays behind.*on 2 again, or.*ds_to_universal")],
)
def test_what_stays_behind_is_said(stage: int, words: str, tmp_path: Path) -> None:
    """With who could go on with it, and on how many ranks."""
    pool(2).run(_written, tmp_path, stage, Blocks)
    (said,) = _lines(tmp_path)[1]
    assert re.search(f"the weights alone are taken, the optimizer state{words}", said)


def _begun(folder: Path, source: Path) -> tuple[dict[str, Tensor], list[str]]:
    """A run that begins with these weights, and what it says of them."""
    run = ws.Run(folder, global_batch=4, micro_batch=2, duration="1st", strategy="zero2", device="cpu")
    said: list[str] = []
    vars(run)["say"] = said.append
    model = run.model(Blocks)
    run.warm_start(model, source, trust=True)
    found = run.whole(model)
    run.close()
    return found, said


def test_what_four_ranks_wrote_begins_a_run_on_two(tmp_path: Path) -> None:
    """Weights are read at any size: nothing needs to be refused, and what stays behind is said (B087)."""
    wanted, *_ = pool(4).run(_written, tmp_path / "native", 2, Blocks)
    for found, said in pool(2).run(_begun, tmp_path / "run", tmp_path / "native"):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0)
        assert (
            "the optimizer state of 4 ranks stays behind; DeepSpeed goes on with it on 4 again, or on any number"
            in said[0]
        )


def test_the_command_says_what_stays_behind(tmp_path: Path) -> None:
    """Beside what it wrote."""
    pool(2).run(_written, tmp_path / "native", 1, Blocks)
    done = CliRunner().invoke(
        command, ["import", str(tmp_path / "native"), "--to", str(tmp_path / "w.pt"), "--trust"]
    )
    assert "the optimizer state of 2 ranks stays behind" in done.stderr
    assert (tmp_path / "w.pt").is_file()


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
    said: list[str] = []
    found = read_weights(tmp_path / "universal", names=wanted.keys(), trust=True, say=said.append)
    assert "stays behind; DeepSpeed goes on with it with load_universal on any number of ranks" in said[0]
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)
    shutil.rmtree(tmp_path / "universal" / "zero")
