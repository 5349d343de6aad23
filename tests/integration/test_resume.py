"""One checkpoint, every layout: promise 3. The same samples, rates and losses after an interruption anywhere."""

from __future__ import annotations

import random
import shutil
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

import worldsize as ws
from tests.integration import program
from tests.integration.program import LAYOUTS, STEPS_PER_EPOCH, Curve
from tests.integration.test_parity import single
from tests.pools import pool
from worldsize.checkpoint import manifest
from worldsize.testing.nursery import Crew

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STEPS = 2 * STEPS_PER_EPOCH
SMALL = tuple(layout for layout in LAYOUTS if program.ranks_of(layout) < 4)


def whole() -> Curve:
    """The run that was never disturbed."""
    return single("fp64", "2ep")


def write(folder: Path, layout: str, **settings: Any) -> Curve:
    """Train in this layout until something stops it."""
    return program.everyone(pool(program.ranks_of(layout)).run(program.train, folder, layout, **settings))


def only(source: Path, step: int, target: Path) -> Path:
    """The run as it was when this step had been committed and nothing after it."""
    name = manifest.folder_name(step)
    shutil.copytree(source / manifest.FOLDER / name, target / manifest.FOLDER / name)
    shutil.copy(source / "run.json", target)
    return target


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run of this layout that kept a checkpoint of every step."""

    @cache
    def make(layout: str) -> Path:
        folder = tmp_path_factory.mktemp("written")
        write(folder, layout, saving=ws.Saving(every="1st", keep_last=10**6))
        return folder

    return make


@cache
def cells() -> list[tuple[str, str, int]]:
    """A seeded sample of (who writes, who reads, after which step)."""
    draw = random.Random(11)
    pairs = [(writer, reader) for writer in SMALL for reader in SMALL if writer != reader]
    return [(*pair, draw.randrange(1, STEPS)) for pair in draw.sample(pairs, 5)]


@pytest.mark.parametrize(("writer", "reader", "step"), cells())
def test_a_stopped_run_goes_on_in_another_layout(tmp_path: Path, writer: str, reader: str, step: int) -> None:
    """B053, B054: ids, rates, losses, final weights and average are those of the undisturbed run."""
    before = write(tmp_path, writer, stop_after=step)
    after = write(tmp_path, reader)
    assert sorted(before.losses) == list(range(step))
    assert sorted(after.losses) == list(range(step, STEPS))
    program.close(whole(), before, 1e-10)
    program.close(whole(), after, 1e-10)


@pytest.mark.parametrize("layout", ["single:1", "ddp:3", "fsdp:2"])
def test_the_same_layout_goes_on_bit_for_bit(tmp_path: Path, layout: str) -> None:
    """In the middle of an epoch."""
    straight = write(tmp_path / "straight", layout)
    write(tmp_path / "stopped", layout, stop_after=3)
    after = write(tmp_path / "stopped", layout)
    assert after.losses == {step: loss for step, loss in straight.losses.items() if step >= 3}
    program.same(straight.weights, after.weights)
    program.same(straight.average, after.average)


@pytest.mark.parametrize(
    ("writer", "reader", "step", "micro"), [("ddp:2", "fsdp:3", 3, 2), ("fsdp:2", "single:1", 6, 0)]
)
def test_a_step_that_was_killed_inside_is_made_again_from_its_start(
    tmp_path: Path, writer: str, reader: str, step: int, micro: int
) -> None:
    """No gradient of half an accumulation window survives."""
    crew = Crew(program.ranks_of(writer), tmp_path / "logs")
    crew.start(program.die_inside, tmp_path / "run", writer, step, micro)
    codes = crew.wait(120)
    crew.close()
    assert codes == [-9] * crew.size, crew.said()
    after = write(tmp_path / "run", reader)
    assert min(after.losses) == step
    program.close(whole(), after, 1e-10)


@pytest.mark.matrix
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("reader", LAYOUTS)
@pytest.mark.parametrize("writer", LAYOUTS)
def test_every_step_of_every_layout_goes_on_in_every_layout(
    written: Callable[[str], Path], tmp_path: Path, writer: str, reader: str
) -> None:
    """Whoever wrote it, after whichever step."""
    folders = {step: only(written(writer), step, tmp_path / str(step)) for step in range(1, STEPS)}
    ranks = pool(program.ranks_of(reader)).run(program.resume_all, folders, reader, timeout=1000)
    for step in folders:
        after = program.everyone([curves[step] for curves in ranks])
        assert sorted(after.losses) == list(range(step, STEPS))
        program.close(whole(), after, 1e-10)
