"""Room: options of a command made from the fields of a model: one typed definition for Python, YAML and the shell."""

from __future__ import annotations

import types
import typing
from functools import partial
from typing import TYPE_CHECKING, Any, Union

import click

from worldsize.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from pydantic import BaseModel


DEBUG = {
    "nccl": {"NCCL_DEBUG": "INFO", "TORCH_DISTRIBUTED_DEBUG": "INFO", "TORCH_CPP_LOG_LEVEL": "INFO"},
}
"""What of a job may be asked to say more -> the variables that make it. Under DETAIL, DDP of torch 2.13 ends in a fault."""
debug = click.option(
    "--debug",
    multiple=True,
    type=click.Choice(list(DEBUG)),
    help="Say more, into the ranks' logs: nccl: connections, collectives and their agreement.",
)


def debugged(parts: Iterable[str]) -> dict[str, str]:
    """The variables for the parts that `--debug` names."""
    return {name: value for part in parts for name, value in DEBUG[part].items()}


class _Seconds(click.ParamType[float]):
    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds."""
        from worldsize.launch.plan import seconds

        try:
            return value if isinstance(value, float) else seconds(str(value))
        except ConfigError as error:
            self.fail(str(error), param, ctx)


SECONDS = _Seconds()
"""A length of time: 30, 500ms, 2m, 1h."""


class _Setting(click.Option):
    """A field of a model as an option; its words are read where somebody asks for help."""

    def __init__(self, *names: Any, model: type[BaseModel], **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.model = model

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The option, and the first line of the field's docstring."""
        from worldsize.launch.given import described

        self.help = described(self.model).get(str(self.name), "").split("\n", 1)[0]
        return super().get_help_record(ctx)


def from_model(
    model: type[BaseModel], *, leave_out: Collection[str] = (), flags_take_values: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that gives a command an option for each field; what was not given comes as None or ().

    Fields that are mappings take NAME=VALUE, several times; tuples take one value each time. Values are text here: the
    model says what they mean, and refuses what it cannot read. Flags are `--name/--no-name`, or with `flags_take_values`
    `--name true|false`.
    """
    made = [
        _option(model, name, field, valued=flags_take_values)
        for name, field in model.model_fields.items()
        if name not in leave_out
    ]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(made):
            function = option(function)
        return function

    return decorate


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, with NAME=VALUE pairs as mappings."""
    return {name: value for name, value in options.items() if value is not None and value != ()}


def over(settings: dict[str, Any], options: dict[str, Any]) -> None:
    """Put the options that were given in the place of a file's settings of the same names, in which `-` and `_` are alike."""
    asked = given(options)
    for name in [name for name in settings if name not in asked and str(name).replace("-", "_") in asked]:
        del settings[name]
    settings |= asked


def pairs(values: tuple[str, ...], name: str) -> dict[str, str]:
    """NAME=VALUE words as a mapping. Raises click.BadParameter on another word."""
    wrong = next((word for word in values if "=" not in word), None)
    if wrong is not None:
        raise click.BadParameter(f"{wrong!r} is not NAME=VALUE", param_hint=f"--{name}")
    return {word.partition("=")[0]: word.partition("=")[2] for word in values}


def _option(model: type[BaseModel], name: str, field: Any, *, valued: bool) -> Any:
    flag, kind = f"--{name.replace('_', '-')}", _kind(field.annotation)
    option = partial(click.option, cls=_Setting, model=model)
    if kind is bool and valued:
        return option(flag, name, is_flag=False, flag_value="true", metavar="true|false")
    if kind is bool:
        return option(f"{flag}/--no-{flag[2:]}", name, default=None)
    if kind is dict:
        return option(flag, name, multiple=True, metavar="NAME=VALUE")
    return option(flag, name, multiple=kind is tuple, metavar=_metavar(kind))


def _kind(annotation: Any) -> Any:
    origin = typing.get_origin(annotation)
    if origin in (Union, types.UnionType):
        kinds = [_kind(part) for part in typing.get_args(annotation) if part is not type(None)]
        return kinds[0]
    if origin is typing.Annotated:
        return _kind(typing.get_args(annotation)[0])
    if origin is not None and isinstance(origin, type):
        return dict if issubclass(origin, typing.Mapping) else tuple if issubclass(origin, tuple) else str
    return annotation if annotation in (bool, int) else str


def _metavar(kind: Any) -> str:
    return "N" if kind is int else "TEXT"
