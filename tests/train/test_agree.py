"""What ranks wish for is heard by all after the same step, the next one at the latest."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hypothesis import given
from hypothesis import strategies as st

from worldsize.runtime.board import Board, size_of
from worldsize.runtime.clock import Clock
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
    for mine, now in steps:
        any_, all_ = (Wishes(*map(join, zip(*mine, strict=True))) for join in (any, all))
        at_once = any_ if now else Wishes(leave=all_.leave, end=all_.end)
        found.append(open_ if not now and (open_.leave or open_.end) else Wishes(*map(max, open_, at_once)))
        open_ = Wishes() if now else any_
        if found[-1].leave or found[-1].end:
            break
    return found


@given(steps=st.lists(st.tuples(st.tuples(*[WISHES] * RANKS), st.sampled_from([False, False, True])), max_size=12))
def test_every_rank_hears_the_same_after_the_same_step(steps: list[tuple[tuple[Wishes, ...], bool]]) -> None:
    """For any wishes, at any difference in speed: at once what all wish for, the rest one step later."""
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
