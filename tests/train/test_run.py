"""A run from its folder's beginning to its end, on one rank and on several."""

from __future__ import annotations

import gc
import json
import random
import re
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

import worldsize as ws
from tests.pools import pool
from tests.train import small
from worldsize.checkpoint import load, manifest
from worldsize.errors import ConfigError, DataError, LayoutError, StepError
from worldsize.testing.nursery import Crew, log_file
from worldsize.track.jsonl import read

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from worldsize.train.step import Step

ALWAYS = ws.Saving(every="1st", keep_last=100)


def steps_of(folder: Path) -> list[int]:
    """The committed checkpoints' steps."""
    return [manifest.step_of(path) or 0 for path in manifest.committed(folder)]


def state_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file under the checkpoints, with its time and content."""
    files = [path for path in (folder / manifest.FOLDER).rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_finished_run_has_nothing_to_do(tmp_path: Path, ranks: int) -> None:
    """B051: it makes zero steps, says so, and leaves its files alone."""
    assert len(pool(ranks).run(small.train, tmp_path)[0]) == 6
    before = state_of(tmp_path)
    crew = Crew(ranks, tmp_path / "logs")
    crew.start(small.train, tmp_path)
    assert crew.wait(60) == [0] * ranks
    crew.close()
    assert "nothing to do: finished at step 6" in crew.said()
    assert state_of(tmp_path) == before


def test_a_longer_duration_goes_on_with_a_finished_run(tmp_path: Path) -> None:
    """Three epochs after two: the third."""
    pool(1).run(small.train, tmp_path)
    longer = pool(1).run(small.train, tmp_path, duration="3ep")[0]
    straight = pool(1).run(small.train, tmp_path / "straight", duration="3ep")[0]
    assert longer == straight[6:]


@pytest.mark.parametrize("stop_after", range(1, 6))
def test_every_sample_is_seen_once_an_epoch_whenever_it_stopped(
    tmp_path: Path, stop_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B053: stopped by the option of the command line after any step, the end of an epoch included; told by the ledger."""
    monkeypatch.setenv("WORLDSIZE_LEDGER", str(tmp_path / "ledger"))
    for said in (str(stop_after), ""):
        crew = Crew(2, tmp_path / "logs", {"WORLDSIZE_STOP_AFTER": said})
        crew.start(leaves, tmp_path / "run")
        codes = crew.wait(60)
        crew.close()
        assert codes == ([75, 75] if said else [0, 0]), crew.said()
    rows = [row for path in sorted((tmp_path / "ledger").iterdir()) for row in read(path)]
    for epoch in (0, 1):
        ids = [number for row in rows if row["epoch"] == epoch for number in row["ids"]]
        assert sorted(ids) == list(range(small.LENGTH))
    assert {row["attempt"] for row in rows if row["step"] >= stop_after} == {1}


def leaves(folder: Path) -> None:
    """Train, with the exit code that a program has."""
    run = small.make(folder)
    model, _ = small.parts(run)
    for _step in small.steps(run, model):
        pass


def judged(folder: Path, *, stop: bool) -> list[tuple[int, bool]]:
    """Each rank has a score of its own: rank 0's gets better, the others' worse."""
    run = small.make(folder, saving=ALWAYS)
    model, _ = small.parts(run)
    found = []
    for step in small.steps(run, model):
        sign = 1 if run.comm.rank == 0 else -1
        found.append((step.index, run.best(sign * float(step.index))))
        if stop and run.comm.rank == 1 and step.index == 3:
            run.stop("rank 1 has enough")
    found.append((run.result["step"], run.result["done"] == "rank 1 has enough"))
    return found


def test_ranks_agree_on_what_is_best(tmp_path: Path) -> None:
    """B062: rank 0's value decides for all, nobody hangs."""
    one, two = pool(2).run(judged, tmp_path, stop=False)
    assert one == two == [*((step, True) for step in range(6)), (6, False)]


def test_ranks_agree_on_when_to_end(tmp_path: Path) -> None:
    """B062: what one rank says holds for all, and for the next start."""
    one, two = pool(2).run(judged, tmp_path, stop=True)
    assert one == two == [*((step, True) for step in range(4)), (4, True)]
    assert pool(2).run(small.train, tmp_path) == [[], []]


def bests(folder: Path, values: list[float], mode: str) -> list[bool]:
    """What is better in a series."""
    run = small.make(folder, duration=f"{len(values)}st")
    model, _ = small.parts(run)
    return [run.best(values[step.index], mode) for step in small.steps(run, model)]


