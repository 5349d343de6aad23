"""Room: what a person gives as settings (arguments, options, a file) to one frozen value, or to one error.

The error names the setting, the value, the line where there is a file, and what to do: pydantic's own never gets out.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from worldsize.errors import ConfigError
from worldsize.launch.yamlfile import Settings, load

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from pydantic_core import ErrorDetails

_OURS = "worldsize"
Path = tuple[str | int, ...]


class SettingError(ConfigError):
    """One setting is wrong; `path` leads to it: ("env", "A")."""

    path: Path = ()


class Given(BaseModel):
    """A frozen value made of settings. `-` and `_` are alike in their names; None and "" leave the default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    NAME: ClassVar[str] = "settings"
    """What the whole is called in an error."""
    HIDDEN: ClassVar[frozenset[str]] = frozenset()
    """Settings whose values no error may show."""

    if not TYPE_CHECKING:  # type checkers see a parameter for each field

        def __init__(self, **given: object) -> None:
            try:
                super().__init__(**given)
            except ValidationError as error:
                raise _told(type(self), error) from None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Make it from a mapping; one that was read from a file gives its lines to the error.

        Raises:
            ConfigError: a setting is unknown, wrong, or contradicts another.
        """
        try:
            return cls(**_named(cls, given))
        except SettingError as error:
            if not isinstance(given, Settings):
                raise
            raise ConfigError(f"{_place(given, error.path)}: {error.what}", found=error.found, do=error.do) from None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Make it from a YAML file.

        Raises:
            ConfigError: the file cannot be read, or as `of`.
        """
        return cls.of(load(path))

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None and value != ""}


@cache
def described(model: type[BaseModel]) -> Mapping[str, str]:
    """The docstring under each field. Read from the source when help is asked for: pydantic does at every start, for 40 ms."""
    module = sys.modules[model.__module__]
    tree = ast.parse("".join(linecache.getlines(inspect.getfile(model), vars(module))))
    body = next(
        (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == model.__name__), []
    )
    return {
        field.target.id: inspect.cleandoc(told.value.value)
        for field, told in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(told, ast.Expr) and isinstance(told.value, ast.Constant) and isinstance(told.value.value, str)
    }


def refuse(what: str, *, do: str, found: str | None = None, key: str | None = None) -> NoReturn:
    """Refuse a value while it is validated: the error above this says the rest.

    Args:
        what: goes on after the name of the setting; a whole sentence where several settings disagree.
        do: what to do about it.
        found: the values, where the setting's own is not enough.
        key: the setting to point at, where several disagree.
    """
    raise PydanticCustomError(_OURS, "{what}", {"what": what, "do": do, "found": found, "key": key})


def nearest(name: str, names: Iterable[str]) -> str:
    """What to do about a name that is not among `names`: the nearest one, or all where none is near."""
    import difflib

    known = list(names)
    near = difflib.get_close_matches(name, known, n=1)
    return f"write {near[0]}, if that is meant" if near else f"choose from {', '.join(known)}"


def _named(model: type[Given], given: Mapping[str, Any]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name in names:
            error = SettingError(f"{model.NAME}: {name} is said twice", do="say it once; - and _ are alike")
            error.path = (key,)
            raise error
        names[name] = value
    return names


def _place(given: Settings, path: Path) -> str:
    """Settings may be written with - for _ there."""
    spelt = {key.replace("-", "_"): key for key in given}
    return given.place((spelt.get(str(path[0]), path[0]), *path[1:]) if path else path)


def _told(model: type[Given], error: ValidationError) -> SettingError:
    first, *others = error.errors(include_url=False)
    path: Path = tuple(first["loc"])
    ctx = first.get("ctx", {})
    what, do = _words(model, first)
    name = ".".join(map(str, path))
    found = ctx.get("found") if first["type"] == _OURS else None
    if found is None and path and path[0] not in model.HIDDEN and first["type"] not in {"missing", "extra_forbidden"}:
        found = repr(first["input"])
    also = ", ".join(str(other["loc"][0]) for other in others if other["loc"])
    told = SettingError(
        f"{model.NAME}: {name} {what}" if name else f"{model.NAME}: {what}",
        found=found,
        do=f"{do}; wrong as well: {also}" if also else do,
    )
    told.path = path or ((ctx["key"],) if ctx.get("key") else ())
    return told


def _words(model: type[Given], error: ErrorDetails) -> tuple[str, str]:
    kind, ctx = error["type"], error.get("ctx", {})
    if kind == _OURS:
        return str(ctx["what"]), str(ctx["do"])
    if kind == "extra_forbidden":
        return "is no setting", nearest(str(error["loc"][0]), model.model_fields)
    if kind == "missing":
        return "is not set", "give it"
    return f"is refused: {error['msg']}", "see its description"
