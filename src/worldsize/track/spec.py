"""Room: which trackers are wanted, as a program or a command line says it; and which there are. No library."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from worldsize.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from worldsize.track.base import Library, Training

_KNOWN = {
    "tensorboard": "worldsize.track.tensorboard:TensorBoard",
    "mlflow": "worldsize.track.mlflow:MLflow",
    "wandb": "worldsize.track.wandb:WandB",
}
_GROUP = "worldsize.trackers"
_REQUIRED = "required"


@dataclass(frozen=True, init=False)
class Track:
    """A tracker by its name.

    Attributes:
        name: tensorboard, mlflow, wandb, or one of another package.
        required: end the training where it fails, instead of warning and going on.
        hold: seconds. A tracker that cannot take numbers back gets those of a step when a checkpoint has it, or after
            this time; a step that is made again after that keeps its first numbers there.
        options: what its class takes by name, such as `uri` and `experiment` of mlflow.
    """

    name: str
    required: bool = False
    hold: float = 600.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __init__(self, name: str, *, required: bool = False, hold: float = 600.0, **options: Any) -> None:
        for attribute, value in (("name", name), ("required", required), ("hold", hold), ("options", options)):
            object.__setattr__(self, attribute, value)
        if name not in _KNOWN and name not in _foreign():
            raise ConfigError(f"tracker {name!r} is not known", do=f"choose from {', '.join([*_KNOWN, *_foreign()])}")


def parse(said: str | Track | Iterable[str | Track]) -> tuple[Track, ...]:
    """From "mlflow,wandb:required", or from names and `Track` objects; "none" is nothing.

    Raises:
        ConfigError: a name is not known, or comes twice.
    """
    words: Iterable[str | Track] = (
        [said] if isinstance(said, Track) else said.split(",") if isinstance(said, str) else said
    )
    found = tuple(each if isinstance(each, Track) else _word(each) for each in words if each not in ("none", ""))
    names = [each.name for each in found]
    if len(set(names)) < len(names):
        raise ConfigError("a tracker is named twice", found=", ".join(names))
    return found


def override(program: tuple[Track, ...], said: str) -> tuple[Track, ...]:
    """The trackers that a command line names, with the options that the program gives to those of the name."""
    given = {each.name: each for each in program}
    return tuple(
        each if each.name not in given else Track(
            each.name, required=each.required or given[each.name].required, hold=given[each.name].hold,
            **given[each.name].options,
        )
        for each in parse(said)
    )  # fmt: skip


def start(track: Track, training: Training) -> Library:
    """Import the library and open its place for the run.

    Raises:
        MissingExtraError: it is not installed.
        ConfigError: it has no such option.
    """
    make: Callable[..., Library] = _find(track.name)
    try:
        return make(training, **track.options)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ConfigError(f"tracker {track.name!r} has no such option", found=str(error)) from error


def _find(name: str) -> Any:
    if name in _KNOWN:
        module, _, attribute = _KNOWN[name].partition(":")
        return getattr(import_module(module), attribute)
    return _foreign()[name].load()


def _foreign() -> dict[str, Any]:
    return {point.name: point for point in entry_points(group=_GROUP)}


def _word(text: str) -> Track:
    name, colon, how = text.strip().partition(":")
    if colon and how != _REQUIRED:
        raise ConfigError(f"tracker {text!r}", do=f"write {name}, or {name}:{_REQUIRED}")
    return Track(name, required=bool(colon))