def test_nan_is_never_best(tmp_path: Path) -> None:
    """Nor does it stand in the way of a number."""
    nan = float("nan")
    assert pool(1).run(bests, tmp_path / "a", [nan, 1, nan, 2, 2], "max")[0] == [False, True, False, True, False]
    assert pool(1).run(bests, tmp_path / "b", [nan, 2, 3, 1], "min")[0] == [False, True, False, True]
    with pytest.raises(ConfigError, match="mode='maximum'"):
        pool(1).run(bests, tmp_path / "c", [1.0], "maximum")


def retained(folder: Path) -> None:
    """The second step is best."""
    run = small.make(folder, saving=ws.Saving(every="1st", keep_last=2))
    model, _ = small.parts(run)
    for step in small.steps(run, model):
        run.best(-abs(step.index - 1))


def test_the_best_checkpoint_stays(tmp_path: Path) -> None:
    """Beside the last two."""
    pool(1).run(retained, tmp_path)
    assert steps_of(tmp_path) == [2, 5, 6]


@pytest.mark.parametrize(
    ("every", "expected"),
    [("1st", [1, 2, 3, 4, 5, 6]), ("4st", [4, 6]), ("1ep", [3, 6]), ("16sa", [2, 5, 6]), (None, [6])],
)
def test_saves_come_when_they_were_asked_for(tmp_path: Path, every: str | None, expected: list[int]) -> None:
    """In steps, epochs, samples, and at the end in any case."""
    pool(1).run(small.train, tmp_path, saving=ws.Saving(every=every, keep_last=100))
    assert steps_of(tmp_path) == expected


def short(folder: Path, length: int, **settings: Any) -> list[int]:
    """A data set of this length."""
    run = small.make(folder, **settings)
    model, _ = small.parts(run)
    return [int(step.totals["samples"]) for step in small.steps(run, model, small.data(length))]


def test_fewer_samples_than_a_global_batch_make_one_short_step(tmp_path: Path) -> None:
    """B080: counted for what it is."""
    for found in pool(2).run(short, tmp_path, 3):
        assert found == [3, 3]


def test_no_samples_are_refused(tmp_path: Path) -> None:
    """B080: a run with zero steps is no success."""
    with pytest.raises(DataError, match="dataset is empty"):
        pool(2).run(short, tmp_path / "a", 0)
    with pytest.raises(DataError, match=r"the run has no steps.*0st"):
        pool(1).run(short, tmp_path / "b", 20, duration="0st")


def test_more_ranks_than_micro_batches_are_refused_with_the_numbers(tmp_path: Path) -> None:
    """Before any work is done."""
    with pytest.raises(LayoutError, match=r"3 ranks, global_batch 8 = 2 micro-batches of 4.*at most 2 ranks"):
        pool(3).run(small.train, tmp_path, micro_batch=4)


def test_another_training_in_the_folder_is_refused(tmp_path: Path) -> None:
    """B054: with both numbers, before anything is done."""
    pool(1).run(small.train, tmp_path)
    with pytest.raises(LayoutError, match="micro_batch: began with 2, now 4"):
        pool(1).run(small.train, tmp_path, micro_batch=4, duration="3ep")
    with pytest.raises(LayoutError, match="dataset is not the one"):
        pool(1).run(short, tmp_path, 21)


def grown(folder: Path) -> list[list[int]]:
    """A larger global batch from the second epoch on, by request."""
    run = small.make(folder, global_batch=10, accept=("global_batch",), duration="2ep")
    model, _ = small.parts(run)
    return [step.ids for step in small.steps(run, model)]


def test_an_accepted_change_of_batch_goes_on_with_the_next_sample(tmp_path: Path) -> None:
    """From the end of an epoch each sample of the next is seen once, in the new steps."""
    pool(1).run(small.train, tmp_path, duration="1ep")
    found = pool(1).run(grown, tmp_path)[0]
    assert [len(ids) for ids in found] == [10, 10]
    assert sorted(chain.from_iterable(found)) == list(range(small.LENGTH))


def accepting(folder: Path) -> None:
    """Larger micro-batches, by request."""
    small.train(folder, micro_batch=4, accept=("micro_batch",))


def test_an_accepted_change_is_told_and_written_down(tmp_path: Path) -> None:
    """On one line of one rank, and in events.jsonl; run.json holds the new value."""
    pool(1).run(small.train, tmp_path / "run", duration="1ep")
    crew = Crew(2, tmp_path / "logs")
    crew.start(accepting, tmp_path / "run")
    assert crew.wait(60) == [0, 0], crew.said()
    crew.close()
    told = "micro_batch changed from 2 to 4, accepted; run.json says so from now on"
    assert crew.said().count(f"worldsize: {told}") == 1
    changes = [row["what"] for row in read(tmp_path / "run" / "events.jsonl") if row["event"] == "change"]
    assert changes == [told, "duration changed from 1ep to 2ep; run.json says so from now on"]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["micro_batch"] == 4


