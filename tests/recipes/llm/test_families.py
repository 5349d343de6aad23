"""Each family from a folder as transformers writes it into a run's shards, and out again: the same logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import worldsize as ws
from tests.pools import pool
from tests.recipes.llm import folders
from tests.recipes.llm.test_model import FAMILIES
from tests.recipes.llm.test_train import trained
from worldsize.recipes.llm import folder, generate, impl
from worldsize.recipes.llm.config import LLMConfig
from worldsize.recipes.llm.shape import FAMILIES as KNOWN

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {
    "own head": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "own head, sharded": {"tie_word_embeddings": False, "shards": "40KB"},
    "tied, sharded": {"tie_word_embeddings": True, "shards": "40KB"},
}
SPECIAL = {
    name: (family, settings)
    for name, (family, settings) in FAMILIES.items()
    if family != "llama" and settings and "tie_word_embeddings" not in settings
}
"""Of each other family what is special in it; and below each as it is where nothing is said."""
ALL = {**{family: (family, {}) for family in KNOWN}, **SPECIAL}


def pairs(daily: int) -> list[Any]:
    """Each family with each kind; so many kinds of each are looked at every day, others with other families."""
    kinds = list(KINDS)
    return [
        pytest.param(name, kind, marks=() if (at - number) % len(kinds) < daily else pytest.mark.matrix)
        for number, name in enumerate(ALL)
        for at, kind in enumerate(kinds)
    ]


def tokens() -> torch.Tensor:
    """Longer than the windows."""
    return torch.randint(3, 259, (2, 24), generator=torch.Generator().manual_seed(0))


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Float32, within 1e-5 of the largest."""
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=float(1e-5 * wanted.abs().max()))


def placed(model: Path, run_dir: Path, strategy: str) -> torch.Tensor:
    """What a model gives as soon as a run has read its folder, before any step."""
    config = LLMConfig.of({"init_ckpt": str(model), "device": "cpu"})
    run = ws.Run(
        run_dir, global_batch=2, micro_batch=1, duration="1st", strategy=strategy, device="cpu", precision="fp32"
    )
    own = impl.chosen(config, model, CPU)
    assert isinstance(own, impl.Native)
    with torch.no_grad():
        found = own.logits(own.place(run, {}, fresh=False), tokens())
    run.close()
    return found


@pytest.mark.parametrize(("name", "kind"), pairs(2))
def test_a_warm_start_reads_the_folder(tmp_path: Path, name: str, kind: str) -> None:
    """Each rank its shard of the files; all together compute what transformers does, before any step."""
    family, settings = ALL[name]
    model = folders.folder(tmp_path / "model", family, **{**settings, **KINDS[kind]})
    assert (len(list((tmp_path / "model").glob("*.safetensors"))) > 1) == ("sharded" in kind)
    with torch.no_grad():
        wanted = model(tokens()).logits
    for found in pool(2).run(placed, tmp_path / "model", tmp_path / "run", "fsdp"):
        close(found, wanted)


@pytest.mark.parametrize(("name", "kind"), pairs(1))
def test_what_was_trained_is_exported_for_transformers(tmp_path: Path, name: str, kind: str) -> None:
    """It loads it and has the run's logits, which are no more those of the folder that it began from."""
    family, settings = ALL[name]
    before = folders.folder(tmp_path / "model", family, **{**settings, **KINDS[kind]})
    path = folders.lines(tmp_path / "data.jsonl", ({"text": f"{n} and {n + 1}"} for n in range(8)))
    trained(
        {
            "init_ckpt": str(tmp_path / "model"), "data_path": str(path), "cache_dir": str(tmp_path / "cache"), "lr": "1e-2",
            "output_dir": str(tmp_path / "run"), "train_steps": 1, "max_seq_len": 32, "global_batch": 2, "precision": "fp32",
            "device": "cpu", "strategy": "single",
        }
    )  # fmt: skip
    folder.write(str(tmp_path / "run"), tmp_path / "out", dtype="fp32", shard=KINDS[kind].get("shards", "5GB"))
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == ("sharded" in kind)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert theirs.config.tie_word_embeddings == ("own" not in kind)
    with torch.no_grad():
        wanted, old = theirs(tokens()).logits, before(tokens()).logits
        for where in ("run", "out"):
            close(generate.loaded(str(tmp_path / where), CPU)[0](tokens()), wanted)
    assert not torch.allclose(wanted, old, atol=1e-3)
