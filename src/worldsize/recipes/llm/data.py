"""Room: what a decoder is trained on: rows of tokens with labels, positions and documents, made of files. Knows no ranks.

A label is the token that follows; the last one of a document has none within a row, so nothing is learnt across documents.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from worldsize.data.packing import pack
from worldsize.data.tokens import Tokens, cached, flat
from worldsize.errors import DataError
from worldsize.recipes.llm import samples
from worldsize.recipes.llm.losses import IGNORED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from worldsize.data.jsonl import Lines
    from worldsize.data.tokens import Document

Batch = dict[str, "Tensor"]
_FORM = 2
"""Of what is kept in caches; raise it where that changes."""
TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "tiktoken.model",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
)  # fmt: skip
"""Files that a tokenizer may be made of."""
_MOST = 1_000_000
"""Lines whose numbers are kept to be told."""
_TOLD = 5
_FILL = {"tokens": 0, "labels": IGNORED, "position_ids": 0, "documents": -1}
"""Padding: no loss, a document that sees itself alone."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What rows shall be.

    Attributes:
        length: the most tokens of a row.
        packed: several documents in a row; else each in its own.
        multiple: rows that are not packed are as long as a multiple of it; tokens do not depend on it.
        over: what is learnt, see `samples`.
        bad: what becomes of lines that are no records.
    """

    length: int
    packed: bool = True
    multiple: int = field(default=1, repr=False)
    over: samples.LossOver = "completion"
    bad: Any = "error"


class Rows:
    """A dataset of rows of tokens: {"tokens", "labels", "position_ids", "documents"}, each (length,), int64.

    Args:
        tokens: all documents.
        length: the most tokens of a row.
        packed: whether rows hold several documents.
        multiple: of what the length of other rows is one.
    """

    def __init__(self, tokens: Tokens, length: int, *, packed: bool, multiple: int = 1) -> None:
        self._tokens, self._length, self.packed, self._multiple = tokens, length, packed, multiple
        self._starts, self._sizes = tokens.plans["starts"], tokens.plans["sizes"]
        self._items, self._rows = tokens.plans["items"], tokens.plans["rows"]

    def __len__(self) -> int:
        return len(self._rows) - 1

    def __getitem__(self, index: int) -> Batch:
        """One row, as long as its documents are."""
        pieces = [self._piece(item) for item in self._items[self._rows[index] : self._rows[index + 1]]]
        tokens, labels = (np.concatenate(parts).astype(np.int64) for parts in zip(*pieces, strict=True))
        sizes = [len(piece[0]) for piece in pieces]
        places = np.concatenate([np.arange(size) for size in sizes])
        found = {"tokens": tokens, "labels": labels, "position_ids": places}
        if self.packed:
            found["documents"] = np.repeat(np.arange(len(sizes)), sizes)
        return {name: torch.from_numpy(value) for name, value in found.items()}

    def collate(self, rows: list[Batch]) -> Batch:
        """Rows of one length: packed ones the longest there may be, else that of the longest."""
        longest = self._length if self.packed else max(len(row["tokens"]) for row in rows)
        length = longest + -longest % self._multiple
        return {name: torch.stack([_padded(row[name], length, _FILL[name]) for row in rows]) for name in rows[0]}

    @property
    def facts(self) -> dict[str, Any]:
        """What was noted of the data: documents, tokens, targets, what was left out."""
        return self._tokens.facts

    def _piece(self, item: int) -> tuple[NDArray[Any], NDArray[Any]]:
        start, size = int(self._starts[item]), int(self._sizes[item])
        values, learnt = self._tokens.values, self._tokens.learnt
        labels = values[start + 1 : start + size + 1].astype(np.int64)
        if learnt is not None:
            labels[~learnt[start + 1 : start + size + 1]] = IGNORED
        return values[start : start + size], labels


def counted(batch: Batch) -> dict[str, float]:
    """How many tokens of a batch are to be learnt, and how many positions are computed."""
    return {"tokens": float((batch["labels"] != IGNORED).sum()), "positions": float(batch["tokens"].numel())}


def padded(rows: Tensor, name: str, multiple: int) -> Tensor:
    """One part of a batch, (samples, length), with padding up to a multiple of a length."""
    length = rows.shape[1]
    return _padded(rows, length + -length % multiple, _FILL[name]) if length % multiple else rows


def _padded(row: Tensor, length: int, fill: int) -> Tensor:
    return torch.nn.functional.pad(row, (0, length - row.shape[-1]), value=fill)


class FromLines:
    """Makes rows of a file of JSON lines. See `data.tokens.Maker`."""

    def __init__(self, path: Path, tokenizer: Callable[[], Any], wanted: Wanted, largest: int) -> None:
        self.largest, self._path, self._tokenizer, self._wanted = largest, path, tokenizer, wanted
        self._lines: Lines | None = None

    def documents(self) -> Iterable[Document]:
        """Those of the file; a pass over all lines comes first, so that nothing is made of a file that is wrong."""
        checked, kind = samples.lines(self._path, self._wanted.bad)
        for _ in checked:
            pass
        self._lines, _ = samples.lines(self._path, self._wanted.bad)
        return samples.Encoder(self._tokenizer(), self._wanted.over).documents(self._lines, kind)

    def plan(self, tokens: Tokens) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Where rows begin, and what was left out."""
        whole = tokens.learnt is None
        starts, sizes = _split(tokens, self._wanted.length) if whole else _cut(tokens, self._wanted.length)
        kept = _learning(tokens, starts, sizes)
        lost = tokens.lengths < 2 if whole else ~kept  # noqa: PLR2004 - a text of one token has none that follows
        dropped = [int(line) for line in tokens.lines[lost]]
        if not kept.any():
            raise DataError(
                f"{self._path}: no sample has anything to learn within {self._wanted.length} tokens",
                found=f"{len(tokens):,} samples, the shortest of {int(tokens.lengths.min()) if len(tokens) else 0} tokens",
                do="raise max_seq_len, or shorten the prompts",
            )
        starts, sizes = starts[kept], sizes[kept]
        items, rows = self._rows(sizes)
        facts = {
            "documents": len(tokens), "tokens": int(sizes.sum()), "rows": len(rows) - 1,
            "longer": int((tokens.lengths > self._wanted.length + 1).sum()), "whole": whole,
            "nothing to learn": dropped[:_MOST], "skipped": [] if self._lines is None else self._lines.skipped[:_MOST],
        }  # fmt: skip
        return facts, {"starts": starts, "sizes": sizes, "items": items, "rows": rows}

    def _rows(self, sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if self._wanted.packed:
            return pack(sizes, self._wanted.length)
        return np.arange(len(sizes)), np.arange(len(sizes) + 1)


def _split(tokens: Tokens, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Documents that are learnt whole, in pieces of at most `length`: each token but the first is one piece's label."""
    inputs = np.maximum(tokens.lengths - 1, 0)
    counts = -(-inputs // length)
    begins = np.repeat(tokens.starts[:-1], counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    sizes = np.minimum(np.repeat(inputs, counts) - within * length, length)
    return begins + within * length, sizes


def _cut(tokens: Tokens, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Documents of which a part is learnt: what does not fit is cut off at the end."""
    return np.array(tokens.starts[:-1]), np.clip(tokens.lengths - 1, 0, length)


def _learning(tokens: Tokens, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which pieces have a label that counts."""
    if tokens.learnt is None:
        found: NDArray[np.bool_] = sizes > 0
        return found
    before = np.concatenate([[0], np.cumsum(tokens.learnt)])
    inside: NDArray[np.bool_] = before[starts + sizes + 1 * (sizes > 0)] > before[starts + 1 * (sizes > 0)]
    return inside


class Stream:
    """Files of tokens without marks: every row is full, and goes on where the one before ended.

    Args:
        files: in order.
        length: of a row.
        largest: the largest token.
    """

    def __init__(self, files: list[Path], length: int, largest: int) -> None:
        self._files, self._length, self._largest = files, length, largest
        counts = [max(0, len(values) - 1) // length for values in self._values]
        self._ends = np.cumsum(counts)
        if not self._ends[-1]:
            raise DataError("the files have no row of tokens", found=f"{len(files)} files, rows of {length}")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Batch:
        """One row. Raises DataError where it is not of the model's tokens."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        at = int(np.searchsorted(self._ends, index, side="right"))
        start = (index - (int(self._ends[at - 1]) if at else 0)) * self._length
        part = torch.from_numpy(self._values[at][start : start + self._length + 1].astype(np.int64))
        if not 0 <= part.min() <= part.max() <= self._largest:
            raise DataError(
                f"{self._files[at]} has tokens that the model does not have",
                found=f"{int(part.min())} to {int(part.max())} in a row, the largest is {self._largest}",
                do="use the model's own tokenizer",
            )
        return {"tokens": part[:-1], "labels": part[1:]}

    def collate(self, rows: list[Batch]) -> Batch:
        """Rows one below the other."""
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    @property
    def facts(self) -> dict[str, Any]:
        """What was noted of the data."""
        return {"files": len(self._files), "tokens": len(self) * self._length, "rows": len(self)}

    @cached_property
    def _values(self) -> list[NDArray[Any]]:
        return [flat(file, self._largest) for file in self._files]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_values"}


def rows_of(
    path: Path, tokenizer: Path, wanted: Wanted, *, vocabulary: int, cache: Path, say: Callable[[str], None]
) -> Rows | Stream:
    """The rows of a file of JSON lines, or of a folder of files of tokens.

    Args:
        path: the file or folder.
        tokenizer: a folder with a tokenizer of transformers; only read where the tokens are not kept already.
        wanted: what rows shall be.
        vocabulary: how many tokens the model has.
        cache: where tokens are kept.
        say: one line for a person.

    Raises:
        DataError: with file, line and column of what is wrong; or nothing can be learnt from it.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in (".npy", ".bin"))
        if not files:
            raise DataError(
                f"{path} has no files of tokens", found="no .npy, no .bin", do="give a .jsonl, or such a folder"
            )
        return Stream(files, wanted.length, vocabulary - 1)
    maker = FromLines(path, lambda: load_tokenizer(tokenizer), wanted, vocabulary - 1)
    tokens = cached(cache, _key(path, tokenizer, wanted, vocabulary), maker, say)
    _tell(path, tokens.facts, wanted, say)
    return Rows(tokens, wanted.length, packed=wanted.packed, multiple=wanted.multiple)


def _tell(path: Path, facts: dict[str, Any], wanted: Wanted, say: Callable[[str], None]) -> None:
    told = {
        "skipped": f"of the lines of {path} are no samples and are left out",
        "nothing to learn": f"of {facts['documents']:,} samples have nothing to learn within {wanted.length} tokens: left out",
    }
    for name, text in told.items():
        if lines := facts[name]:
            shown = ", ".join(map(str, lines[:_TOLD])) + (", …" if len(lines) > _TOLD else "")
            say(f"{len(lines):,} {text} (line {shown})")
    if facts["longer"]:
        what = "they are learnt in pieces" if facts["whole"] else "their ends are cut off"
        say(f"{facts['longer']:,} of {facts['documents']:,} samples are longer than {wanted.length} tokens: {what}")


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a Hugging Face folder; nothing is fetched. Raises DataError where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder} has no tokenizer that can be read",
            found=str(error).splitlines()[0],
            do="give --tokenizer FOLDER",
        ) from error


def tokenizer_files(folder: Path) -> list[str]:
    """What of `TOKENIZER` is there."""
    return [
        str(file.relative_to(folder)) for name in TOKENIZER for file in sorted(folder.glob(name)) if file.is_file()
    ]


def _key(path: Path, tokenizer: Path, wanted: Wanted, vocabulary: int) -> str:
    """Of all that the tokens depend on."""
    whole = hashlib.blake2b(f"{_FORM} {wanted} {vocabulary}".encode(), digest_size=16)
    for file in (path, *(tokenizer / name for name in tokenizer_files(tokenizer))):
        if file.is_file():
            try:
                with file.open("rb") as stream:
                    whole.update(f"{file.name if file is not path else ''} ".encode())
                    whole.update(hashlib.file_digest(stream, "blake2b").digest())
            except OSError as error:
                raise DataError(f"{file} cannot be read", found=error.strerror or str(error)) from error
        elif file is path:
            raise DataError(f"{file} is not there", do="name a file of JSON lines, or a folder of files of tokens")
    return whole.hexdigest()
