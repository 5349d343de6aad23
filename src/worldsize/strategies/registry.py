"""Room: which strategies there are. A new one is a file and a line here, or an entry point of another package."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError

if TYPE_CHECKING:
    from worldsize.strategies.base import Setting, Strategy

_KNOWN = {
    "single": "worldsize.strategies.single:Single",
    "ddp": "worldsize.strategies.ddp:DDP",
    "fsdp": "worldsize.strategies.fsdp:FSDP",
    "hsdp": "worldsize.strategies.fsdp:HSDP",
    "horovod": "worldsize.strategies.horovod:Horovod",
    "deepspeed": "worldsize.strategies.deepspeed.strategy:DeepSpeed",
    "zero0": "worldsize.strategies.deepspeed.strategy:Zero0",
    "zero1": "worldsize.strategies.deepspeed.strategy:Zero1",
    "zero2": "worldsize.strategies.deepspeed.strategy:Zero2",
    "zero3": "worldsize.strategies.deepspeed.strategy:Zero3",
}

_WITH_TENSORS = {
    "single": "worldsize.strategies.tensor:Tensor",
    "ddp": "worldsize.strategies.fsdp:Copies",
    "fsdp": "worldsize.strategies.fsdp:FSDP",
    "hsdp": "worldsize.strategies.fsdp:HSDP",
}


def find(name: str) -> type[Strategy]:
    """The strategy of that name, imported now. Raises ConfigError naming the known ones."""
    if name in _KNOWN:
        module, _, attribute = _KNOWN[name].partition(":")
        found: type[Strategy] = getattr(import_module(module), attribute)
        return found
    foreign = {point.name: point for point in entry_points(group="worldsize.strategies")}
    if name in foreign:
        loaded: type[Strategy] = foreign[name].load()
        return loaded
    raise ConfigError(f"strategy {name!r} is not known", do=f"choose one of {', '.join([*_KNOWN, *sorted(foreign)])}")


def make(name: str, setting: Setting) -> Strategy:
    """The strategy of that name, where it is to work.

    Raises:
        ConfigError: sizes are asked for that it does not have.
    """
    sizes = setting.sizes
    if sizes.cp > 1 and sizes.pp > 1:
        raise ConfigError(
            "sequences are not split in a pipeline",
            found=f"cp={sizes.cp}, tp={sizes.tp}, pp={sizes.pp}",
            do="choose one of them, with fsdp",
        )  # fmt: skip
    if sizes.replicas is not None and name != "hsdp":
        raise ConfigError(
            f"strategy {name!r} has no replicas of shards", found=f"replicas={sizes.replicas}", do="use hsdp"
        )
    if sizes.pp > 1:
        return _staged(name, setting)
    if sizes.cp * sizes.tp == 1:
        return find(name)(setting)
    return _with_tensors("ddp" if name == "single" and sizes.cp > 1 else name, setting)


def _staged(name: str, setting: Setting) -> Strategy:
    from worldsize.strategies.pipeline.strategy import Pipeline
    from worldsize.strategies.ranked import Ranked

    if name not in _WITH_TENSORS:
        find(name)
        raise ConfigError(
            f"strategy {name!r} lays out whole models only",
            found=f"pp={setting.sizes.pp}",
            do=f"use pp with {', '.join(_WITH_TENSORS)}",
        )
    if setting.sizes.tp == 1 and name in ("single", "ddp"):
        return Pipeline(setting)
    inner = _with_tensors(name, setting) if setting.sizes.tp > 1 else find(name)(setting)
    assert isinstance(inner, Ranked), name
    return Pipeline(setting, inner)


def _with_tensors(name: str, setting: Setting) -> Strategy:
    if name not in _WITH_TENSORS:
        find(name)
        raise ConfigError(
            f"strategy {name!r} lays out whole tensors only: it would exchange parts of gradients as if they were whole",
            found=f"tp={setting.sizes.tp}, cp={setting.sizes.cp}",
            do=f"use tp and cp with {', '.join(_WITH_TENSORS)}",
        )
    module, _, attribute = _WITH_TENSORS[name].partition(":")
    made: Strategy = getattr(import_module(module), attribute)(setting)
    return made


def default(ranks: int) -> str:
    """The strategy where none is named."""
    return "single" if ranks == 1 else "ddp"
