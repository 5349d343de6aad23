"""Every layout from the same client code: one curve (promise 1), one checkpoint (promise 3)."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration import program, stack
from tests.integration.stack import EVERY, MORE, ONE
from tests.pools import pool
from worldsize.checkpoint import manifest

if TYPE_CHECKING:
    from tests.integration.program import Curve

CUT = 3
"""After which of five steps of an epoch a run is stopped."""


def run(layout: str, folder: Path | None = None, **settings: Any) -> Curve:
    """The training in this layout, in a new folder where none is given."""
    with TemporaryDirectory() as new:
        where = folder or Path(new)
        return program.everyone(pool(program.ranks_of(layout)).run(stack.train, where, layout, **settings))


@cache
def single(duration: str = "2ep") -> Curve:
    """What one process does."""
    return run(ONE, duration=duration)


def bound(layout: str) -> float:
    """Relative, over a whole run in float64."""
    del layout
    return 1e-10


@pytest.mark.parametrize("layout", [*EVERY, *(pytest.param(each, marks=pytest.mark.matrix) for each in MORE)])
def test_every_layout_has_one_curve(layout: str) -> None:
    """Losses, gradient norms, rates, weights and the average of two epochs, and every id exactly."""
    found = run(layout)
    assert len(found.losses) == 2 * program.STEPS_PER_EPOCH
    program.close(single(), found, bound(layout))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of this layout that was stopped inside an epoch."""

    @cache
    def make(layout: str) -> Path:
        folder: Path = tmp_path_factory.mktemp("written")
        run(layout, folder, stop_after=CUT)
        return folder

    return make


def copied(source: Path, target: Path) -> Path:
    """A stopped run, to go on with."""
    name = manifest.folder_name(CUT)
    shutil.copytree(source / manifest.FOLDER / name, target / manifest.FOLDER / name)
    shutil.copy(source / "run.json", target)
    return target


PAIRS = (("ddp:2", "zero3:2"), ("zero3:2", "tp2:2"), ("tp2:2", "pp2+schedule=1f1b:2"), ("pp2+schedule=1f1b:2", ONE),
         ("fsdp:2", "horovod:2"), ("horovod:2", "pp2+schedule=interleaved1f1b:2"), ("zero1:2", "hsdp+replicas2:4"))  # fmt: skip
"""A chain through all engines."""


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_what_one_layout_wrote_another_goes_on_with(written: Any, tmp_path: Path, writer: str, reader: str) -> None:
    """Inside an epoch: ids, rates, losses and final weights of the undisturbed run."""
    after = run(reader, copied(written(writer), tmp_path))
    assert sorted(after.losses) == list(range(CUT, 2 * program.STEPS_PER_EPOCH))
    program.close(single(), after, max(bound(writer), bound(reader)))


@pytest.mark.matrix
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("reader", [ONE, *EVERY, *MORE])
def test_every_layout_goes_on_with_what_any_wrote(written: Any, tmp_path: Path, reader: str) -> None:
    """All pairs."""
    folders = {writer: copied(written(writer), _made(tmp_path / writer)) for writer in (ONE, *EVERY, *MORE)}
    ranks = pool(program.ranks_of(reader)).run(stack.resume_all, folders, reader, timeout=1400)
    for writer in folders:
        after = program.everyone([curves[writer] for curves in ranks])
        assert sorted(after.losses) == list(range(CUT, 2 * program.STEPS_PER_EPOCH)), writer
        program.close(single(), after, max(bound(writer), bound(reader)))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
