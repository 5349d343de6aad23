"""Room: the weights in a folder that DeepSpeed itself wrote: any ZeRO stage and world size, and universal ones.

Stages 1 and 2 lay each rank's piece of a group into a file, stage 3 each rank's piece of every parameter. Here the pieces
are put together, so that it does not matter on how many ranks they are read. Optimizer state stays behind, and that is
said. The layout is that of DeepSpeed 0.19.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from worldsize.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    Load = Callable[[Path], Any]
    Say = Callable[[str], None]

_LATEST = ("latest", "latest_universal")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_UNIVERSAL = "zero"
_SHOWN = 5


class _IncompleteError(Exception):
    """Files of ranks are missing.

    Attributes:
        problem: what a person hears where there is no other folder.
    """

    def __init__(self, problem: CheckpointError) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass(frozen=True, slots=True)
class _Files:
    """A folder in which none is missing.

    Attributes:
        models: files with model states by rank, and what is in the first.
        optimizers: files with optimizer states by rank; none where DeepSpeed wrote none, and in universal ones.
    """

    folder: Path
    models: list[Path]
    first: Any
    optimizers: list[Path]

    @property
    def behind(self) -> str | None:
        """What of it is not read, and who could."""
        ranks = len(self.optimizers)
        if (self.folder / _UNIVERSAL).is_dir():
            what, who = "", "with load_universal on any number of ranks"
        elif ranks:
            what = f" of {ranks} rank{'s' * (ranks > 1)}"
            who = f"on {ranks} again, or on any number from a universal checkpoint of it (ds_to_universal)"
        elif self.first.get("optimizer"):
            what, who = "", "on any number of ranks"
        else:
            return None
        left = f"the optimizer state{what} stays behind; DeepSpeed goes on with it {who}"
        return f"{self.folder}: the weights alone are taken, {left}"


def find(path: Path) -> list[Path]:
    """The folders of one checkpoint each: `path`, or what DeepSpeed calls the latest in it and then the older ones."""
    for name in _LATEST:
        if (path / name).is_file():
            tagged = path / (path / name).read_text().strip()
            if tagged.parent == path and tagged.is_dir():
                return [tagged, *_older(tagged)]
            raise CheckpointError(f"{path / name} names a checkpoint that is not there", found=tagged.name)
    return [path] if _is_one(path) else []


def read(folders: list[Path], load: Load, say: Say) -> dict[str, Tensor]:
    """All weights and buffers by the names of the model, of the first folder in which no file is missing.

    Args:
        folders: what `find` gave.
        load: reads one torch file.
        say: is told of folders that were skipped, and of what stays behind.

    Raises:
        CheckpointError: files of ranks are missing in all of them, those of the first are named; or it holds tensor parts.
    """
    found = _first_whole(folders, load, say)
    if found.behind:
        say(found.behind)
    folder, models, first, files = found.folder, found.models, found.first, found.optimizers
    if (folder / _UNIVERSAL).is_dir():
        return _whole(first["module"]) | dict(_universal(folder / _UNIVERSAL, load, first.get("param_shapes") or []))
    return _put_together(models, first, files, load) if files else _whole(first["module"])


def _is_one(path: Path) -> bool:
    return path.is_dir() and any(_MODEL.fullmatch(entry.name) for entry in path.iterdir())


def _older(tagged: Path) -> list[Path]:
    """Others beside it that were written before, the newest first."""
    others = [each for each in tagged.parent.iterdir() if _is_one(each) and _age(each) < _age(tagged)]
    return sorted(others, key=_age, reverse=True)


def _age(folder: Path) -> tuple[int, float]:
    """By the step in its name, where one is: copying loses times."""
    step = re.search(r"\d+$", folder.name)
    return int(step[0]) if step else -1, folder.stat().st_mtime


def _first_whole(folders: list[Path], load: Load, say: Say) -> _Files:
    problems: list[CheckpointError] = []
    for folder in folders:
        try:
            found = _files(folder, load)
        except _IncompleteError as error:
            problems.append(error.problem)
            continue
        for problem in problems:
            say(f"skipped: {problem.what}, {problem.found}")
        return found
    raise problems[0]


def _files(folder: Path, load: Load) -> _Files:
    """Looks at names, and into the first file for how many there must be."""
    models = _ranked(folder, _MODEL)
    first = load(models[0])
    needed = models[0].name.startswith("zero_pp_rank")  # stage 3, which has the weights nowhere else
    if (folder / _UNIVERSAL).is_dir() or not (
        needed or any(_OPTIMIZER.fullmatch(each.name) for each in folder.iterdir())
    ):
        return _Files(folder, models, first, [])
    return _Files(folder, models, first, _ranked(folder, _OPTIMIZER, first.get("dp_world_size")))


def _put_together(models: list[Path], first: Any, files: list[Path], load: Load) -> dict[str, Tensor]:
    states = [load(file)["optimizer_state_dict"] for file in files]
    stage = states[0].get("zero_stage", 1)
    shapes: list[Mapping[str, torch.Size]] = first["param_shapes"]
    cut = {name for group in shapes for name in group}
    found = {name: value for name, value in _whole(first["module"]).items() if name not in cut and value.numel()}
    if stage >= 3:  # noqa: PLR2004
        pieces = [first if at == 0 else load(file) for at, file in enumerate(models)]
        found |= _frozen(pieces, len(files))
        found |= dict(_by_parameter(shapes, [state["fp32_flat_groups"] for state in states]))
    else:
        paddings = states[0].get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
        found |= dict(_by_group(shapes, [state["single_partition_of_fp32_groups"] for state in states], paddings))
    return found | {name: found[first_name] for name, first_name in _shared(first) if first_name in found}


def _ranked(folder: Path, pattern: re.Pattern[str], count: int | None = None) -> list[Path]:
    """The files by rank. Raises CheckpointError naming ranks without one, or where there are tensor parts."""
    files: dict[int, Path] = {}
    for entry in sorted(folder.iterdir()):
        named = pattern.fullmatch(entry.name)
        if named and int(named[2]):
            raise CheckpointError(
                f"{folder} was written with tensor parts",
                found=entry.name,
                do="make it universal first (ds_to_universal)",
            )
        if named:
            files[int(named[1] or 0)] = entry
    expected = count or (max(files) + 1 if files else 1)
    missing = [rank for rank in range(expected) if rank not in files]
    if missing:
        kind = "optimizer" if pattern is _OPTIMIZER else "model"
        problem = CheckpointError(
            f"{folder} is incomplete: {len(missing)} of {expected} files with {kind} states are missing",
            found=f"none of rank {', '.join(map(str, missing[:_SHOWN]))}",
            do="copy them from where those ranks wrote, or use an older checkpoint",
        )
        raise _IncompleteError(problem)
    return [files[rank] for rank in range(expected)]


def _whole(module: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in module.items() if isinstance(value, torch.Tensor)}


def _universal(folder: Path, load: Load, groups: list[Mapping[str, torch.Size]]) -> Iterator[tuple[str, Tensor]]:
    """Of stage 3, parameters lie flat in it."""
    shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
    for entry in sorted(folder.iterdir()):
        if (entry / "fp32.pt").is_file():
            found = load(entry / "fp32.pt")
            value: Tensor = found["param"] if isinstance(found, dict) else found
            yield entry.name, value.view(shapes.get(entry.name, value.shape))


def _by_group(
    shapes: list[Mapping[str, torch.Size]], ranks: list[list[Tensor]], paddings: list[list[int]]
) -> Iterator[tuple[str, Tensor]]:
    for at, (group, between) in enumerate(zip(shapes, paddings, strict=True)):
        flat, start = torch.cat([rank[at].detach().view(-1) for rank in ranks]), 0
        for (name, shape), gap in zip(group.items(), between, strict=True):
            size = math.prod(shape)
            yield name, flat.narrow(0, start, size).view(tuple(shape)).clone()
            start += size + gap


def _by_parameter(shapes: list[Mapping[str, torch.Size]], ranks: list[list[Tensor]]) -> Iterator[tuple[str, Tensor]]:
    flats, start = [torch.cat([flat.detach().view(-1) for flat in rank]) for rank in ranks], 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        size = math.prod(shape)
        part = -(-size // len(ranks))
        yield name, torch.cat([flat.narrow(0, start, part) for flat in flats])[:size].view(tuple(shape)).clone()
        start += part


def _frozen(models: list[Any], ranks: int) -> dict[str, Tensor]:
    shapes = models[0].get("frozen_param_shapes") or {}
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        parts = [model["frozen_param_fragments"][name].detach().view(-1) for model in models[:ranks]]
        found[name] = torch.cat(parts)[: math.prod(shape)].view(tuple(shape)).clone()
    return found


def _shared(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = model.get("shared_params") or {}
    return [tuple(pair) for pair in (pairs.items() if isinstance(pairs, dict) else pairs)]
