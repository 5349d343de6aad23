from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recipes.llm import folders
from tests.recipes.llm.packed import sample_losses
from worldsize.errors import DataError
from worldsize.recipes.llm import data, shape
from worldsize.recipes.llm.losses import IGNORED
from worldsize.recipes.llm.model import Decoder

if TYPE_CHECKING:
    from collections.abc import Iterable

    from worldsize.data.tokens import Document

LETTERS = st.text("abcdefgh", max_size=40)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one."""
    folder = tmp_path_factory.mktemp("tokenizer")
    folders.tokenizer().save_pretrained(folder)
    return folder


def rows(path: Path, tokenizer: Path, cache: Path, said: list[str] | None = None, **wanted: Any) -> Any:
    """The rows of a file."""
    say = (lambda _: None) if said is None else said.append
    return data.rows_of(path, tokenizer, data.Wanted(**wanted), vocabulary=264, cache=cache, say=say)


def targets(found: Any) -> list[int]:
    """All labels that count, in any order."""
    return sorted(int(label) for row in found for label in row["labels"] if label != IGNORED)


@settings(max_examples=30)
@given(st.lists(st.tuples(LETTERS, LETTERS), min_size=1, max_size=12), st.integers(4, 64))
def test_packed_or_not_the_same_is_learnt(tokenizer: Path, pairs: list[tuple[str, str]], length: int) -> None:
    """The same labels after the same tokens at the same positions, whatever shares a row."""
    with tempfile.TemporaryDirectory() as folder:
        records = [{"prompt": f"p{prompt}"[: length // 2], "completion": completion} for prompt, completion in pairs]
        path = folders.lines(Path(folder) / "d.jsonl", records)
        seen = []
        for packed in (True, False):
            found = rows(path, tokenizer, Path(folder) / "cache", length=length, packed=packed)
            names = ("tokens", "labels", "position_ids")
            each = [
                tuple(map(int, triple))
                for row in found
                for triple in zip(*(row[name] for name in names), strict=True)
            ]
            seen.append(sorted(each))
            assert all(len(row["tokens"]) <= length for row in found)
        assert seen[0] == seen[1]


@settings(max_examples=30)
@given(st.lists(LETTERS, min_size=1, max_size=12), st.integers(1, 16))
def test_a_long_text_is_learnt_in_pieces(tokenizer: Path, texts: list[str], length: int) -> None:
    """Each of its tokens but the first is a label, once."""
    with tempfile.TemporaryDirectory() as folder:
        path = folders.lines(Path(folder) / "d.jsonl", [{"text": f"x{text}"} for text in texts])
        found = rows(path, tokenizer, Path(folder) / "cache", length=length)
        bare = folders.tokenizer()
        wanted = [number for text in texts for number in [*bare(text)["input_ids"], 2]]
        assert targets(found) == sorted(wanted)


def test_packed_rows_give_each_sample_the_same_loss(tokenizer: Path, tmp_path: Path) -> None:
    """No leak: by attention or by position."""
    records = [{"prompt": f"{n}+{n}=", "completion": f"{2 * n}"} for n in range(20)]
    path = folders.lines(tmp_path / "d.jsonl", records)
    model = folders.made("llama")
    decoder = Decoder(shape.of(model.config.to_dict())).eval()
    decoder.load_state_dict(model.state_dict())
    sums = []
    for packed in (True, False):
        found = rows(path, tokenizer, tmp_path / "cache", length=48, packed=packed)
        sums.append(sample_losses(decoder, found, torch.device("cpu")))
    np.testing.assert_allclose(sums[0], sums[1], rtol=1e-5)
    assert len(found) == 20
    assert len(rows(path, tokenizer, tmp_path / "cache", length=48)) < 6


def test_samples_without_anything_to_learn_are_left_out_and_told(tokenizer: Path, tmp_path: Path) -> None:
    """Prompts that fill the row (B071): how many, and their lines."""
    short, long = {"prompt": "ab", "completion": "c"}, {"prompt": "a" * 40, "completion": "b" * 5}
    path = folders.lines(tmp_path / "d.jsonl", [short, short, long, short])
    said: list[str] = []
    found = rows(path, tokenizer, tmp_path / "cache", said, length=32, packed=False)
    assert len(found) == 3
    assert said[0] == "1 of 4 samples have nothing to learn within 32 tokens: left out (line 3)"
    path = folders.lines(tmp_path / "t.jsonl", [{"text": ""}, {"text": "ab"}, {"text": ""}])
    rows(path, tokenizer, tmp_path / "cache", said, length=32)
    assert said[-1] == "2 of 3 samples have nothing to learn within 32 tokens: left out (line 1, 3)"
    path = folders.lines(tmp_path / "e.jsonl", [long])
    with pytest.raises(DataError, match="no sample has anything to learn within 32 tokens"):
        rows(path, tokenizer, tmp_path / "cache", length=32)


def test_bad_lines_are_left_out_where_that_is_asked_for(tokenizer: Path, tmp_path: Path) -> None:
    """And told (B076)."""
    path = folders.lines(tmp_path / "d.jsonl", [{"text": "abc"}] * 3)
    path.write_text(path.read_text() + '{"text": "ab\n')
    with pytest.raises(DataError, match=r"d\.jsonl:4:"):
        rows(path, tokenizer, tmp_path / "cache", length=8)
    said: list[str] = []
    assert rows(path, tokenizer, tmp_path / "cache", said, length=8, bad="skip").facts["documents"] == 3
    assert said[0] == f"1 of the lines of {path} are no samples and are left out (line 4)"


def test_tokens_are_made_once(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one file, tokenizer and length; another length or another file makes them anew."""
    made = []

    def documents(self: Any) -> Iterable[Document]:
        made.append(1)
        return _documents(self)

    _documents = data.FromLines.documents
    monkeypatch.setattr(data.FromLines, "documents", documents)
    path = folders.lines(tmp_path / "d.jsonl", [{"text": "abcdef"}])
    for length in (8, 8, 4):
        rows(path, tokenizer, tmp_path / "cache", length=length)
    assert len(made) == 2
    folders.lines(path, [{"text": "abcdefg"}])
    rows(path, tokenizer, tmp_path / "cache", length=8)
    assert len(made) == 3


