"""What the loader promises between real processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.data.samples import Noisy, Numbers, Shards, Stateful, gloo, joined, loader, told
from worldsize import data
from worldsize.data.batch import BatchPlan
from worldsize.errors import DataError
from worldsize.runtime.comm import Alone

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from worldsize.runtime.comm import Comm

COUNTED = BatchPlan(21, 10, 2)
READ = BatchPlan(None, 6, 2)
STEPS = 14
"""Steps of READ over the parts below: more than two epochs."""


def count(batch: torch.Tensor) -> dict[str, float]:
    """Two counts."""
    return {"rows": len(batch), "sum": float(batch[:, 0].sum())}


def part(number: int, parts: int) -> Stateful:
    """Parts of different sizes: 4, 11, 18, … numbers."""
    return Stateful([number + parts * each for each in range(4 + 7 * number)])


def plain_part(number: int, parts: int) -> list[torch.Tensor]:
    """The same without a state of their own."""
    return list(part(number, parts))


def failing_part(number: int, _parts: int) -> Iterable[torch.Tensor]:
    """The second part breaks at its third sample."""
    for each in range(6):
        if number == 1 and each == 2:
            raise OSError("part 1 is gone")
        yield torch.tensor([float(each)])


class Broken(IterableDataset[torch.Tensor]):
    """Breaks at its tenth sample."""

    def __iter__(self) -> Any:
        yield from torch.ones(9, 1)
        raise OSError("gone")


def work(comm: Comm, states: dict[str, Any]) -> dict[str, Any]:
    """Everything that one rank can tell; `states` are those of another world after step 2."""
    mine: dict[str, Any] = {"comm": comm, "rank": comm.rank, "ranks": comm.size}
    found: dict[str, Any] = {}
    for padding in ("one", "equal"):
        counting = loader(Noisy(21), COUNTED, count=count, padding=padding, **mine)
        found[f"counted {padding}"] = told(counting.steps(0, 6))
    for name, source in sources().items():
        reading = loader(source, READ, padding="one", count=count, **mine)
        found[name] = told(reading.steps(0, STEPS))
        found[f"{name} state"] = _state_after(loader(source, READ, padding="one", count=count, **mine))
        again = loader(source, READ, padding="one", count=count, **mine)
        again.load_state_dict(states.get(name, {}))
        found[f"{name} resumed"] = told(again.steps(3, STEPS))
    found["errors"] = [_error(source, mine) for source in (Broken(), data.stream(failing_part, 3))]
    found["differing"] = _error(Numbers(20 + comm.rank), mine)
    return found


def sources() -> dict[str, Any]:
    """Data that is read in turn."""
    return {
        "shards": Shards(),
        "shards by a worker": DataLoader(Shards(), 2, num_workers=1, multiprocessing_context="fork"),
        "stream": data.stream(part, 4),
        "stream without state": data.stream(plain_part, 4),
        "stream in two parts": data.stream(part, 2),
        "stream by two workers": DataLoader(data.stream(part, 4), 2, num_workers=2, multiprocessing_context="fork"),
    }


def _state_after(reading: Any) -> dict[str, Any]:
    for step in reading.steps(0, None):
        if step.piece.step == 2:
            return dict(reading.state_dict())
    raise AssertionError


def _error(source: Any, mine: dict[str, Any]) -> str:
    plan = BatchPlan(len(source), 6, 2) if hasattr(source, "__len__") else READ
    try:
        serving = loader(source, plan, **mine)
        serving.fingerprint()
        list(serving.steps(0, 8))
    except (OSError, DataError) as error:
        return f"{type(error).__name__} {error}"
    return "nothing"


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What the world of one tells."""
    return work(Alone(), {})