def generated(folder: Path) -> list[list[float]]:
    """A loop that makes its own data: the micro-batches are sample ids."""
    run = small.make(folder, duration="3st")
    model, _ = small.parts(run)
    seen = []
    for step in run.steps():
        for (ids,) in step.micro_batches:
            x = torch.randn(len(ids), 2, dtype=torch.float64)
            step.backward((model(x) - x.sum(1)) ** 2)
        step.update()
        seen.append([float(step.loss)])
    return seen


def test_a_loop_may_make_its_own_data(tmp_path: Path) -> None:
    """Without `data` a step has as many ids as the global batch, dealt over ranks, with random numbers of their own."""
    alone = pool(1).run(generated, tmp_path / "a")[0]
    for found in pool(2).run(generated, tmp_path / "b"):
        for (here,), (there,) in zip(found, alone, strict=True):
            assert here == pytest.approx(there, rel=1e-12)
    assert len({loss for (loss,) in alone}) == 3


def loaded(folder: Path, *, split: bool = False) -> list[int]:
    """A DataLoader as it is."""
    run = small.make(folder, micro_batch=None)
    model, _ = small.parts(run)
    data = small.data()
    sampler: Any = DistributedSampler(data, 2, 0) if split else None
    loader = DataLoader(data, batch_size=2, shuffle=None if split else True, sampler=sampler, num_workers=1)
    ids: list[int] = []
    for step in small.steps(run, model, loader):
        ids += step.ids
    return ids


def test_a_dataloader_is_taken_as_it_is(tmp_path: Path) -> None:
    """API 13: its batch size is the micro-batch, its shuffling ours."""
    one, two = pool(2).run(loaded, tmp_path)
    assert sorted([*one, *two]) == sorted([*range(small.LENGTH)] * 2)


class Counted(Sampler[int]):
    """An order of its own; counts how often it is drawn."""

    drawn = 0

    def __len__(self) -> int:
        return small.LENGTH

    def __iter__(self) -> Iterator[int]:
        Counted.drawn += 1
        return iter(torch.randperm(small.LENGTH).tolist())


def sampled(folder: Path) -> int:
    """One epoch in the order of a sampler."""
    Counted.drawn = 0
    run = small.make(folder, micro_batch=None, duration="1ep")
    model, _ = small.parts(run)
    for _step in small.steps(run, model, DataLoader(small.data(), batch_size=2, sampler=Counted())):
        pass
    return Counted.drawn


def test_a_sampler_is_drawn_once_for_an_epoch(tmp_path: Path) -> None:
    """And twice before, to see whether the same key gives the same order."""
    assert pool(1).run(sampled, tmp_path) == [3]


def test_a_dataloader_that_is_split_already_is_refused(tmp_path: Path) -> None:
    """API 13."""
    with pytest.raises(DataError, match="already split by rank"):
        pool(2).run(loaded, tmp_path, split=True)


class Stream(IterableDataset[Any]):
    """Nineteen samples, one after another."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(19):
            yield torch.full((2,), float(number)), torch.tensor(float(number))


def streamed(folder: Path) -> list[int]:
    """Read on one rank, dealt to all."""
    run = small.make(folder, duration="2st")
    model, _ = small.parts(run)
    return [step.index for step in small.steps(run, model, Stream())]


def test_an_iterable_ends_for_all_ranks_together(tmp_path: Path) -> None:
    """B066: whatever is left over at the end, nobody waits."""
    assert pool(2).run(streamed, tmp_path) == [[0, 1], [0, 1]]


class Noisy(Dataset[Any]):
    """Each sample draws from all three generators."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(1))]  # noqa: NPY002 - what is tested
        return torch.tensor(drawn, dtype=torch.float64), torch.tensor(index)


def noise(folder: Path, workers: int) -> list[tuple[int, list[float], float]]:
    """Sample id, what it drew, and the model's first weight."""
    run = small.make(folder, micro_batch=None)
    model = run.model(lambda: nn.Linear(3, 1))
    run.optimizer(lambda m: torch.optim.SGD(m.parameters(), 0.0), model)
    found = []
    for step in run.steps(DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=workers)):
        for x, index in step.micro_batches:
            step.backward(model(x).squeeze(1))
            pairs = zip(index.tolist(), x.tolist(), strict=True)
            found += [
                (step.epoch * 100 + number, drawn, float(model.weight.detach()[0, 0])) for number, drawn in pairs
            ]
        step.update()
    return found


