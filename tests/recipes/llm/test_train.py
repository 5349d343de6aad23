"""The recipe's training is one curve on every layout, and goes on from any to any."""

from __future__ import annotations

import functools
import json
import math
import re
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from torch.distributed.fsdp import fully_shard

from tests.integration.program import may_stop
from tests.pools import pool
from tests.recipes.llm import folders
from worldsize.errors import ConfigError, DataError
from worldsize.recipes.llm import data
from worldsize.recipes.llm.config import LLMConfig
from worldsize.recipes.llm.train import train
from worldsize.runtime import session
from worldsize.tools.trial import Layout

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from worldsize.data.tokens import Document

SIZES = {
    "tp": "model_parallel_size",
    "pp": "pipe_parallel_size",
    "cp": "context_parallel_size",
    "schedule": "schedule",
}
STEPS = 6


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model, chats of very different lengths, and the settings that are the same for all."""
    folder = tmp_path_factory.mktemp("llama")
    folders.folder(folder / "model", num_hidden_layers=4)
    folders.lines(
        folder / "data.jsonl",
        ({"prompt": f"{number} and {number + 1}?", "completion": " y" * (1 + number % 7)} for number in range(60)),
    )
    return {
        "init_ckpt": str(folder / "model"), "data_path": str(folder / "data.jsonl"), "cache_dir": str(folder / "cache"),
        "max_seq_len": 32, "global_batch": 8, "micro_batch": 2, "train_steps": STEPS, "precision": "fp64", "lr": "1e-2",
        "warmup_steps": 2, "device": "cpu",
    }  # fmt: skip


def trained(settings: dict[str, Any]) -> None:
    """The training, on this rank."""
    with may_stop():
        train(LLMConfig.of(settings))


def trained_after(settings: dict[str, Any], takes: float, limit: float) -> float:
    """The training where tokens take so many seconds and a collective so many at most; how long this rank made tokens."""
    plain, made = data.FromLines.documents, [0.0]

    def slow(self: data.FromLines) -> Iterable[Document]:
        made[0] = takes
        time.sleep(takes)
        return plain(self)

    session.session("cpu", timedelta(seconds=limit))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.FromLines, "documents", slow)
        trained(settings)
    return made[0]


def curve(folder: Path, given: dict[str, Any], layout: str, **more: Any) -> dict[int, tuple[float, float]]:
    """Train under a layout: the loss and the norm of each step, by the run's own numbers."""
    laid = Layout.parse(layout)
    how = {SIZES[name]: value for name, value in laid.axes}
    settings = {**given, **how, "output_dir": str(folder), "strategy": laid.strategy or None, **more}
    pool(laid.ranks).run(trained, settings)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "loss" in row}


@pytest.fixture(scope="module")
def alone(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[float, float]]:
    """What one process does."""
    return curve(tmp_path_factory.mktemp("alone"), given, "single:1")


def same(found: dict[int, tuple[float, float]], wanted: dict[int, tuple[float, float]]) -> None:
    """Relatively within 1e-10."""
    assert found.keys() == wanted.keys()
    for step, numbers in wanted.items():
        assert found[step] == pytest.approx(numbers, rel=1e-10)


@pytest.mark.parametrize("layout", ["ddp:2", "fsdp:2", "tp2:2", "pp2:2", "zero3:2"])
def test_every_layout_has_one_curve(
    tmp_path: Path, given: dict[str, Any], alone: dict[int, tuple[float, float]], layout: str
) -> None:
    """float64, packed rows, exact weighting of tokens (B070)."""
    same(curve(tmp_path, given, layout), alone)


@pytest.mark.parametrize("layout", ["single:1", "ddp:2", "pp2:2"])
@pytest.mark.parametrize("micro", [1, 4])
def test_micro_batches_do_not_weigh(
    tmp_path: Path, given: dict[str, Any], alone: dict[int, tuple[float, float]], layout: str, micro: int
) -> None:
    """Of the 8 rows of a step, whose tokens differ, each token counts once, however many share a pass (B070)."""
    same(curve(tmp_path, given, layout, micro_batch=micro), alone)


