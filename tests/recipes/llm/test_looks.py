"""What is learnt, looked at: generation inside a run, and the end of a text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.recipes.llm import folders
from tests.recipes.llm.test_train import curve
from worldsize.errors import ConfigError, DataError
from worldsize.recipes.llm import generate, losses
from worldsize.recipes.llm.config import LLMConfig

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
TEXT = "ab ab ab"
END = 2


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One short text that is learnt by heart."""
    place = tmp_path_factory.mktemp("looks")
    folders.folder(place / "model", num_hidden_layers=2)
    path = folders.lines(place / "data.jsonl", ({"text": TEXT} for _ in range(40)))
    (place / "prompts.txt").write_text("ab\n\nab ab\nb\n", encoding="utf-8")
    return {
        "init_ckpt": str(place / "model"), "data_path": str(path), "cache_dir": str(place / "cache"), "max_seq_len": 16,
        "global_batch": 4, "train_steps": 12, "precision": "fp64", "lr": "2e-2", "device": "cpu",
        "generate_steps": 8, "generate_prompts": str(place / "prompts.txt"), "generate_tokens": 8,
    }  # fmt: skip


def seen(folder: Path) -> list[tuple[int, str, str]]:
    """What a run wrote down of its looks."""
    rows = [json.loads(line) for line in (folder / generate.SEEN).read_text(encoding="utf-8").splitlines()]
    return [(row["step"], row["prompt"], row["text"]) for row in rows]


@pytest.fixture(scope="module")
def run(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one process."""
    folder = tmp_path_factory.mktemp("run")
    curve(folder, given, "single:1")
    return folder


def test_a_run_shows_what_it_has_learnt(run: Path) -> None:
    """At its steps and at the end, each prompt of the file; at last what `llm generate` gives, up to the end token."""
    found = seen(run)
    assert [(step, prompt) for step, prompt, _ in found] == [
        (step, prompt) for step in (8, 12) for prompt in ("ab", "ab ab", "b")
    ]
    for _, prompt, text in found[3:]:
        assert generate.written(str(run), prompt, 8, temperature=0, seed=0, chat=False) == text
    assert found[4][2] == " ab"


@pytest.mark.parametrize("layout", ["fsdp:2", "pp2:2", "cp2:2", *(pytest.param(each, marks=pytest.mark.matrix) for each in (
    "ddp:2", "tp2:2", "zero3:2"))])  # fmt: skip
def test_every_layout_shows_the_same(tmp_path: Path, given: dict[str, Any], run: Path, layout: str) -> None:
    """Ranks share three prompts, or work on each together."""
    curve(tmp_path, given, layout)
    assert seen(tmp_path) == seen(run)


def test_the_end_token_is_learnt(run: Path, given: dict[str, Any]) -> None:
    """Its own loss falls (B072)."""
    tokenizer = folders.tokenizer()
    tokens = torch.tensor([tokenizer(TEXT)["input_ids"] + [END]])
    ends = []
    for where in (given["init_ckpt"], str(run)):
        logits, _ = generate.loaded(where, CPU)
        with torch.no_grad():
            ends.append(losses.of_logits(logits(tokens[:, :-1]), tokens[:, 1:])[0, -1].item())
    assert ends[1] < ends[0] / 4


def test_looks_need_prompts() -> None:
    """Said at the start."""
    with pytest.raises(ConfigError, match="generate_steps without generate_prompts"):
        LLMConfig.of({"generate_steps": "5"})


def test_prompts_are_lines_as_editors_see_them(tmp_path: Path) -> None:
    """Characters that only Python takes for the end of a line are a part of it, and the mark that Windows writes is none."""
    (tmp_path / "p.txt").write_bytes("\ufeffa\u2028b\r\n\r\nc\x0cd\n".encode())
    assert generate.prompts(str(tmp_path / "p.txt")) == ["a\u2028b", "c\x0cd"]
    assert generate.prompts("many words " * 100) == ["many words " * 100]


@pytest.mark.parametrize(("content", "found"), [(b"caf\xe9\n", "not UTF-8"), (b"\n \n", "no prompt")])
def test_a_file_without_prompts_is_said(tmp_path: Path, content: bytes, found: str) -> None:
    """Before the training, and not at its first look."""
    (tmp_path / "p.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"p\.txt .*{found}"):
        generate.Looks(str(tmp_path / "p.txt"), 4, folders.tokenizer(), tmp_path)
