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
    "horovod": "worldsize.strategies.horovod:Horovod",
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
    """The strategy of that name, where it is to work."""
    return find(name)(setting)


def default(ranks: int) -> str:
    """The strategy where none is named."""
    return "single" if ranks == 1 else "ddp"
