"""What is measured before the first step: the least recomputation and the largest micro-batch that fit, without a trace."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.pools import pool
from tests.recipes.llm import folders
from tests.recipes.llm.test_train import curve, same
from worldsize.errors import ConfigError, OutOfMemoryError
from worldsize.recipes.llm import fitting
from worldsize.recipes.llm.config import LLMConfig
from worldsize.recipes.llm.train import train

if TYPE_CHECKING:
    from pathlib import Path

LIMITS = {"5MiB": "full", "8MiB": "selective", "12MiB": "none"}
"""With so much memory so much must be computed again, in rows of 192 tokens, two at a time."""


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model, rows that are much larger than it, and settings."""
    folder = tmp_path_factory.mktemp("llama")
    folders.folder(folder / "model", num_hidden_layers=4)
    folders.lines(folder / "data.jsonl", ({"text": f"{n} and {n + 1} " * (20 + n % 30)} for n in range(60)))
    return {
        "init_ckpt": str(folder / "model"), "data_path": str(folder / "data.jsonl"), "cache_dir": str(folder / "cache"),
        "max_seq_len": 192, "global_batch": 8, "micro_batch": 2, "train_steps": 2, "precision": "fp64", "device": "cpu",
        "lr_schedule": "constant",
    }  # fmt: skip


@pytest.fixture(scope="module")
def plain(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[float, float]]:
    """The curve without any of it."""
    return curve(tmp_path_factory.mktemp("plain"), given, "single:1")


def settled(folder: Path) -> dict[str, Any]:
    """What run.json says was settled."""
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())["settled"][fitting.NAME]
    return found


@pytest.mark.parametrize(
    ("layout", "limit"),
    [
        *(pytest.param("single:1", limit, marks=pytest.mark.matrix) for limit in ("5MiB", "12MiB")),
        ("single:1", "8MiB"),
        *(pytest.param(layout, limit, marks=pytest.mark.matrix) for limit in LIMITS for layout in (
            "ddp:2", "fsdp:2", "hsdp:2", "tp2:2", "fsdp+tp2:4")),
    ],
)  # fmt: skip
def test_the_least_that_fits_is_taken_and_is_the_same_training(
    tmp_path: Path, given: dict[str, Any], plain: dict[int, tuple[float, float]], layout: str, limit: str
) -> None:
    """As measured: trials from the least on, up to what fits; parameters, order and random numbers as without trials."""
    found = curve(tmp_path, given, layout, activation_checkpointing="auto", memory_limit=limit)
    same(found, plain)
    needs = list(settled(tmp_path)["needs"].values())
    if layout in ("single:1", "ddp:2"):
        assert settled(tmp_path)["activation_checkpointing"] == LIMITS[limit]
    assert needs == sorted(needs, reverse=True)
    assert [need <= settled(tmp_path)["limit"] for need in needs] == [False] * (len(needs) - 1) + [True]


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["selective", "selective:2", "full"])
@pytest.mark.parametrize("layout", ["single:1", "ddp:2", "fsdp:2", "tp2:2", "pp2:2", "fsdp+tp2:4"])
def test_every_mode_has_one_curve_on_every_layout(
    tmp_path: Path, given: dict[str, Any], plain: dict[int, tuple[float, float]], layout: str, mode: str
) -> None:
    """float64; under a pipeline too, where a mode is named."""
    same(curve(tmp_path, given, layout, activation_checkpointing=mode), plain)


@pytest.mark.matrix
def test_where_nothing_fits_the_numbers_are_said(tmp_path: Path, given: dict[str, Any]) -> None:
    """Before anything was trained."""
    with pytest.raises(OutOfMemoryError, match=r"full x 2: \d\.\d\d MiB; limit 1\.00 MiB a rank"):
        curve(tmp_path, given, "single:1", activation_checkpointing="auto", memory_limit="1MiB")


