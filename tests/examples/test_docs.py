"""Room: README and docs are run: programs as the files they name, commands in their order, other blocks as written."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import click
import pytest

from tests.examples.programs import PYTHON, ROOT, call
from worldsize.cli.main import commands

if TYPE_CHECKING:
    from pathlib import Path

README = ROOT / "README.md"
PAGES = sorted((README, *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")))
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ELSEWHERE = ("README.md", "architecture.md")
BEFORE = """
import os, sys, torch
import torch.nn.functional as F
from torch import nn
import worldsize as ws

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(64, 10)
    def forward(self, x):
        return self.last(x.flatten(1))

images, labels = torch.rand(96, 1, 8, 8), torch.arange(96) % 10
train_set = val_set = torch.utils.data.TensorDataset(images, labels)
"""


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """(file name or "", text) of every block in that language."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(name, text) for kind, name, text in found if kind == language]


def test_readme_is_true(tmp_path: Path) -> None:
    """The tour of the README runs as written; each of its trainings goes one epoch further than the one before."""
    programs = dict(blocks(README, "python"))
    parts = programs["train.py"].partition("ws.Trainer(")[0]
    (tmp_path / "train.py").write_text(programs["train.py"], encoding="utf-8")
    (tmp_path / "loop.py").write_text(parts + programs["loop.py"], encoding="utf-8")
    tour = [text for _, text in blocks(README, "bash")]
    for epochs, text in enumerate([*tour, "python loop.py"], start=1):
        ended = call("bash", "-ec", text, cwd=tmp_path, env={"WORLDSIZE_DURATION": f"{epochs}ep"})
        assert ended.code == 0, ended.text
        assert ("going on from" in ended.text) == text.startswith("worldsize run"), ended.text
    assert (tmp_path / "runs" / "digits" / "checkpoints" / "step-00000045").is_dir()


def test_function_of_the_readme_runs(tmp_path: Path) -> None:
    """The README's job gives what its comment says; here as processes of this machine."""
    text = dict(blocks(README, "python"))["square.py"]
    (tmp_path / "square.py").write_text(text.replace('mode="slurm"', 'mode="local"', 1), encoding="utf-8")
    ended = call(*PYTHON, "square.py", cwd=tmp_path)
    said = "0 [0, 10, 20, 30]"
    assert f"# {said}:" in text
    assert f"{said}\n" in ended.text, ended.text


@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if page.name not in _ELSEWHERE and page.parent.name != "coming-from" and blocks(page, "python")
    ],
    ids=lambda page: page.name,
)
def test_python_of_the_docs_runs(page: Path, tmp_path: Path) -> None:
    """Every Python block of the docs runs by itself."""
    for number, (_, text) in enumerate(blocks(page, "python")):
        (tmp_path / f"block{number}.py").write_text(BEFORE + text, encoding="utf-8")
        ended = call(*PYTHON, f"block{number}.py", cwd=tmp_path)
        assert ended.code == 0, f"{text}\n{ended.text}"


def lines(page: Path) -> list[str]:
    """Every `worldsize ...` command in a page's shell blocks, continued lines joined."""
    texts = [text.replace("\\\n", " ") for kind in ("sh", "bash") for _, text in blocks(page, kind)]
    found = [line.partition("worldsize ")[2] for text in texts for line in text.splitlines() if "worldsize " in line]
    return [line for line in found if line]


@pytest.mark.parametrize("page", [page for page in PAGES if lines(page)], ids=lambda page: page.name)
def test_commands_of_the_docs_are_understood(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command line in the docs names a command and options that exist."""
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/digits", "given"):
        (tmp_path / folder).mkdir(parents=True)
    for program in ("train.py", "loop.py", "script.py"):
        (tmp_path / program).touch()
    for line in lines(page):
        command: click.Command = commands
        words = shlex.split(line, comments=True)
        context = commands.make_context("worldsize", list(words))
        while isinstance(command, click.Group):
            inner = command.get_command(context, words[0])
            assert inner is not None, line
            command, words = inner, words[1:]
        command.make_context(command.name, words, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every link to a file of the project leads to one."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)  # code is no link
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
