"""Room: the Hugging Face side of a run: what beside the weights belongs to a model, kept with the run and given back."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

from worldsize.checkpoint import address, export, manifest
from worldsize.checkpoint.opened import Opened
from worldsize.errors import CheckpointError
from worldsize.recipes.llm import lora
from worldsize.recipes.llm.data import tokenizer_files

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.recipes.llm.lora import Lora

KEPT = "huggingface"
"""The folder inside of a run's."""
CONFIG = "config.json"
_GENERATION = "generation_config.json"
_ROWS = "rows.json"
_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def keep(model: Path, tokenizer: Path, run: Path, adapters: Lora | None = None, *, back: int = 0) -> None:
    """Copy what belongs to the model into the run's folder, and say what is beside it. Those of a commit stay.

    Args:
        model: its folder.
        tokenizer: that of the tokenizer.
        run: where the run is.
        adapters: what is trained beside the weights.
        back: rows that are kept back for evaluation.
    """
    place = run / KEPT
    if begun(run) is not None:
        return
    # An attempt that came to no commit may have had another model or other adapters.
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    if adapters is not None:
        (place / lora.FILE).write_text(adapters.text(str(model)), encoding="utf-8")
    (place / _ROWS).write_text(json.dumps({"kept_back": back}) + "\n", encoding="utf-8")
    _copy_beside(model, tokenizer, place)
    if (model / CONFIG).is_file():  # last: with it the folder is whole
        shutil.copyfile(model / CONFIG, place / CONFIG)


def kept_back(place: Path) -> int:
    """How many rows the run keeps back for evaluation; `place` is what `begun` gave."""
    try:
        return int(json.loads((place / _ROWS).read_text(encoding="utf-8"))["kept_back"])
    except FileNotFoundError:
        return 0  # written by a version that kept none back unless it was told to


def _copy_beside(model: Path, tokenizer: Path, out: Path) -> None:
    """All but the config."""
    sources = {name: tokenizer / name for name in tokenizer_files(tokenizer)}
    if (model / _GENERATION).is_file():
        sources[_GENERATION] = model / _GENERATION
    for name, source in sources.items():
        (out / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source, out / name)


def begun(run: Path) -> Path | None:
    """What belongs to the model of a run that has a commit to go on from: all weights are in that. None where it has none."""
    place = run / KEPT
    return place if manifest.committed(run) and (place / CONFIG).is_file() else None


def beside(run: Path) -> Path:
    """The folder with what belongs to a run's model. Raises CheckpointError where the run is not one of a language model."""
    place = run / KEPT
    if not (place / CONFIG).is_file():
        raise CheckpointError(
            f"{run} is no run of a language model",
            found=f"no {KEPT}/{CONFIG}",
            do="worldsize checkpoint export writes weights",
        )
    return place


def run_of(checkpoint: Path) -> Path:
    """The run folder in which a checkpoint lies."""
    return checkpoint.resolve().parents[1]


def write(
    where: str, out: Path, *, dtype: str = "bf16", shard: str = export.SHARD, average: bool = False
) -> list[Path]:
    """Write a folder that transformers loads.

    Args:
        where: a run, a checkpoint, or RUN@STEP.
        out: the folder; it must not exist.
        dtype: of the weights.
        shard: the most bytes of a file.
        average: the running average in place of the weights.

    Returns:
        the files of the weights.

    Raises:
        CheckpointError, ConfigError: there is no such checkpoint, it is not a language model's, `out` exists.
    """
    checkpoint = address.find(where)
    place = beside(run_of(checkpoint))
    weights = export.Weights.choose(Opened(checkpoint), None, dtype, average=average)
    adapters = lora.Lora.read(place)
    if adapters is not None:
        weights = lora.Merged.of(weights, adapters)
    made = export.safetensors(weights, out, export.size(shard))
    config: dict[str, Any] = json.loads((place / CONFIG).read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    _copy_beside(place, place, out)
    text = json.dumps({**config, "dtype": _DTYPES[dtype]}, indent=2) + "\n"
    (out / CONFIG).write_text(text, encoding="utf-8")
    return made
