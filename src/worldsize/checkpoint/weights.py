"""Room: weights from elsewhere, for a warm start. Nothing is unpickled unless the caller trusts the file."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from worldsize.checkpoint import disk, load, manifest, safe, zero
from worldsize.errors import CheckpointError, MissingExtraError
from worldsize.runtime.comm import Alone

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from torch import Tensor

T = TypeVar("T")

MODEL = "model/"
"""What the names of a model's weights begin with in our checkpoints."""

INITIAL = "initial.pt"
"""The file in a run folder from which a run without checkpoints takes its first weights."""

_FOLDER_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_INSIDE = ("state_dict", "model_state_dict", "model", "module", "MODEL_STATE")
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts of names that no user's model has."""


def read_weights(
    path: Path | str,
    *,
    names: Collection[str] | None = None,
    prefix: str | None = None,
    trust: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Tensor]:
    """The weights in a checkpoint of ours or of others, on the CPU, by the names of the bare model.

    Understood: a checkpoint or run folder of ours (its newest checkpoint that verifies), a torch file, safetensors
    (one file or with an index), a Lightning .ckpt, a folder of accelerate, transformers or DeepSpeed (ZeRO, universal).

    Args:
        path: the file or folder.
        names: the names of the bare model that will take them: what wrappers put into or before the names is taken
            off where the rest then fits. Without, the names stay as they are in the file.
        prefix: take only the names that begin with this, and take it off.
        trust: allow unpickling, which can run any code that the file brings.
        say: is told in lines what was skipped, and what stays behind.

    Raises:
        CheckpointError: nothing there can be read, or only by unpickling, or its names are not `names`.
        MissingExtraError: safetensors is not installed.
    """
    path = Path(path)
    try:
        found = _read(path, trust=trust, say=say)
    except OSError as error:
        raise disk.explain(error, "reading", path) from error
    if prefix:
        found = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
    if not found:
        found_there = f"no name that begins with {prefix!r}" if prefix else "no tensors"
        raise CheckpointError(f"{path} holds no weights", found=found_there)
    return found if names is None else fitting(path, found, names)


def initial(run_dir: Path | str) -> Path | None:
    """The weights that were imported into a run folder, if any."""
    path = Path(run_dir) / INITIAL
    return path if path.is_file() else None


def write_weights(weights: Mapping[str, Tensor], target: Path | str) -> Path:
    """Write weights so that nothing needs unpickling: a .safetensors or .pt file, or into a run folder.

    Returns the file. Raises CheckpointError where the run has checkpoints already, or the disk says no.
    """
    target = Path(target)
    if target.suffix not in (safe.SUFFIX, ".pt"):
        if steps := manifest.committed(target):
            raise CheckpointError(
                f"{target} has trained already", found=f"{steps[-1].name}", do="import into a new run folder"
            )
        target /= INITIAL
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    plain = {name: tensor.detach().contiguous().clone() for name, tensor in weights.items()}
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(plain, beside, target.suffix)
        beside.replace(target)
        disk.sync(target.parent)
    except OSError as error:
        raise disk.explain(error, "writing", target) from error
    finally:
        beside.unlink(missing_ok=True)
    return target


def _write(weights: dict[str, Tensor], path: Path, suffix: str) -> None:
    file = disk.Recorder(path)
    try:
        if suffix == safe.SUFFIX:
            file.write(_safetensors().save(weights))
        else:
            torch.save(weights, cast("Any", file))
    finally:
        file.close()


def ours(path: Path) -> Path | None:
    """The checkpoint of ours that this is, or the newest of this run folder. Raises CheckpointError where it is damaged."""
    if (path / manifest.MANIFEST).is_file():
        if problems := manifest.verify(path):
            raise CheckpointError(f"{path} is damaged", found="; ".join(problems), do="use an older checkpoint")
        return path
    return load.newest(path, Alone())[0] if path.is_dir() else None


def file_in(folder: Path) -> Path | None:
    """The file, or index of files, with the weights in a folder of accelerate or transformers; None where there is none."""
    return next((folder / name for name in _FOLDER_FILES if (folder / name).is_file()), None)


def _read(path: Path, *, trust: bool, say: Callable[[str], None]) -> dict[str, Tensor]:
    if (own := ours(path)) is not None:
        return _ours(own)
    if not path.is_dir():
        return _file(path, trust=trust)
    if foreign := zero.find(path):
        return zero.read(foreign, lambda file: _read_torch(file, trust=trust, mapped=True), say)
    if (file := file_in(path)) is not None:
        return _file(file, trust=trust)
    raise CheckpointError(
        f"{path} is no checkpoint that can be read",
        found=", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "an empty folder",
        do=f"name a checkpoint of ours, a torch or safetensors file, or a folder with {' or '.join(_FOLDER_FILES)}",
    )