@pytest.fixture(scope="module", params=[2, 3])
def ranks(
    request: pytest.FixtureRequest, alone: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> list[Any]:
    """What each of some ranks tells, resumed from the states of the world of one."""
    folder: Path = tmp_path_factory.mktemp("gloo")
    return gloo(request.param, work, folder, {name: alone[f"{name} state"] for name in sources()})


@pytest.mark.parametrize("padding", ["one", "equal"])
def test_totals_are_over_all_ranks(ranks: list[Any], alone: dict[str, Any], padding: str) -> None:
    """Counts are added over ranks and known with the step; dummies count for nothing."""
    steps = joined([rank[f"counted {padding}"] for rank in ranks])
    assert steps == joined([alone[f"counted {padding}"]])
    assert sum(step[1]["rows"] for step in steps) == 42
    assert sum(step[1]["sum"] for step in steps) == 2 * sum(range(21))


def test_padding_between_ranks(ranks: list[Any]) -> None:
    """With "one" every rank has something in every step, with "equal" all have as many."""
    for steps in zip(*[rank["counted one"] for rank in ranks], strict=True):
        assert all(step[3] for step in steps)
    for steps in zip(*[rank["counted equal"] for rank in ranks], strict=True):
        assert len({len(step[3]) for step in steps}) == 1


@pytest.mark.parametrize("name", sources())
def test_reading_does_not_depend_on_ranks(ranks: list[Any], alone: dict[str, Any], name: str) -> None:
    """B066: iterable data, of other sizes on other ranks too, give every layout the same steps, and none waits."""
    assert joined([rank[name] for rank in ranks]) == joined([alone[name]])


@pytest.mark.parametrize("name", sources())
def test_reading_resumes_under_another_layout(ranks: list[Any], alone: dict[str, Any], name: str) -> None:
    """B054: a state kept by one rank lets any number of ranks go on with the very next sample."""
    assert joined([rank[f"{name} resumed"] for rank in ranks]) == joined([alone[name]])[3:]
    assert joined([alone[f"{name} resumed"]]) == joined([alone[name]])[3:]
    assert [rank[f"{name} state"] for rank in ranks] == [alone[f"{name} state"]] * len(ranks)


@pytest.mark.parametrize(("name", "length"), [("shards", 10), ("stream", 58), ("stream in two parts", 15)])
def test_an_epoch_of_a_stream_holds_every_sample_once(alone: dict[str, Any], name: str, length: int) -> None:
    """Every sample of every part comes once an epoch, and the last step, and only that, ends it."""
    epoch = [step for step in alone[name] if step[0].epoch == 0]
    assert [step[0].ends_epoch for step in epoch] == [False] * (len(epoch) - 1) + [True]
    seen = [row[0] for step in epoch for micro in step[3] for row in micro[2]]
    assert len(seen) == len(set(seen)) == length == epoch[-1][0].stop
    assert sum(step[1]["rows"] for step in epoch) == length


def test_errors_of_a_part_reach_every_rank(ranks: list[Any]) -> None:
    """A dataset that breaks on one rank breaks the others with the same type and words; nobody waits."""
    for rank in ranks:
        assert rank["errors"] == ["OSError gone", "OSError part 1 is gone"]


def test_ranks_that_see_different_data_are_told(ranks: list[Any]) -> None:
    """A dataset of another length on another rank is found before the first step."""
    assert all("ranks see different data" in rank["differing"] for rank in ranks)
    assert "'length': 20" in ranks[0]["differing"]


def test_a_state_saves_reading_again() -> None:
    """Parts with a state resume without reading what was read; others are read up to there."""
    opened: list[Stateful] = []

    def kept(number: int, parts: int) -> Stateful:
        opened.append(part(number, parts))
        return opened[-1]

    state = _state_after(loader(data.stream(kept, 4), READ))
    opened.clear()
    again = loader(data.stream(kept, 4), READ)
    again.load_state_dict(state)
    next(again.steps(3, 4))
    assert sum(each.opened for each in opened) <= 2 * READ.global_batch


def test_empty_iterables_are_refused() -> None:
    """B080: an iterable without samples, or with fewer than a step under drop_last, is an error, not zero steps."""
    with pytest.raises(DataError, match=r"epoch 0 of the data has no step. Found: 0 samples, global_batch 6"):
        list(loader(data.stream(lambda _part, _parts: [], 2), READ).steps(0, 1))
    with pytest.raises(DataError, match="Found: 4 samples, global_batch 6"):
        list(
            loader(data.stream(lambda _part, _parts: range(2), 2), BatchPlan(None, 6, 2, drop_last=True)).steps(0, 1)
        )


def test_drop_last_of_an_iterable() -> None:
    """Under drop_last an iterable's last short step is left out, and the step before it ends the epoch."""
    steps = list(loader(Shards(), BatchPlan(None, 4, 2, drop_last=True)).steps(0, 5))
    assert [(step.piece.epoch, step.piece.samples, step.piece.ends_epoch) for step in steps] == [
        (0, 4, False), (0, 4, True), (1, 4, False), (1, 4, True), (2, 4, False),
    ]  # fmt: skip


def test_a_stream_needs_parts() -> None:
    """No parts, no data."""
    with pytest.raises(DataError, match="parts=0"):
        data.stream(part, 0)


def test_reading_again_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Going to a step without a state reads the steps before it again, and says so."""
    whole = told(loader(Shards(), READ).steps(0, 5))
    assert told(loader(Shards(), READ).steps(3, 5)) == whole[3:]
    assert "reading steps 0 to 2 again to come to step 3" in caplog.text
