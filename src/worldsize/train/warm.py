"""Room: beginning a run with weights from elsewhere: values only, by bare names; nothing of an optimizer or a position."""

from __future__ import annotations

from contextlib import suppress
from fnmatch import fnmatch
from typing import TYPE_CHECKING

import torch

from worldsize.checkpoint import foreign, weights
from worldsize.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import nn

    from worldsize.runtime.comm import Comm
    from worldsize.train.parts import Placed


def start(
    placed: Placed,
    source: Path,
    comm: Comm,
    *,
    strict: bool = True,
    fresh: str | None = None,
    trust: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Copy weights into a placed model, each rank its own part. Collective.

    Args:
        placed: a model.
        source: whatever `checkpoint.weights.read_weights` understands; of a checkpoint of ours, the part of the model's name.
        comm: the other ranks, which may hold parameters of other names.
        strict: names must fit, with the prefixes of wrappers taken off.
        fresh: a pattern of names that the source need not have (`*.lora_*`).
        trust: allow unpickling.
        say: is told what stays behind.

    Returns:
        names that stayed as they were.

    Raises:
        CheckpointError: names or shapes do not fit, with counts and examples; or ranks do not see the same source.
    """
    live = placed.strategy.state(placed.module)
    told: list[str] = []
    found = foreign.open_weights(source, trust=trust, say=told.append)
    met = comm.gather((sorted(live), _ties(placed.module), [line.replace(str(source), "") for line in told]))
    _refuse_differing(source, [lines for *_, lines in met])
    for line in told:
        say(line)
    everywhere = {name for names, *_ in met for name in names}
    ties = [list(tie) for tie in dict.fromkeys(tuple(tie) for _, held, _ in met for tie in held)]
    spared = {name for name in everywhere if fresh and fnmatch(name, fresh)}
    there = {name: name for name in found.facts}
    names = (
        _names(source, placed.name, there, everywhere - spared, ties)
        if strict
        else _part(there, placed.name) or there
    )
    given = names.keys() | {name for tie in ties if names.keys() & set(tie) for name in tie}
    missing, unknown = sorted(everywhere - given), sorted(names.keys() - everywhere)
    lacking = [name for name in missing if name not in spared]
    if strict and (lacking or unknown):
        raise CheckpointError(
            "these weights are not of this model",
            found=f"{len(lacking)} names missing {lacking[:3]}, {len(unknown)} unknown {unknown[:3]}",
            do="rename them, or strict=False to take what fits",
        )
    with torch.no_grad():
        found.fill({names[name]: tensor for name, tensor in live.items() if name in names})
    placed.strategy.filled(placed.module, live)
    return missing


def _refuse_differing(source: Path, told: list[list[str]]) -> None:
    """What passes over an incomplete folder does so on every rank: hosts may see different files under one path."""
    for rank, lines in enumerate(told):
        if lines != told[0]:
            raise CheckpointError(
                f"ranks do not see the same weights in {source}",
                found="; ".join((*_by(0, told[0]), *_by(rank, lines))),
                do="copy all of it to every host, or to where all of them see it",
            )


def _by(rank: int, told: list[str]) -> list[str]:
    return [f"rank {rank} {line}" for line in told or ["reads it without a word"]]


def _names(
    source: Path, model: str, there: Mapping[str, str], wanted: set[str], ties: list[list[str]]
) -> Mapping[str, str]:
    """The model's names -> those of the source, which may have the first or the last alone of names that are tied."""
    if own := _part(there, model):
        return own
    for kept in (0, -1) if ties else ():
        once = wanted.difference(*({name for name in tie if name != tie[kept]} for tie in ties))
        with suppress(CheckpointError):
            return weights.fitting(source, there, once)
    return weights.fitting(source, there, wanted)


def _part(there: Mapping[str, str], model: str) -> dict[str, str]:
    """Of a checkpoint of ours, what is the model's."""
    return {name.removeprefix(f"{model}/"): each for name, each in there.items() if name.startswith(f"{model}/")}


def _ties(module: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, value in module.named_parameters(remove_duplicate=False):
        names.setdefault(value, []).append(name)
    return [group for group in names.values() if len(group) > 1]
