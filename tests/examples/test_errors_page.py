"""Room: docs/errors.md names every error, exit code, signal and ending that there is."""

from __future__ import annotations

import ast
import importlib
import re
from typing import TYPE_CHECKING

import pytest

from tests.examples.programs import ROOT
from worldsize.errors import WorldsizeError
from worldsize.launch import failure
from worldsize.launch.endings import Ending

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
ROWS = {
    row[0].strip("` "): row
    for line in PAGE.splitlines()
    if line.startswith("| ")
    for row in [line.strip("|").split("|")]
}
SOURCE = ROOT / "src"
NODES = {file: list(ast.walk(ast.parse(file.read_text(encoding="utf-8")))) for file in SOURCE.rglob("*.py")}
"""File -> its module, and all that is in it."""
EXITS = {("sys", "exit"), ("os", "_exit")}


def classes() -> dict[str, Path]:
    """Every class of the package that is a WorldsizeError, and the file where it stands."""
    defined = [(node, file) for file, nodes in NODES.items() for node in nodes if isinstance(node, ast.ClassDef)]
    bases = {node.name: {base.id for base in node.bases if isinstance(base, ast.Name)} for node, _ in defined}
    found = {WorldsizeError.__name__}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return {node.name: file for node, file in defined if node.name in found}


def codes() -> Iterator[int]:
    """Every code with which a command ends by its own decision: constants named EXIT_..., and what is given to an exit."""
    for tree, *inside in NODES.values():
        assert isinstance(tree, ast.Module)
        calls = exits(inside)
        known = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and type(node.value.value) is int
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        yield from (value for name, value in known.items() if name.startswith("EXIT_"))
        words = {word.id for call in calls for word in ast.walk(call) if isinstance(word, ast.Name)}
        yield from (value for name, value in known.items() if name in words or name in {"_TIMED_OUT", "_INTERRUPTED"})
        given = [word.value for call in calls for word in call.args if isinstance(word, ast.Constant)]
        yield from (value for value in given if isinstance(value, int))


def exits(nodes: list[ast.AST]) -> list[ast.Call]:
    """Calls of sys.exit and os._exit."""
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id, call.func.attr) in EXITS
    ]


@pytest.mark.parametrize(("name", "file"), sorted(classes().items()))
def test_every_error_has_a_row(name: str, file: Path) -> None:
    """With the code that it ends a program with, a cause and a cure."""
    module = importlib.import_module(".".join(file.relative_to(SOURCE).with_suffix("").parts))
    _, code, *texts = ROWS[name]
    assert int(code) == getattr(module, name).exit_code
    assert all(text.strip() for text in texts), name


@pytest.mark.parametrize("code", sorted({*codes(), *failure._CODES}))
def test_every_exit_code_has_a_row(code: int) -> None:
    """What a shell sees."""
    assert str(code) in ROWS


@pytest.mark.parametrize("number", list(failure._SIGNALS))
def test_every_signal_has_a_row(number: int) -> None:
    """With the code that a shell sees, and what to do."""
    name = failure.from_code(-number, "")[0].split()[2].rstrip(":")
    assert int(ROWS[name][1]) == failure.SIGNALLED + number
    assert ROWS[name][3].strip()


@pytest.mark.parametrize("ending", list(Ending))
def test_every_ending_has_a_row(ending: Ending) -> None:
    """And says rightly whether another attempt follows."""
    again = ROWS[ending.value][2].strip()
    assert again.startswith("yes") == ending.retry, again


def test_the_line_of_a_run_out_of_memory_is_as_the_page_says() -> None:
    """Its parts are in the page's example."""
    (example,) = re.findall(r"^worldsize: rank .* out of GPU memory .*$", PAGE, re.MULTILINE)
    for part in ("micro_batch 8 of global_batch 96", "length 2048", "ddp on 2 rank(s)", "Do: lower micro_batch"):
        assert part in example
