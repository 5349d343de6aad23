"""Room: a command line that no shell will read: its words as a shell would split them, or a refusal where only a shell could.

Quotes and backslashes mean what they mean there. Nothing is expanded, so what a shell would expand or obey is refused
where it stands bare: it would reach the program as it is written, and that is never what was meant.
"""

from __future__ import annotations

import re

from worldsize.errors import ConfigError

_PIECES = re.compile(
    r"(?P<joined>\\\n)|\\(?P<escaped>.)|'(?P<single>[^']*)'|\"(?P<double>(?:\\.|[^\"\\])*)\"|(?P<blank>[ \t\n]+)|(?P<bare>.)",
    re.DOTALL,
)
_SHELLS = frozenset("$`;|&<>()*~")
_OPEN = frozenset("'\"\\")


def words(line: str) -> tuple[str, ...]:
    """Split a command line.

    Raises:
        ConfigError: a quote is not closed, or there is something that only a shell could read.
    """
    found: list[str] = []
    word: str | None = None
    for piece in _PIECES.finditer(line.strip(" \t\n")):
        kind = piece.lastgroup or ""
        if kind == "blank":
            found += [word] if word is not None else []
            word = None
        elif kind != "joined":
            word = (word or "") + _read(kind, piece[kind], line)
    return (*found, word) if word is not None else tuple(found)


def _read(kind: str, text: str, line: str) -> str:
    if kind == "bare" and text in _OPEN:
        raise ConfigError("a quote is not closed", found=line, do="close it, or put a backslash before it")
    obeyed = [text] if kind == "bare" and text in _SHELLS else []
    if kind == "double":
        obeyed = re.findall(r"[$`]", re.sub(r"\\.", "", text, flags=re.DOTALL))
        text = re.sub(r'\\(["\\$`\n])', lambda found: found[1].strip("\n"), text)
    if obeyed:
        raise ConfigError(
            f"{obeyed[0]} would need a shell, and none reads this line",
            found=line,
            do="put single quotes around it if it is meant as it stands, or write the line as exec_command",
        )
    return text