@pytest.mark.matrix
def test_a_micro_batch_is_measured_once(tmp_path: Path, given: dict[str, Any]) -> None:
    """The largest that fits; two ranks go on with it, and measure recomputation anew."""
    auto = {"micro_batch": "auto", "activation_checkpointing": "auto", "memory_limit": "12MiB"}
    first = curve(tmp_path, given, "single:1", train_steps=1, **auto)
    assert {"micro_batch": 2, "activation_checkpointing": "none"}.items() <= settled(tmp_path).items()
    assert set(settled(tmp_path)["needs"]) == {"none x 1", "none x 2"}
    second = curve(tmp_path, given, "ddp:2", **{**auto, "memory_limit": "8MiB"})
    assert {"micro_batch": 2, "activation_checkpointing": "selective"}.items() <= settled(tmp_path).items()
    assert set(settled(tmp_path)["needs"]) == {"none x 2", "selective x 2"}
    assert [*first, *second] == [0, 0, 1]
    assert json.loads((tmp_path / "run.json").read_text())["config"]["micro_batch"] == 2


@pytest.mark.matrix
def test_a_resumed_run_measures_nothing_unless_it_must(tmp_path: Path, given: dict[str, Any]) -> None:
    """The same layout takes what was found; ranks that cannot share the micro-batch out measure another one."""
    auto = {"micro_batch": "auto", "activation_checkpointing": "auto", "memory_limit": "22MiB"}
    curve(tmp_path, given, "single:1", train_steps=1, **auto)
    before = settled(tmp_path)
    assert before["micro_batch"] == 4
    curve(tmp_path, given, "single:1", train_steps=2, **auto)
    assert settled(tmp_path) == before
    curve(tmp_path, given, "ddp:4", train_steps=3, **auto)
    assert settled(tmp_path)["micro_batch"] == 2
    config = json.loads((tmp_path / "run.json").read_text())["config"]
    assert (config["micro_batch"], config["global_batch"]) == (2, 8)


def tight(settings: dict[str, Any]) -> None:
    """The training, with so little memory on the last rank only."""
    import worldsize as ws
    from worldsize.recipes.llm import measure

    given = measure.Host.limit
    if ws.here().rank == 1:
        measure.Host.limit = lambda *_: 5 * 2**20  # type: ignore[method-assign]
    try:
        train(LLMConfig.of(settings))
    finally:
        measure.Host.limit = given  # type: ignore[method-assign]


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_rank_with_least_decides(tmp_path: Path, given: dict[str, Any], strategy: str) -> None:
    """All take what fits it."""
    more = {
        "activation_checkpointing": "auto",
        "memory_limit": "1GiB",
        "strategy": strategy,
        "output_dir": str(tmp_path),
    }
    pool(2).run(tight, {**given, **more})
    assert settled(tmp_path)["activation_checkpointing"] == "full"


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["single:1", "fsdp:2"])
def test_compiled_layers_are_measured_too(
    tmp_path: Path, given: dict[str, Any], plain: dict[int, tuple[float, float]], layout: str
) -> None:
    """And trained as was found."""
    same(curve(tmp_path, given, layout, activation_checkpointing="auto", memory_limit="8MiB", compile="true"), plain)


@pytest.mark.parametrize(
    ("batch", "shares", "found"),
    [
        (8, 1, [1, 2, 4, 8]),
        (8, 2, [1, 2, 4]),
        (12, 2, [1, 2, 3, 6]),
        (8, 3, [1, 2]),
        (96, 16, [1, 2, 3, 6]),
        (2, 4, [1]),
    ],
)
def test_micro_batches_cut_a_step_into_whole_ones(batch: int, shares: int, found: list[int]) -> None:
    """As many for each share, where the batch can be shared out evenly."""
    assert fitting.sizes(batch, shares) == found


@pytest.mark.parametrize("more", [{"pipe_parallel_size": 2}, {"strategy": "zero3"}, {"strategy": "horovod"}])
@pytest.mark.parametrize("name", ["micro_batch", "activation_checkpointing"])
def test_what_cannot_be_measured_is_refused(name: str, more: dict[str, Any]) -> None:
    """With what to do instead."""
    with pytest.raises(ConfigError, match=f"{name}=auto is measured under single.*Do: say what {name} shall be"):
        LLMConfig.of({name: "auto", **more})
