"""Room: which layouts are worth a look for so many GPUs, and what is run for those that cannot be run without values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError
from worldsize.tools.trial import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

BY_FORMULA = ("zero0", "zero1", "zero2", "zero3", "deepspeed", "horovod")
"""Engines of their own, in which tensors without memory cannot lie: ddp is run, and a formula does the rest."""


def usual(gpus: int, local: int) -> list[Layout]:
    """The layouts that are looked at where none is named.

    Args:
        gpus: how many there are.
        local: on a node.
    """
    if gpus == 1:
        return [Layout("single", 1)]
    found = ["ddp", "fsdp", *(["hsdp"] if gpus > local > 1 else []), "zero1", "zero2", "zero3", "horovod"]
    tensor = [size for size in (2, 4, 8) if size <= local and not local % size and gpus > size]
    found += [f"fsdp+tp{size}" for size in tensor] + ([f"tp{gpus}"] if gpus <= local else [])
    stages = [size for size in (2, 4, 8) if not gpus % size]
    found += [f"pp{size}" for size in stages] + [f"fsdp+pp{size}" for size in stages if gpus > size]
    found += [
        f"fsdp+tp{local}+pp{size}"
        for size in stages[:2]
        if local > 1 and gpus > local * size and not gpus % (local * size)
    ]
    return [replace(Layout.parse(text), ranks=gpus) for text in found]


def named(text: str, gpus: int) -> list[Layout]:
    """Layouts that a person names: "fsdp,fsdp+tp2,pp4"; each over all GPUs, unless it says another number.

    Raises:
        ConfigError: one of them is none.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ConfigError("no layout is named", found=repr(text), do="write fsdp,fsdp+tp2, or leave --layouts out")
    found = [Layout.parse(word if ":" in word else f"{word}:{1 if word == 'single' else gpus}") for word in words]
    return list(dict.fromkeys(found))


def local_of(layout: Layout, local: int) -> int:
    """Ranks of a node under this layout. Raises ConfigError where the nodes would not be alike."""
    if layout.ranks <= local:
        return layout.ranks
    if layout.ranks % local:
        raise ConfigError(
            "the GPUs do not fill whole nodes", found=f"{layout.ranks} in nodes of {local}", do="give --gpus-per-node"
        )
    return local


def asked(layout: Layout) -> Layout:
    """The layout that is run for it."""
    return replace(layout, strategy="ddp") if layout.strategy in BY_FORMULA else layout


def strategies(layouts: Sequence[Layout]) -> list[str]:
    """The names, each once."""
    return list(dict.fromkeys(layout.strategy for layout in layouts))