def test_random_numbers_are_one_for_each_sample_and_epoch(tmp_path: Path) -> None:
    """B075: different over ranks, workers and epochs; the same again; the first weights equal on all ranks."""
    alone = sorted(pool(1).run(noise, tmp_path / "a", 0)[0])
    spread = sorted(row for rank in pool(2).run(noise, tmp_path / "b", 2) for row in rank)
    assert spread == alone
    assert len({number for _, drawn, _ in spread for number in drawn}) == 3 * 2 * 16
    assert len({weight for _, _, weight in spread}) == 1


class Module(nn.Module):
    """A user's own submodule that is called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number a sample."""
        found: torch.Tensor = self.module(x).squeeze(1)
        return found


def wrapped(folder: Path, strategy: str, **options: Any) -> list[str]:
    """Train, and list the names of the bare model."""
    run = small.make(folder, strategy=strategy, duration="1st" if strategy != "single" else "2st")
    model = run.model(Module, **options)
    run.optimizer(lambda m: torch.optim.Adam(m.parameters()), model)
    for _step in small.steps(run, model):
        pass
    return sorted(Module().state_dict())


COMPILED = {"compile": {"backend": "eager"}}


@pytest.mark.parametrize(
    ("strategy", "options", "later"),
    [
        ("ddp", {}, {}),
        ("fsdp", {}, COMPILED),
        ("ddp", COMPILED, {}),
        ("fsdp", COMPILED, {}),
        ("fsdp", {**COMPILED, "activation_checkpointing": True}, {}),
    ],
)
def test_names_are_those_of_the_bare_model(
    tmp_path: Path, strategy: str, options: dict[str, Any], later: dict[str, Any]
) -> None:
    """B059: no prefix of a wrapper, and a user's own `module` stays; another strategy goes on, compiled or not."""
    names = pool(2).run(wrapped, tmp_path, strategy, **options)[0]
    found = load.metadata(manifest.committed(tmp_path)[-1])
    assert sorted(name for name in found if name.startswith("model/")) == [f"model/model/{name}" for name in names]
    pool(1).run(wrapped, tmp_path, "single", **later)


def numpy_state(folder: Path) -> None:
    """Numbers of numpy, in everything that takes numbers."""
    run = small.make(folder)
    mine = run.keep(score=np.float64(0.5), count=np.int64(3))
    model, _ = small.parts(run)
    for _step in small.steps(run, model):
        run.log({"metric": np.float32(0.25)})  # type: ignore[dict-item]
        run.best(np.float64(0.5))
        mine.score = np.float64(mine.score + 1)


def test_what_is_saved_is_plain(tmp_path: Path) -> None:
    """B058: numpy's numbers come in, nothing that must be unpickled goes out."""
    pool(2).run(numpy_state, tmp_path)
    train = json.loads((manifest.committed(tmp_path)[-1] / manifest.TRAIN).read_text())
    assert train["keep"] == {"score": 6.5, "count": 3}
    assert small.numbers(tmp_path, "metric")[5] == 0.25


def late(folder: Path, what: str) -> Any:
    """What is asked for at the wrong time."""
    run = small.make(folder)
    model, _ = small.parts(run)
    if what == "total":
        return run.total_steps
    if what == "resumed":
        return run.resumed
    if what in ("best", "log", "stop"):
        return getattr(run, what)({} if what == "log" else 1)
    for _step in small.steps(run, model):
        pass
    return list(run.steps(small.data()))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("total", r"total_steps is not known before the data.*Run\(\.\.\., data="),
        ("best", r"run.best belongs into the loop"),
        ("log", r"run.log belongs into the loop"),
        ("stop", r"run.stop belongs into the loop"),
        ("resumed", r"run.resumed belongs into the loop"),
        ("twice", "run.steps is called once"),
    ],
)
def test_what_comes_at_the_wrong_time_is_refused(tmp_path: Path, what: str, words: str) -> None:
    """In words."""
    with pytest.raises(StepError, match=words):
        pool(1).run(late, tmp_path, what)


def bare(folder: Path) -> None:
    """A run that trains nothing."""
    run = small.make(folder)
    model = run.model(small.Line)
    for _step in small.steps(run, model):
        pass