@pytest.mark.parametrize("layout", ["single:1", "ddp:2"])
def test_micro_batches_of_very_different_rows_do_not_weigh(
    tmp_path: Path, given: dict[str, Any], layout: str
) -> None:
    """Nor where each row is one sample, some with four times the tokens of others."""
    rows = {**given, "packing": "false", "train_steps": 3}
    same(
        curve(tmp_path / "one", rows, layout, micro_batch=1), curve(tmp_path / "all", rows, "single:1", micro_batch=8)
    )


def test_parts_of_a_sequence_have_the_curve_of_rows_of_one_sample(tmp_path: Path, given: dict[str, Any]) -> None:
    """Context parallel does not pack: each position must know where it stands."""
    wanted = curve(tmp_path / "alone", given, "single:1", packing="false")
    same(curve(tmp_path / "parts", given, "cp2:2"), wanted)


@pytest.mark.parametrize(
    "layout", ["fsdp+tp2+pp2:8", "ddp+tp2:4", "fsdp+pp2:4", "tp2+pp2:4", *(f"pp2+schedule={name}:2" for name in (
        "gpipe", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble"))],
)  # fmt: skip
@pytest.mark.matrix
def test_more_layouts_have_it_too(
    tmp_path: Path, given: dict[str, Any], alone: dict[int, tuple[float, float]], layout: str
) -> None:
    """Axes together, and other orders of a pipeline."""
    same(curve(tmp_path, given, layout), alone)


@pytest.mark.parametrize("off", ["packing", "use_fused_ops", "use_flash_attn"])
def test_flags_change_the_way_and_not_the_numbers(
    tmp_path: Path, given: dict[str, Any], alone: dict[int, tuple[float, float]], off: str
) -> None:
    """Kernels and fusions compute the same; rows of one sample are other rows."""
    found = curve(tmp_path, given, "single:1", **{off: "false"})
    if off == "packing":
        assert found != alone
    else:
        same(found, alone)


@pytest.mark.parametrize(("said", "freed"), [("false", 0), ("0.5", 2), ("true", 4)])
def test_weights_may_stay_whole_until_the_backward_pass(
    tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, said: str, freed: int
) -> None:
    """`--reshard` reaches the wrapper: of four layers the first are freed."""
    seen: list[bool] = []
    plain = fully_shard

    @functools.wraps(plain)  # it carries more than its call
    def noted(*of: Any, **how: Any) -> Any:
        seen.extend([how["reshard_after_forward"]] if "reshard_after_forward" in how else ())
        return plain(*of, **how)

    monkeypatch.setattr("worldsize.strategies.fsdp.fully_shard", noted)
    trained({**given, "output_dir": str(tmp_path), "strategy": "fsdp", "reshard": said, "train_steps": 1})
    assert seen == [True] * freed + [False] * (4 - freed)


def test_it_goes_on_elsewhere_inside_an_epoch(tmp_path: Path, given: dict[str, Any]) -> None:
    """Two copies, then two tensor parts, then two stages: one curve."""
    found: dict[int, tuple[float, float]] = {}
    for steps, layout in ((2, "ddp:2"), (4, "tp2:2"), (STEPS, "pp2:2")):
        found |= curve(tmp_path, given, layout, lr_schedule="constant", train_steps=steps)
    whole = curve(tmp_path / "whole", given, "single:1", lr_schedule="constant")
    same(found, whole)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "chain", [("fsdp:2", "zero3:2", "fsdp+tp2+pp2:8"), ("fsdp+tp2+pp2:8", "fsdp:4", "single:1"), ("zero3:2", "tp2:2", "fsdp:2")]
)  # fmt: skip
def test_it_goes_on_from_any_to_any(tmp_path: Path, given: dict[str, Any], chain: tuple[str, ...]) -> None:
    """Two steps on each: shards, partitions of ZeRO, tensor parts and stages, on two, four and eight ranks: one curve."""
    found: dict[int, tuple[float, float]] = {}
    for steps, layout in zip((2, 4, STEPS), chain, strict=True):
        found |= curve(tmp_path / "run", given, layout, lr_schedule="constant", train_steps=steps)
    same(found, curve(tmp_path / "whole", given, "single:1", lr_schedule="constant"))


@pytest.mark.parametrize(
    "chain", [("fsdp:2", "ddp:2"), pytest.param(("ddp:2", "tp2:2"), marks=pytest.mark.matrix), pytest.param(
        ("fsdp+pp2:4", "fsdp:2"), marks=pytest.mark.matrix)],
)  # fmt: skip
def test_adapters_go_on_elsewhere_too(tmp_path: Path, given: dict[str, Any], chain: tuple[str, ...]) -> None:
    """What is trained and what is frozen, each from the other's shards."""
    how = {"lora_rank": 4, "lr_schedule": "constant"}
    found: dict[int, tuple[float, float]] = {}
    for steps, layout in zip((3, STEPS), chain, strict=True):
        found |= curve(tmp_path / "run", given, layout, train_steps=steps, **how)
    same(found, curve(tmp_path / "whole", given, "single:1", **how))


@pytest.fixture(scope="module")
def flat(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A pre-training on folders of token files, of 22 rows, with others to evaluate on."""
    place, draw = tmp_path_factory.mktemp("flat"), np.random.default_rng(0)
    for name, sizes in {"train": (400, 330), "kept": (90,)}.items():
        (place / name).mkdir()
        for number, size in enumerate(sizes):
            values = (np.arange(size) * (number + 1) % 7 + draw.integers(3, 6, size)).astype(np.uint16)
            if number:
                values.tofile(place / name / f"{number}.bin")
            else:
                np.save(place / name / f"{number}.npy", values)
    places = {"data_path": str(place / "train"), "eval_data": str(place / "kept"), "eval_steps": 3}
    return {**given, **places, "from_scratch": "true", "lr_schedule": "constant"}


def scores(run: Path) -> dict[int, float]:
    """Evaluation losses by step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}


@pytest.mark.parametrize(
    "chain", [("ddp:2", "fsdp:2"), pytest.param(("tp2:2", "pp2:2"), marks=pytest.mark.matrix)], ids=str
)
def test_token_files_are_trained_on_and_gone_on_with(
    tmp_path: Path, flat: dict[str, Any], chain: tuple[str, ...]
) -> None:
    """From fresh weights, on two ranks, gone on with elsewhere inside of an epoch: the curve and evaluation of one."""
    found: dict[int, tuple[float, float]] = {}
    for steps, layout in zip((2, 5), chain, strict=True):
        found |= curve(tmp_path / "run", flat, layout, train_steps=steps)
    same(found, curve(tmp_path / "whole", flat, "single:1", train_steps=5))
    wanted = scores(tmp_path / "whole")
    assert sorted(wanted) == [2, 4]
    assert {step: scores(tmp_path / "run")[step] for step in wanted} == pytest.approx(wanted, rel=1e-10)


def test_tokens_may_take_longer_than_a_collective(tmp_path: Path, given: dict[str, Any]) -> None:
    """One rank makes them, and the other does not wait in a collective: that would be over before they are."""
    settings = {**given, "cache_dir": str(tmp_path / "cache"), "output_dir": str(tmp_path / "run"), "train_steps": 1}
    made = pool(2).run(trained_after, {**settings, "strategy": "ddp"}, takes=6.0, limit=4.0)
    assert sorted(made) == [0.0, 6.0]


def test_evaluation_is_over_tokens(tmp_path: Path, given: dict[str, Any]) -> None:
    """The same on one rank and on two, at its steps and at the end."""
    scores = []
    for layout in ("single:1", "ddp:2"):
        curve(tmp_path / layout, given, layout, eval_share="0.2", eval_steps="4", max_seq_len="16")
        rows = [json.loads(line) for line in (tmp_path / layout / "metrics.jsonl").read_text().splitlines()]
        scores.append({row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row})
    assert sorted(scores[0]) == [3, STEPS - 1]
    assert scores[0] == pytest.approx(scores[1], rel=1e-10)


def test_an_evaluation_of_nothing_said_is_over_rows_kept_back(
    tmp_path: Path, given: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """As with the seed's flags, which name no data for it. Said with their number."""
    settings = {**given, "output_dir": str(tmp_path), "strategy": "single", "eval_steps": "2", "train_steps": "2"}
    assert math.isfinite(train(LLMConfig.of(settings))["eval_loss"])
    assert re.search(r"eval_steps without eval_data: 1 of \d+ rows are kept back", capsys.readouterr().out)


@pytest.mark.parametrize(("first", "second"), [({"eval_steps": "2"}, {}), ({}, {"eval_steps": "2"})])
def test_an_evaluation_may_come_and_go(
    tmp_path: Path, given: dict[str, Any], first: dict[str, str], second: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """What is trained on stays what the run began with."""
    settings = {**given, "output_dir": str(tmp_path), "strategy": "single"}
    train(LLMConfig.of({**settings, **first, "train_steps": "2"}))
    found = train(LLMConfig.of({**settings, **second, "train_steps": "4"}))
    assert found["step"] == 4
    assert ("this run began without rows kept back" in capsys.readouterr().out) is bool(second)


def test_one_row_is_not_evaluated_on(tmp_path: Path, given: dict[str, Any]) -> None:
    """Nor silently left out."""
    (tmp_path / "one.jsonl").write_text('{"text": "a b c"}\n', encoding="utf-8")
    settings = {
        **given,
        "data_path": str(tmp_path / "one.jsonl"),
        "output_dir": str(tmp_path / "run"),
        "eval_steps": 1,
    }
    with pytest.raises(DataError, match=r"leaves none to evaluate on. Found: 1 rows"):
        train(LLMConfig.of({**settings, "strategy": "single"}))


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["tp2:2", "fsdp+tp2:4", "cp2+tp2:4"])
@pytest.mark.parametrize("off", ["sequence_parallel", "use_fused_ops", "packing"])
def test_tensor_ranks_have_the_curve_in_every_way(
    tmp_path: Path, given: dict[str, Any], layout: str, off: str
) -> None:
    """Rows and vocabulary in parts or whole; rows of any length are padded to parts."""
    more = {off: "false", **({"packing": "false"} if "cp" in layout else {})}
    same(curve(tmp_path / "parts", given, layout, **more), curve(tmp_path / "alone", given, "single:1", **more))


@pytest.mark.parametrize(("share", "found"), [("1", "none to train on"), ("0.001", "none to evaluate on")])
def test_a_share_that_leaves_no_rows_is_refused(
    tmp_path: Path, given: dict[str, Any], share: str, found: str
) -> None:
    """Neither a training without rows, nor one that is never evaluated though that was asked for."""
    settings = {**given, "output_dir": str(tmp_path), "strategy": "single", "eval_share": share, "eval_steps": 1}
    with pytest.raises(DataError, match=rf"eval_share {share}.* {found}"):
        train(LLMConfig.of(settings))


def test_no_epochs_are_no_training() -> None:
    """Nought is not taken for one, and many are not rounded."""
    with pytest.raises(ConfigError, match="epochs is below 1"):
        LLMConfig.of({"epochs": "0"})
    assert [LLMConfig.of({"epochs": each}).duration for each in ("2", "3.0", "1234567")] == [
        "2ep",
        "3ep",
        "1234567ep",
    ]
    assert LLMConfig.of({}).duration == "1ep"
