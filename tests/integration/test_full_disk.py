"""A full disk costs the newest checkpoint and some lines, never an older checkpoint, and no training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import worldsize as ws
from tests.train import small
from worldsize.checkpoint import manifest
from worldsize.testing.faults import tmpfs, use_up
from worldsize.testing.nursery import Crew
from worldsize.track.jsonl import latest, read

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

SIZE = 20 << 20


class Wide(nn.Module):
    """About four megabytes in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 125_000), nn.Linear(125_000, 1)

    def forward(self, x: Tensor) -> Tensor:
        """One number a sample."""
        found: Tensor = self.last(self.first(x)).squeeze(1)
        return found


def fill(folder: Path, on_error: str) -> None:
    """Saves every step; from step 3 on the disk has no room for another checkpoint."""
    run = small.make(folder, saving=ws.Saving(every="1st", keep_last=1, on_error=on_error, synchronous=True))  # type: ignore[arg-type]
    model = run.model(Wide)
    run.optimizer(lambda m: torch.optim.SGD(m.parameters(), 1e-9), model)
    for step in small.steps(run, model):
        if step.index == 2 and run.comm.rank == 0:
            with (folder.parent / "other").open("wb") as file:
                file.write(bytes(SIZE - (6 << 20)))


@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_the_old_checkpoint_stays_and_one_line_says_why(tmp_path: Path, on_error: str) -> None:
    """B057: the run goes on or ends, as it was told; the end, which must be saved, is an error either way."""
    with tmpfs(tmp_path / "disk", SIZE) as disk:
        crew = Crew(2, tmp_path / "logs")
        crew.start(fill, disk / "run", on_error)
        codes = crew.wait(120)
        crew.close()
        said = crew.said()
        assert 0 not in codes, said
        assert None not in codes, said
        assert "No space left on device" in said
        (path,) = manifest.committed(disk / "run")
        assert manifest.verify(path) == []
        assert manifest.step_of(path) == 2
        leftover = [entry.name for entry in (disk / "run" / manifest.FOLDER).iterdir() if entry.name.endswith(".tmp")]
        assert leftover == []
        assert "Traceback" not in said
        assert ("step 4 was not saved" in said) == (on_error == "continue")


def go_on(folder: Path) -> None:
    """For most of its steps the disk has no room at all, and each save fails."""
    run = small.make(folder, duration="400st", saving=ws.Saving(every="100st", keep_last=1, synchronous=True))
    model, _ = small.parts(run)
    other = folder.parent / "other"
    for step in small.steps(run, model):
        if step.index == 1 and run.comm.rank == 0:
            use_up(other)
        if step.index == 350 and run.comm.rank == 0:
            other.unlink()


def test_training_goes_on_where_not_even_a_line_can_be_written(tmp_path: Path) -> None:
    """The lines come again with the room."""
    with tmpfs(tmp_path / "disk", 1 << 20) as disk:
        crew = Crew(2, tmp_path / "logs")
        crew.start(go_on, disk / "run")
        codes, said = crew.wait(120), crew.said()
        crew.close()
        assert codes == [0, 0], said
        assert said.count("metrics.jsonl: No space left on device") == 1
        assert "step 100 was not saved" in said
        found = sorted(latest(read(disk / "run" / "metrics.jsonl"), "loss"))
        assert set(range(360, 400)) <= set(found)
        assert len(found) < 350