def test_a_run_without_optimizer_is_refused(tmp_path: Path) -> None:
    """It would compute for days."""
    with pytest.raises(LayoutError, match="there is no optimizer"):
        pool(1).run(bare, tmp_path)


def talk(folder: Path) -> None:
    """Five hundred quick steps, with a rest at first."""
    import time

    def rest(_run: ws.Run, step: Step) -> None:
        time.sleep(0.05 if step.index < 30 else 0)

    small.train(folder, rest, duration="500st")


def test_a_log_file_has_few_lines_from_one_rank(tmp_path: Path) -> None:
    """B033: no carriage returns, the first line soon, fewer than thirty in all."""
    crew = Crew(2, tmp_path / "logs")
    crew.start(talk, tmp_path / "run")
    assert crew.wait(120) == [0, 0], crew.said()
    crew.close()
    first, second = ((tmp_path / "logs" / f"rank-{rank:04d}.log").read_bytes().decode() for rank in range(2))
    assert second == ""
    assert "\r" not in first
    assert len(first.splitlines()) < 30
    lines = [line for line in first.splitlines() if line.startswith("step ")]
    assert "/500  loss " in lines[0]
    assert int(lines[0].split()[1].split("/")[0]) < 40


def speak(folder: Path) -> None:
    """A line before the loop, in it, and after it."""
    run = small.make(folder, saving=ALWAYS)
    run.say("before")
    model, _ = small.parts(run)
    for step in small.steps(run, model):
        if step.index == 0:
            run.say(f"in, resumed: {run.resumed}")
    run.say("after")


def said_by(size: int, folder: Path) -> list[list[str]]:
    """What each rank printed."""
    crew = Crew(size, folder / "logs")
    crew.start(speak, folder / "run")
    codes = crew.wait(120)
    crew.close()
    assert codes == [0] * size, crew.said()
    return [log_file(folder / "logs", rank).read_text().splitlines() for rank in range(size)]


def test_what_a_run_says_comes_from_one_rank(tmp_path: Path) -> None:
    """Before the loop, in it and after it; a commit is told too."""
    first, second = said_by(2, tmp_path)
    own = [line for line in first if not line.startswith(("worldsize: ", "step "))]
    assert own == ["before", "in, resumed: None", "after"]
    commit = next(line for line in first if "committed" in line)
    assert re.fullmatch(r"worldsize: committed step-0000000\d \(0\.\d MB in \d+\.\d s\)", commit)
    assert second == []


def resumed(folder: Path, duration: str) -> list[int | None]:
    """What the run says about its beginning, at each step."""
    run = small.make(folder, duration=duration)
    model, _ = small.parts(run)
    return [run.resumed for _ in small.steps(run, model)]


def test_a_run_knows_where_it_was_resumed(tmp_path: Path) -> None:
    """Nowhere at first, then at the step of the checkpoint, on every rank."""
    assert pool(2).run(resumed, tmp_path, "1ep") == [[None] * 3] * 2
    assert pool(2).run(resumed, tmp_path, "2ep") == [[3] * 3] * 2


def synchronised(folder: Path) -> None:
    """Three micro-batches a step, and one in the last; under FSDP, as torch's DDP has it on GPUs only."""
    run = small.make(folder, global_batch=6, strategy="fsdp")
    model = run.model(lambda: nn.Sequential(nn.SyncBatchNorm(2), small.Line()))
    run.optimizer(lambda m: torch.optim.SGD(m.parameters(), 0.1), model)
    for _step in small.steps(run, model):
        pass


def test_synchronised_normalisation_with_an_idle_rank_is_refused(tmp_path: Path) -> None:
    """Before the first step, where it would hang in the last one of an epoch."""
    with pytest.raises(LayoutError, match="last step of an epoch leaves ranks idle"):
        pool(3).run(synchronised, tmp_path)


def _two_runs(folder: Path) -> int:
    """How many runs are still there after two that were closed."""
    for number in range(2):
        run = ws.Run(folder / str(number), global_batch=4, micro_batch=4, duration="1st")
        model = run.model(lambda: nn.Linear(2, 1))
        run.optimizer(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), model)
        for step in run.steps(torch.utils.data.TensorDataset(torch.randn(4, 2))):
            for (x,) in step.micro_batches:
                step.backward(model(x).flatten())
            step.update()
        del run, model, step
    gc.collect()
    return sum(type(each) is ws.Run for each in gc.get_objects())


def test_a_run_that_is_over_is_held_by_nobody(tmp_path: Path) -> None:
    """Its weights and process groups go with it: a notebook makes many runs in one process."""
    assert pool(1).run(_two_runs, tmp_path) == [0]
