"""Room: a YAML file of settings, read as it looks (YAML 1.2), and the line that each setting stands on.

`4:00` and `no` are text, `1e-4` is a number, and a number that is wanted as text is that text: `3.10` stays `3.10`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldsize.errors import ConfigError

if TYPE_CHECKING:
    import os

_TAG = "tag:yaml.org,2002:"


class Whole(int):
    """A whole number that knows how it was written."""

    written: str


class Real(float):
    """A decimal number that knows how it was written."""

    written: str


class Settings(dict[str, Any]):
    """The settings of one file.

    Attributes:
        path: the file.
        lines: the line of each setting by its path in the file: ("env", "A"), ("program", 0).
    """

    def __init__(self, path: Path, values: dict[str, Any], lines: dict[tuple[str | int, ...], int]) -> None:
        super().__init__(values)
        self.path, self.lines = path, lines

    def place(self, where: tuple[str | int, ...]) -> str:
        """The file and line of a setting, or of the nearest thing around it."""
        while where and where not in self.lines:
            where = where[:-1]
        return f"{self.path}, line {self.lines[where]}" if where else str(self.path)


def load(path: str | os.PathLike[str]) -> Settings:
    """Read a file of settings.

    Raises:
        ConfigError: it cannot be read, is no YAML mapping, or says a key twice; with the line.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    file = Path(path)
    try:
        root = YAML(typ="safe", pure=True).compose(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read", found=str(error), do="name a YAML file") from error
    except MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{file}{line} is no YAML", found=error.problem, do="mend it there") from error
    except YAMLError as error:
        raise ConfigError(f"{file} is no YAML", found=str(error), do="mend it there") from error
    return _Reader(file).settings(root)


class _Reader:
    """Values from the nodes of one file, and their lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[tuple[str | int, ...], int] = {}
        self.around: list[Any] = []

    def settings(self, root: Any) -> Settings:
        value = {} if root is None or root.tag == f"{_TAG}null" else self.value(root, ())
        if not isinstance(value, dict):
            raise self.refused(root, "is no mapping of settings", "write a setting and its value a line: nodes: 2")
        return Settings(self.path, value, self.lines)

    def value(self, node: Any, where: tuple[str | int, ...]) -> Any:
        if node in self.around:
            raise self.refused(node, "holds itself", "write the value out")
        self.around.append(node)
        read = {"mapping": self.mapping, "sequence": self.sequence}.get(node.id, self.scalar)
        value = read(node, where)
        self.around.pop()
        return value

    def mapping(self, node: Any, where: tuple[str | int, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in node.value:
            if name.id != "scalar" or name.value == "<<":
                raise self.refused(name, "has a key that is no plain text", "write the settings out")
            key = str(name.value)
            if key in values:
                first = self.lines[*where, key]
                raise self.refused(name, f"says {key} again", f"say it once; line {first} does already")
            self.lines[*where, key] = name.start_mark.line + 1
            values[key] = self.value(value, (*where, key))
        return values

    def sequence(self, node: Any, where: tuple[str | int, ...]) -> list[Any]:
        for at, item in enumerate(node.value):
            self.lines[*where, at] = item.start_mark.line + 1
        return [self.value(item, (*where, at)) for at, item in enumerate(node.value)]

    def scalar(self, node: Any, _: tuple[str | int, ...]) -> Any:
        text, kind = node.value, node.tag.removeprefix(_TAG)
        if kind in {"str", "timestamp"}:
            return text
        if kind not in {"null", "bool", "int", "float"}:
            raise self.refused(node, f"has the tag {node.tag}", "write plain text, numbers, lists and mappings")
        return _plain(kind, text)

    def refused(self, node: Any, what: str, do: str) -> ConfigError:
        return ConfigError(f"{self.path}, line {node.start_mark.line + 1} {what}", do=do)


def _plain(kind: str, text: str) -> Any:
    """What looks like text stays text, also where an older YAML sees a number in it (4:00) or a truth (no)."""
    if kind == "null":
        return None
    if kind == "bool":
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        number: Whole | Real = Whole(_int(text)) if kind == "int" else Real(_float(text))
    except ValueError:
        return text
    number.written = text
    return number


def _int(text: str) -> int:
    return int(text, 0) if text.lstrip("+-").lower().startswith(("0x", "0o")) else int(text)


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