def test_files_of_tokens_are_full_rows(tmp_path: Path) -> None:
    """Each token but the first of a file is a label, up to the last full row."""
    folder = tmp_path / "tokens"
    folder.mkdir()
    np.save(folder / "a.npy", np.arange(10, dtype=np.uint16))
    np.arange(100, 107, dtype=np.uint16).tofile(folder / "b.bin")
    found = rows(folder, tmp_path, tmp_path / "cache", length=3)
    assert [row["tokens"].tolist() for row in found] == [
        [0, 1, 2], [3, 4, 5], [6, 7, 8], [100, 101, 102], [103, 104, 105],
    ]  # fmt: skip
    assert found[3]["labels"].tolist() == [101, 102, 103]
    with pytest.raises(IndexError):
        found[5]
    with pytest.raises(DataError, match="no row of tokens"):
        rows(folder, tmp_path, tmp_path / "cache", length=100)


@pytest.mark.parametrize("token", [264, -1])
def test_a_token_that_the_model_does_not_have_is_said(tmp_path: Path, token: int) -> None:
    """With its file: on a GPU the embedding would end the process without a word."""
    np.save(tmp_path / "a.npy", np.arange(8, dtype=np.int32))
    np.save(tmp_path / "b.npy", np.array([1, 2, 3, token, 5, 6, 7], np.int32))
    found = rows(tmp_path, tmp_path, tmp_path / "cache", length=3)
    assert found[1]["labels"].tolist() == [4, 5, 6]
    with pytest.raises(DataError, match=rf"b\.npy has tokens that the model does not have.*{token}.*263"):
        found[2]


@pytest.mark.parametrize(("there", "found"), [(False, "is not there"), (True, "no files of tokens")])
def test_data_that_is_not_there_is_said(tmp_path: Path, found: str, *, there: bool) -> None:
    """With what it may be."""
    path = tmp_path / "data"
    if there:
        path.mkdir()
    with pytest.raises(DataError, match=found):
        rows(path, tmp_path, tmp_path / "cache", length=8)


def test_a_folder_without_tokenizer_is_said(tmp_path: Path) -> None:
    """With the option."""
    path = folders.lines(tmp_path / "d.jsonl", [{"text": "abc"}])
    with pytest.raises(DataError, match="--tokenizer"):
        rows(path, tmp_path / "none", tmp_path / "cache", length=8)
