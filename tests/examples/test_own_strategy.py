"""A strategy of another package, found through its entry point."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

import pytest

from tests.examples.programs import PYTHON, ROOT, call

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLE = ROOT / "examples" / "own_strategy"


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """As pip leaves the package in a folder of the import path."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    facts = tmp_path / "flat_sum-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    points = [
        f"[{group}]\n{name} = {value}\n"
        for group, found in project["entry-points"].items()
        for name, value in found.items()
    ]
    (facts / "entry_points.txt").write_text("".join(points))
    (tmp_path / "flat_sum.py").symlink_to(EXAMPLE / "flat_sum.py")
    return {"PYTHONPATH": str(tmp_path)}


def test_it_trains_the_same_curve(installed: dict[str, str], tmp_path: Path) -> None:
    """As one process does, on two ranks and on three, where one of them has fewer micro-batches."""
    words = ("-m", "worldsize", "verify", "parity", "--layouts", "single,flat:2,flat:3")
    script = ROOT / "examples" / "strategies" / "train.py"
    ended = call(*PYTHON, *words, script, "--", "--epochs", "1", cwd=tmp_path, env=installed)
    assert ended.code == 0, ended.text
    assert "all 2 agree" in ended.text


def test_without_it_the_name_is_not_known(tmp_path: Path) -> None:
    """And the known ones are named."""
    script = ROOT / "examples" / "strategies" / "train.py"
    ended = call(*PYTHON, script, "-s", "flat", cwd=tmp_path)
    assert ended.code != 0
    assert "strategy 'flat' is not known" in ended.text
