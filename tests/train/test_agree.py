"""What ranks wish for is heard by all after the same step, the next one at the latest."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.integration.program import may_stop
from tests.pools import pool
from tests.train import small
from worldsize.runtime.board import Board, size_of
from worldsize.runtime.clock import Clock
from worldsize.runtime.comm import Ranks
from worldsize.train.agree import Agreement, Wishes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RANKS = 3
Heard = list[Wishes]
WISHES = st.builds(Wishes, *[st.sampled_from([False, False, False, True])] * len(Wishes._fields))


class Channel:
    """Of a Comm, what an agreement needs."""

    def __init__(self, page: Path, rank: int) -> None:
        self._board = Board(page, rank, RANKS, timedelta(seconds=30))
        self.start_any, self.size = self._board.ask, RANKS


def agreement(page: Path, rank: int, wishes: Iterator[Wishes]) -> Agreement:
    """Of one rank."""
    return Agreement(cast("Any", Channel(page, rank)), Clock(), lambda: next(wishes))


def heard(page: Path, rank: int, steps: Sequence[tuple[Sequence[Wishes], bool]]) -> Heard:
    """What one rank hears after each step, until it leaves or ends; `meet` where all know that they do."""
    mine = iter([wishes[rank] for wishes, _ in steps])
    asking, found = agreement(page, rank, mine), []
    for _, meet in steps:
        found.append(Wishes())
        for answer in asking.answers(meet=meet):
            found[-1] = Wishes(*map(max, found[-1], answer))
            if answer.leave:
                return found
        if found[-1].end:
            break
    return found


def wanted(steps: Sequence[tuple[Sequence[Wishes], bool]]) -> Heard:
    """The same, by its definition."""
    found, open_ = [], Wishes()
    for mine, meet in steps:
        any_, all_ = (Wishes(*map(join, zip(*mine, strict=True))) for join in (any, all))
        if meet or open_.leave or open_.end or open_.save or all_.leave or all_.end:
            found.append(Wishes(*map(max, open_, any_)))
            open_ = Wishes()
        else:
            found.append(open_)
            open_ = any_
        if found[-1].leave or found[-1].end:
            break
    return found


@given(steps=st.lists(st.tuples(st.tuples(*[WISHES] * RANKS), st.sampled_from([False, False, True])), max_size=12))
def test_every_rank_hears_the_same_after_the_same_step(steps: list[tuple[tuple[Wishes, ...], bool]]) -> None:
    """For any wishes, at any difference in speed: at once an end that all wish for, the rest one step later."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(RANKS) as pool:
        page = Path(folder) / "page"
        page.write_bytes(bytes(size_of(RANKS)))
        found = list(pool.map(lambda rank: heard(page, rank, steps), range(RANKS)))
    assert found == [wanted(steps)] * RANKS


def test_who_wishes_for_nothing_waits_for_nobody(tmp_path: Path) -> None:
    """The others have not come as far."""
    page = tmp_path / "page"
    page.write_bytes(bytes(size_of(RANKS)))
    asking = agreement(page, 0, iter([Wishes(save=True, write=True)]))
    assert list(asking.answers(meet=False)) == [Wishes()]


def enough(folder: Path, ranks: tuple[int, ...]) -> tuple[int, int, object]:
    """Some ranks have enough after the fourth step; nothing is saved on the way, so that they need not meet."""
    run = small.make(folder)
    model, _ = small.parts(run)
    made = 0
    for step in small.steps(run, model):
        made += 1
        if run.comm.rank in ranks and step.index == 3:
            run.stop("enough")
    return made, run.result["step"], run.result["done"]


@pytest.mark.parametrize(("ranks", "steps"), [((0, 1), 4), ((1,), 5), ((0,), 5)])
def test_what_all_ranks_say_holds_at_once(tmp_path: Path, ranks: tuple[int, ...], steps: int) -> None:
    """And what some say one step later: nobody waits after each step for what others might say."""
    assert pool(2).run(enough, tmp_path, ranks) == [(steps, steps, "enough")] * 2


def left(folder: Path, end: tuple[int, int], leave: tuple[int, ...]) -> int:
    """A rank has enough at a step, while ranks are asked to leave at the fourth one."""
    run = small.make(folder)
    model, _ = small.parts(run)
    made = 0
    with may_stop():
        for step in small.steps(run, model):
            made += 1
            if (run.comm.rank, step.index) == end or (end[0] == -1 and step.index == end[1]):
                run.stop("enough")
            if run.comm.rank in leave and step.index == 3:
                small.stop()
    return made


@pytest.mark.parametrize(("end", "leave"), [((1, 3), (0, 1)), ((-1, 4), (0,)), ((1, 2), (0,))])
def test_an_end_is_not_forgotten_where_the_run_leaves(
    tmp_path: Path, end: tuple[int, int], leave: tuple[int, ...]
) -> None:
    """One rank's beside a signal to all, all ranks' after a signal to one, or one rank's before it."""
    pool(2).run(left, tmp_path, end, leave)
    assert pool(2).run(small.train, tmp_path) == [[], []]


def by_sockets(folder: Path) -> tuple[int, list[float]]:
    """As ranks of several hosts agree: an answer is on its way while the body of the next step adds up over ranks too."""
    run = small.make(folder, duration="20st")
    assert isinstance(run.comm, Ranks)
    page, run.comm.board = run.comm.board, None
    model, _ = small.parts(run)
    found: list[float] = []
    for step in small.steps(run, model):
        scores = run.evaluate(lambda batch: {"one": torch.ones(len(batch[0]))}, small.data())
        found += [scores["one"], run.comm.sum([float(run.comm.rank)])[0]]
        if run.comm.rank == 1 and step.index == 9:
            run.stop("enough")
    run.comm.board = page
    return run.result["step"], found


def test_ranks_of_several_hosts_agree_one_step_later(tmp_path: Path) -> None:
    """Over sockets, where nothing but the order of calls says which answer belongs to which question."""
    assert pool(2).run(by_sockets, tmp_path) == [(11, [1.0, 1.0] * 11)] * 2