def _ours(path: Path) -> dict[str, Tensor]:
    facts = {name: fact for name, fact in load.metadata(path).items() if name.startswith(MODEL)}
    tensors = {name: torch.empty(fact.shape, dtype=fact.dtype) for name, fact in facts.items()}
    load.load_some(path, tensors)
    return {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}


def _file(path: Path, *, trust: bool) -> dict[str, Tensor]:
    if path.name.endswith(".index.json"):
        return _indexed(path, trust=trust)
    if path.suffix == safe.SUFFIX:
        return _read_safetensors(path)
    return _flat(path, _read_torch(path, trust=trust))


def _indexed(path: Path, *, trust: bool) -> dict[str, Tensor]:
    names = safe.indexed(path)
    return {key: tensor for name in names for key, tensor in _file(path.parent / name, trust=trust).items()}


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise MissingExtraError.of("safetensors", "safetensors") from None
    return safetensors.torch


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    _safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            found: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is no dict
            said = file.metadata() or {}
        # Where tied names are written once, the others stand beside the values with the name of the first.
        return found | {name: found[first] for name, first in said.items() if first in found and name not in found}
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file", found=str(error)) from error


def _read_torch(path: Path, *, trust: bool, mapped: bool = False) -> Any:
    """Where it is mapped, tensors are read when they are used."""
    try:
        mapped = mapped and zipfile.is_zipfile(path)
        return torch.load(path, map_location="cpu", weights_only=not trust, mmap=mapped)
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        if trust:
            raise _unreadable(path, error) from error
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, so reading it can run any code that it brings",
            found=_asked_for(error),
            do="if you trust where it comes from, say so with --trust (trust=True)",
        ) from error
    except Exception as error:  # a damaged or foreign file raises nearly anything
        raise _unreadable(path, error) from error


def _asked_for(error: pickle.UnpicklingError) -> str:
    named = re.search(r"GLOBAL (\S+)", str(error))
    return named[1] if named else "a pickle"


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read as a torch file", found=f"{type(error).__name__}: {error}")


def _flat(path: Path, found: Any) -> dict[str, Tensor]:
    """The mapping of names to tensors in what a torch file held."""
    for key in _INSIDE:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            return _flat(path, found[key])
    tensors = (
        {key: value for key, value in found.items() if _is_weight(key, value)} if isinstance(found, dict) else {}
    )
    if not tensors:
        kinds = ", ".join(map(str, list(found)[:8])) if isinstance(found, dict) else type(found).__name__
        raise CheckpointError(f"{path} holds no names with tensors", found=kinds)
    return tensors


def _is_weight(key: Any, value: Any) -> bool:
    return isinstance(key, str) and isinstance(value, torch.Tensor)


def fitting(path: Path, weights: Mapping[str, T], names: Collection[str]) -> dict[str, T]:
    """The weights under exactly these names, without what wrappers put into or before theirs."""
    wanted, best = set(names), dict(weights)
    for way in _ways(best):
        if way.keys() == wanted:
            return way
        best = max(best, way, key=lambda way: len(way.keys() & wanted))
    missing, unexpected = sorted(wanted - best.keys()), sorted(best.keys() - wanted)
    raise CheckpointError(
        f"the weights in {path} are not those of this model",
        found=f"{len(missing)} missing ({', '.join(missing[:3])}), {len(unexpected)} unexpected "
        f"({', '.join(unexpected[:3])}), {len(wanted) - len(missing)} fit",
        do="use the model it was written with, or choose the names with a prefix",
    )


def _ways(weights: dict[str, T]) -> Iterator[dict[str, T]]:
    """The same weights, with less and less of what stands in or before all of their names.

    DDP puts `module.` there, Lightning the attribute in which the user's model is.
    """
    yield weights
    weights = {".".join(w for w in name.split(".") if w not in _WRAPPERS): tensor for name, tensor in weights.items()}
    while True:
        yield weights
        word, dot, _ = next(iter(weights)).partition(".")
        if not dot or not all(name.startswith(f"{word}.") for name in weights):
            return
        weights = {name.removeprefix(f"{word}."): tensor for name, tensor in weights.items()}
