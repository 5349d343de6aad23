"""What the grid promises."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.errors import ConfigError, LayoutError
from worldsize.runtime.grid import AXES, Grid, Sizes
from worldsize.world import World

lengths = st.tuples(*[st.integers(1, 3) for _ in AXES])


def _grids(pp: int, replicas: int, shards: int, cp: int, tp: int) -> list[Grid]:
    size, sizes = pp * replicas * shards * cp * tp, Sizes(tp=tp, pp=pp, cp=cp)
    return [Grid.of(World(rank=rank, size=size), sizes, replicas) for rank in range(size)]


@given(lengths)
def test_every_rank_has_a_place_of_its_own(axes: tuple[int, ...]) -> None:
    """Places are all different, and read as a number with the last axis fastest they are the rank."""
    for rank, grid in enumerate(_grids(*axes)):
        number = 0
        for size, at in zip(grid.sizes, grid.at, strict=True):
            number = number * size + at
        assert number == rank
        assert grid.sizes == axes


@given(lengths)
def test_one_rank_speaks_for_each_share(axes: tuple[int, ...]) -> None:
    """Sums over ranks that speak count every share of the batch once."""
    grids = _grids(*axes)
    assert sorted(grid.share for grid in grids if grid.speaks) == list(range(grids[0].shares))


@given(lengths)
def test_ranks_of_one_share_are_as_many_as_work_on_it(axes: tuple[int, ...]) -> None:
    """Each share has pp x cp x tp ranks."""
    pp, _, _, cp, tp = axes
    grids = _grids(*axes)
    for share in range(grids[0].shares):
        assert sum(grid.share == share for grid in grids) == pp * cp * tp


@given(lengths)
def test_what_is_written_gives_the_world(axes: tuple[int, ...]) -> None:
    """The named axes multiply to the number of ranks, in the written order."""
    written = _grids(*axes)[0].written()
    assert math.prod(written.values()) == math.prod(axes)
    assert list(written) == [axis for axis, size in zip(AXES, axes, strict=True) if size > 1]


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 4), st.integers(1, 2))
def test_sizes_fill_the_world_or_are_refused(world: int, tp: int, pp: int, cp: int) -> None:
    """Either the ranks divide, or both numbers are told."""
    sizes = Sizes(tp=tp, pp=pp, cp=cp)
    if world % (tp * pp * cp) == 0:
        assert sizes.shares(World(size=world)) * sizes.model == world
    else:
        with pytest.raises(LayoutError, match=f"{world} ranks, pp={pp} x cp={cp} x tp={tp} = {sizes.model}"):
            sizes.shares(World(size=world))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 8))
def test_tensor_parts_lie_on_one_host(nodes: int, shares: int, tp: int) -> None:
    """With so many ranks a host that tp divides them, the parts of a tensor are all on one."""
    local = shares * tp
    hosts: dict[int, set[int]] = {}
    for rank in range(nodes * local):
        world = World(rank, nodes * local, rank % local, local, rank // local, nodes)
        hosts.setdefault(Grid.of(world, Sizes(tp=tp), 1).share, set()).add(world.node)
    assert all(len(found) == 1 for found in hosts.values())


def test_tensor_parts_on_two_hosts_are_refused() -> None:
    """Two hosts of three ranks and tp=2."""
    world = World(size=6, local_size=3, nodes=2)
    with pytest.raises(LayoutError, match=r"two hosts.*3 ranks a host, cp=1 x tp=2 = 2"):
        Sizes(tp=2).shares(world)


def test_replicas_must_divide_the_shares() -> None:
    """Both numbers are told."""
    with pytest.raises(LayoutError, match="4 shares of the batch, 3 replicas"):
        Grid.of(World(size=8), Sizes(tp=2), 3)


@pytest.mark.parametrize("name", ["tp", "pp", "cp", "replicas"])
def test_sizes_count_from_one(name: str) -> None:
    """Zero ranks are none."""
    with pytest.raises(ConfigError, match=f"{name}=0"):
        Sizes(**{name: 0})
