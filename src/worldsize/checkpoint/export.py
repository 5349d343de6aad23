"""Room: the weights of a checkpoint for other programs: safetensors and torch files under the bare model's names.

Safetensors are written one tensor at a time, so that a model larger than the memory gets out; a torch file is whole in
memory before it is written. What is tied is written once. Nothing appears under the target's name before it is whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from worldsize.checkpoint import disk, safe
from worldsize.checkpoint.skeleton import unpack
from worldsize.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from worldsize.checkpoint.opened import Opened

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What `dtype` may be. Only floating-point tensors are cast."""

SHARD = "5GB"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_NAMES = {dtype: name for name, dtype in safe.DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one model of a checkpoint, still on disk.

    Attributes:
        opened: the checkpoint.
        model: the model's name.
        own: bare name -> name in the checkpoint.
        ties: bare name -> the bare name of what it is tied to.
        dtype: what floating-point tensors are cast to; None leaves them.
    """

    opened: Opened
    model: str
    own: Mapping[str, str]
    ties: Mapping[str, str]
    dtype: torch.dtype | None = None

    @classmethod
    def choose(cls, opened: Opened, model: str | None, dtype: str | None, *, average: bool) -> Weights:
        """The only model, or the one that is named; or its average.

        Raises:
            ConfigError: it is not there, or several are and none is named; the dtype is unknown.
        """
        kind = "average" if average else "model"
        there = opened.models(kind)
        if model is None and len(there) == 1:
            (model,) = there
        if model not in there:
            raise ConfigError(
                f"{opened.path} holds no {kind} {model!r}" if model or not there else f"which {kind} is meant?",
                found=", ".join(there) or "none",
                do="choose one with --model" if there else "export without --average",
            )
        if dtype is not None and dtype not in DTYPES:
            raise ConfigError(f"dtype {dtype!r}", do=f"choose one of {', '.join(DTYPES)}")
        own, ties = opened.weights(str(model), kind)
        return cls(opened, str(model), own, ties, DTYPES[dtype] if dtype else None)

    def dtype_of(self, name: str) -> torch.dtype:
        """What a tensor is written as."""
        found = self.opened.facts[self.own[name]].dtype
        return self.dtype if self.dtype and found.is_floating_point else found

    def bytes(self, name: str) -> int:
        """Size of a tensor as it is written."""
        shape = torch.Size(self.opened.facts[self.own[name]].shape)
        return shape.numel() * self.dtype_of(name).itemsize

    def tensor(self, name: str) -> Tensor:
        """Read one tensor."""
        return self.opened.tensor(self.own[name]).to(self.dtype_of(name))


def size(text: str) -> int:
    """Bytes of "5GB", "300 MiB", "1000". Raises ConfigError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or not (count := int(float(found[1]) * unit)):
        raise ConfigError(f"size {text!r}", do="write it as 5GB, 300MB or 2GiB")
    return count


def safetensors(weights: Weights, target: Path | str, max_shard: int) -> list[Path]:
    """Write safetensors, one tensor in memory at a time.

    Args:
        weights: of one model.
        target: a file with the ending .safetensors; or a folder, which gets `model.safetensors`, or several files and
            `model.safetensors.index.json` where it is more than `max_shard`.
        max_shard: bytes of values in a file.

    Returns:
        the files, in the order of their numbers.

    Raises:
        CheckpointError: the target is there already, the disk says no, or safetensors has no such dtype.
    """
    target = Path(target)
    _check_dtypes(weights)
    if target.suffix == safe.SUFFIX:
        with beside(target) as file:
            _write_one(weights, file, list(weights.own))
        return [target]
    groups = _groups(weights, max_shard)
    with beside(target) as folder:
        folder.mkdir()
        if len(groups) == 1:
            names = [f"model{safe.SUFFIX}"]
        else:
            names = [f"model-{n + 1:05d}-of-{len(groups):05d}{safe.SUFFIX}" for n in range(len(groups))]
            disk.write(
                folder / f"model{safe.SUFFIX}.index.json", _index(weights, dict(zip(names, groups, strict=True)))
            )
        for name, group in zip(names, groups, strict=True):
            _write_one(weights, folder / name, group)
    return [target / name for name in names]


def _check_dtypes(weights: Weights) -> None:
    strange = [name for name in weights.own if weights.dtype_of(name) not in _NAMES]
    if strange:
        found = f"{strange[0]}: {weights.dtype_of(strange[0])}"
        raise CheckpointError("safetensors has no such dtype", found=found, do="export --to torch")


def _groups(weights: Weights, most: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    held = 0
    for name in weights.own:
        count = weights.bytes(name)
        if groups[-1] and held + count > most:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += count
    return groups


def _index(weights: Weights, files: Mapping[str, list[str]]) -> str:
    total = sum(weights.bytes(name) for name in weights.own)
    where = {name: file for file, names in files.items() for name in names}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True) + "\n"


def _write_one(weights: Weights, path: Path, names: list[str]) -> None:
    """One file: the length of the header, the header, the values. Wide values first, so that all are aligned."""
    names = sorted(names, key=lambda name: (-weights.dtype_of(name).itemsize, name))
    ties = {name: first for name, first in weights.ties.items() if first in names}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **ties}}
    at = 0
    for name in names:
        end = at + weights.bytes(name)
        shape, dtype = list(weights.opened.facts[weights.own[name]].shape), _NAMES[weights.dtype_of(name)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with recorder(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(_raw(weights.tensor(name)))


def _raw(tensor: Tensor) -> memoryview:
    return memoryview(cast("Any", tensor.reshape(-1).view(torch.uint8).numpy()))


def torch_file(weights: Weights, target: Path | str, *, optimizer: bool = False) -> Path:
    """Write one file for `torch.load`: the state dict, or with the optimizer {"model": ..., "optimizer": ...}.

    The optimizer's part is what its own `load_state_dict` takes: parameters by number, in the order of its groups.
    Tied names share one tensor in the file.

    Raises:
        CheckpointError: the target is there already, or the disk says no.
        ConfigError: the model has no optimizer of its own, or several.
    """
    target = Path(target)
    state = {name: weights.tensor(name) for name in weights.own}
    state |= {name: state[first] for name, first in weights.ties.items()}
    found: dict[str, Any] = {"model": state, "optimizer": _optimizer(weights)} if optimizer else state
    with beside(target) as path, recorder(path) as file:
        torch.save(found, cast("Any", file))
    return target


def _optimizer(weights: Weights) -> dict[str, Any]:
    name, saved = optimizer_of(weights)
    order = [parameter for group in saved["groups"] for parameter in group["params"]]
    numbers = {parameter: number for number, parameter in enumerate(order)}
    state = {
        numbers[parameter]: unpack(slot, lambda path: weights.opened.tensor(f"optim/{name}/{path}"))
        for parameter, slot in saved["slots"].items()
    }
    groups = [
        {**plain_group(group), "params": [numbers[each] for each in group["params"]]} for group in saved["groups"]
    ]
    return {"state": state, "param_groups": groups}


def optimizer_of(weights: Weights) -> tuple[str, dict[str, Any]]:
    """Name and skeleton of the one optimizer of a model, from train.json. Raises ConfigError."""
    start = f"{weights.model}."
    train: dict[str, Any] = weights.opened.train["optim"]
    own = [
        name
        for name, saved in train.items()
        if all(parameter.startswith(start) for group in saved["groups"] for parameter in group["params"])
    ]
    if len(own) != 1:
        raise ConfigError(
            f"model {weights.model!r} has not just one optimizer of its own", found=", ".join(own) or "none",
            do="export the weights alone",
        )  # fmt: skip
    return own[0], train[own[0]]


def plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group; JSON has no tuples, and betas were one."""
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in group.items() if key != "params"
    }


@contextmanager
def recorder(path: Path) -> Iterator[disk.Recorder]:
    """A file to write, synced at the end. Raises OSError, whatever layer it came through."""
    file = disk.Recorder(path)
    try:
        yield file
    except RuntimeError as error:  # torch.save's own layer wraps what the disk said
        raise file.failure or error from None
    finally:
        file.close()


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """A path next to the target for what is being written, which gets the target's name when all went well.

    Raises:
        CheckpointError: something has that name, or the disk says no.
    """
    if target.exists():
        raise CheckpointError(f"{target} is there already", do="choose another name, or remove it")
    path = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield path
        if path.is_dir():
            disk.sync(path)
        path.rename(target)
        disk.sync(target.parent)
    except OSError as error:
        raise disk.explain(error, "writing", target) from error
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    remove: Callable[[Path], object] = shutil.rmtree if path.is_dir() else lambda path: path.unlink(missing_ok=True)
    remove(path)
