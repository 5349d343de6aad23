"""The program's own state: what is kept, what is refused, and how it comes back."""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.integration.program import may_stop
from tests.pools import pool
from tests.train import small
from worldsize.errors import CheckpointError, ConfigError, StepError
from worldsize.runtime.comm import Alone
from worldsize.train.keep import Kept

if TYPE_CHECKING:
    from pathlib import Path


class Counter:
    """Something with a state of its own."""

    def __init__(self) -> None:
        self.seen = {1: 0.5}

    def state_dict(self) -> dict[str, Any]:
        """What to keep."""
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.seen = state["seen"]


def through(source: Kept, target: Kept) -> None:
    """As through a checkpoint."""
    tensors, skeletons = source.state()
    skeletons = json.loads(json.dumps(skeletons))
    wanted = target.wanted(skeletons, torch.device("cpu"))
    for name, tensor in wanted.items():
        tensor.copy_(tensors[name])
    target.load(wanted, skeletons)


def kept(**objects: Any) -> Kept:
    """These objects, kept."""
    made = Kept()
    made.add(objects)
    return made


@pytest.mark.parametrize(
    ("before", "after"),
    [(3, 0), (0.5, 0.0), ("b", "a"), (None, 1), (True, False), ((1, "x"), (0, "y")), ([1, [2]], []), ({1: "x"}, {})],
)
def test_plain_values_come_back(before: Any, after: Any) -> None:
    """Numbers, texts, and lists, tuples and dicts of these."""
    now = kept(value=after)
    through(kept(value=before), now)
    assert now.value == before


def test_containers_and_tensors_come_back_in_place() -> None:
    """The program holds them too."""
    mine: dict[str, Any] = {}
    list_, tensor = [0], torch.zeros(2)
    now = kept(a=mine, b=list_, c=tensor)
    through(kept(a={"x": torch.ones(1)}, b=[1, 2], c=torch.ones(2)), now)
    assert torch.equal(mine["x"], torch.ones(1))
    assert (list_, tensor.tolist()) == ([1, 2], [1.0, 1.0])


def test_objects_with_a_state_dict_come_back() -> None:
    """With number keys."""
    source, target = Counter(), Counter()
    source.seen = {7: 1.5}
    through(kept(counter=source), kept(counter=target))
    assert target.seen == {7: 1.5}


def test_a_generator_goes_on_where_it_was() -> None:
    """The next draw is the next."""
    source, target = torch.Generator().manual_seed(1), torch.Generator()
    torch.rand(3, generator=source)
    through(kept(rng=source), kept(rng=target))
    assert torch.equal(torch.rand(2, generator=source), torch.rand(2, generator=target))


@pytest.mark.parametrize("value", [deque(), {1, 2}, print, object()])
def test_what_cannot_be_loaded_safely_is_refused_at_once(value: object) -> None:
    """API 12: at keep, not at save; by name."""
    with pytest.raises(ConfigError, match=rf"mine: a {type(value).__name__} cannot be saved"):
        kept(mine=value)
    with pytest.raises(ConfigError, match="mine: a"):
        kept(mine=0).mine = value


def test_a_name_that_is_not_kept_is_refused() -> None:
    """A misspelt one would be lost."""
    with pytest.raises(StepError, match=r"'sen' is not kept"):
        kept(seen=0).sen = 1
    with pytest.raises(StepError, match="'seen' is kept already"):
        kept(seen=0).add({"seen": 1})
    with pytest.raises(AttributeError):
        _ = kept(seen=0).sen


def test_other_names_than_the_checkpoint_holds_are_refused() -> None:
    """Both sides are listed."""
    with pytest.raises(CheckpointError, match=r"now \['b'\], in the checkpoint \['a'\]"):
        through(kept(a=1), kept(b=1))


def test_one_process_agrees_with_itself() -> None:
    """Tensors of every kind have a digest."""
    tensors = [
        torch.ones(1, dtype=torch.bool),
        torch.zeros(0),
        torch.ones(2, 2, dtype=torch.bfloat16).t(),
        torch.ones(1) * 1j,
    ]
    kept(all=tensors, rng=torch.Generator()).refuse_differences(Alone())


def diverge(folder: Path) -> None:
    """One rank counts on its own."""
    run = small.make(folder)
    mine = run.keep(same=1, seen=0)
    model, _ = small.parts(run)
    for _step in small.steps(run, model):
        mine.seen += run.comm.rank


def test_a_difference_between_ranks_is_named_at_the_save(tmp_path: Path) -> None:
    """Not found after a resume."""
    with pytest.raises(StepError, match=r"kept 'seen' is not the same on every rank.*ranks \[1\] differ"):
        pool(2).run(diverge, tmp_path)


def count(folder: Path, stop_after: int | None = None) -> tuple[int, float]:
    """Counts steps, and draws from a generator of its own at each."""
    run = small.make(folder)
    rng = torch.Generator().manual_seed(5)
    mine = run.keep(seen=0, rng=rng)
    model, _ = small.parts(run)
    drawn = 0.0
    with may_stop():
        for step in small.steps(run, model):
            mine.seen += 1
            drawn = float(torch.rand(1, generator=rng))
            if step.index + 1 == stop_after:
                small.stop()
    return mine.seen, drawn


def test_what_the_body_does_after_the_update_is_in_the_commit(tmp_path: Path) -> None:
    """API 1: counters and generators are those of the undisturbed run, on other ranks too."""
    straight = pool(1).run(count, tmp_path / "a")[0]
    pool(2).run(count, tmp_path / "b", 2)
    assert pool(1).run(count, tmp_path / "b")[0] == straight
    assert straight[0] == 6


def table(folder: Path, duration: str, *, sharded: bool) -> list[float]:
    """Keeps a table of seven rows, in pieces or whole, and adds one to it in each step."""
    run = small.make(folder, duration=duration)
    rows = torch.zeros(7)
    if sharded:
        rows = distribute_tensor(rows, init_device_mesh("cpu", (run.comm.size,)), [Shard(0)])
    mine = run.keep(table=rows)
    model, _ = small.parts(run)
    for _step in small.steps(run, model):
        mine.table.add_(torch.ones_like(mine.table))
    whole: torch.Tensor = mine.table.full_tensor() if sharded else mine.table
    return whole.tolist()


def test_a_sharded_tensor_is_kept(tmp_path: Path) -> None:
    """API 12: a DTensor goes on in other pieces, and whole on one rank."""
    assert pool(2).run(table, tmp_path, "1ep", sharded=True) == [[3.0] * 7] * 2
    assert pool(3).run(table, tmp_path, "2ep", sharded=True) == [[6.0] * 7] * 3
    assert pool(1).run(table, tmp_path, "3ep", sharded=False) == [[9.0] * 7]
