"""Every layout from the same client code: one curve (promise 1), one checkpoint (promise 3)."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration import program, stack
from tests.integration.stack import EVERY, MORE, ONE, WIDE
from tests.pools import pool
from worldsize.checkpoint import manifest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.integration.program import Curve

ALL = (ONE, *EVERY, WIDE)
"""Of these all pairs are tried; other world sizes are among the triples of test_any_layouts."""
CUT = 3
"""After which of five steps of an epoch a run is stopped."""


def run(layout: str, folder: Path | None = None, **settings: Any) -> Curve:
    """The training in this layout, in a new folder where none is given."""
    with TemporaryDirectory() as new:
        return _whole(stack.train, folder or Path(new), layout, **settings)


def _whole(train: Callable[..., Curve], folder: Path, layout: str, **settings: Any) -> Curve:
    return program.everyone(pool(program.ranks_of(layout)).run(train, folder, layout, **settings))


@cache
def single(duration: str = "2ep") -> Curve:
    """What one process does."""
    return run(ONE, duration=duration)


BOUND = 1e-10
"""Relative, over a whole run in float64."""


@pytest.mark.parametrize("layout", [*EVERY, *(pytest.param(each, marks=pytest.mark.matrix) for each in MORE)])
def test_every_layout_has_one_curve(layout: str) -> None:
    """Losses, gradient norms, rates, weights and the average of two epochs, and every id exactly."""
    found = run(layout)
    assert len(found.losses) == 2 * program.STEPS_PER_EPOCH
    program.close(single(), found, BOUND)


@pytest.mark.parametrize("layout", ["hsdp:2", "zero1:2", "zero3:2", "horovod:2"])
def test_layouts_of_the_same_micro_batches_drop_out_the_same(layout: str, tmp_path: Path) -> None:
    """Drop-out, and batch normalisation's running statistics."""
    alone, found = (_whole(program.train, tmp_path / str(n), each) for n, each in enumerate((ONE, layout)))
    program.close(alone, found, BOUND)


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
    program.close(single(), after, BOUND)


@pytest.mark.matrix
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("reader", ALL)
def test_every_layout_goes_on_with_what_any_wrote(
    written: Any, tmp_path: Path, reader: str, record_property: Callable[[str, object], None]
) -> None:
    """All pairs. What they are apart stands in a table at the session's end."""
    folders = {writer: copied(written(writer), _made(tmp_path / writer)) for writer in ALL}
    ranks = pool(program.ranks_of(reader)).run(stack.resume_all, folders, reader, timeout=1400)
    found = {writer: program.everyone([curves[writer] for curves in ranks]) for writer in folders}
    record_property("pairs", [reader, {writer: program.apart(single(), after) for writer, after in found.items()}])
    for writer, after in found.items():
        assert sorted(after.losses) == list(range(CUT, 2 * program.STEPS_PER_EPOCH)), writer
        program.close(single(), after, BOUND)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
