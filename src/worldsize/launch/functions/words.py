"""Room: a configuration's fields as options of a command line, made from the dataclass."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from typing import TYPE_CHECKING, Any, Literal

import click

from worldsize.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

PREFIX = "slurm"
_ATTRIBUTE = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def read(model: type, argv: Sequence[str], *, strict: bool = True) -> tuple[dict[str, Any], list[str]]:
    """The fields that `argv` gives, as `--name` or `--slurm.name` with - and _ alike, and the other words.

    Args:
        model: a dataclass whose docstring says what each attribute is.
        argv: the words.
        strict: other words are refused.

    Raises:
        ConfigError: an option is unknown, or its value is none.
        SystemExit: help was asked for, and printed.
    """
    settings: dict[str, Any] = {} if strict else {"ignore_unknown_options": True, "allow_extra_args": True}
    settings |= {"max_content_width": 120, "token_normalize_func": _spelt}
    command = click.Command("", params=_options(model), context_settings=settings)
    try:
        with command.make_context(inspect.cleandoc(model.__name__), list(argv)) as context:
            given = {name: value for name, value in context.params.items() if value not in (None, ())}
            return {name: _value(value) for name, value in given.items()}, list(context.args)
    except click.exceptions.Exit as end:
        raise SystemExit(end.exit_code) from None
    except click.UsageError as error:
        raise ConfigError(f"{model.__name__}: {error.format_message().rstrip('.')}", do="see --help") from None


def _options(model: type) -> list[click.Parameter]:
    told = dict(_ATTRIBUTE.findall(inspect.getdoc(model) or ""))
    hints = typing.get_type_hints(model)
    return [_option(each.name, hints[each.name], told.get(each.name, "")) for each in dataclasses.fields(model)]


def _option(name: str, hint: Any, told: str) -> click.Option:
    flag = f"--{_spelt(name)}"
    text, origin = " ".join(told.split()), typing.get_origin(hint)
    if hint is bool:
        return click.Option([f"{flag}/--no-{_spelt(name)}", name], default=None, help=text)
    if origin is Literal:
        return click.Option([flag, name], type=click.Choice(typing.get_args(hint)), help=text)
    if origin is dict:
        return click.Option([flag, name], multiple=True, type=_Pair(), help=text)
    if origin is list:
        return click.Option([flag, name], multiple=True, help=text)
    kinds = typing.get_args(hint) if origin in (typing.Union, types.UnionType) else (hint,)
    return click.Option([flag, name], type=int if int in kinds else str, help=text)


class _Pair(click.ParamType[tuple[str, str]]):
    name = "NAME=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        name, equal, text = value.partition("=")
        if not equal:
            self.fail(f"{value!r} is not NAME=VALUE", param, ctx)
        return name, text


def _value(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    return dict(value) if isinstance(value[0], tuple) else list(value)


def _spelt(word: str) -> str:
    """A name as options have it: `slurm.job_name` is `job-name`."""
    return word.removeprefix(f"{PREFIX}.").replace("_", "-")
