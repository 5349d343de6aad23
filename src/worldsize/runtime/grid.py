"""Room: the grid that ranks stand in: pipeline stages, replicas, shards, parts of sequences and of tensors. Pure.

Ranks are numbered with the last axis fastest: pp x dp_replicate x dp_shard x cp x tp. So tensor parts, which talk most,
are neighbours on one host, and pipeline stages, which talk least, are farthest apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    from worldsize.world import World

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a training asks of the grid.

    Attributes:
        tp: over how many ranks a layer's tensors are split (tensor parallel).
        pp: in how many stages the model lies (pipeline parallel).
        cp: over how many ranks a sequence is split (context parallel).
        replicas: in how many copies shards are held under hsdp; None for one a host.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    replicas: int | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "replicas"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} counts ranks", found=f"{name}={value}", do="give 1 or more")

    @property
    def model(self) -> int:
        """How many ranks work on one micro-batch together."""
        return self.tp * self.pp * self.cp

    def shares(self, world: World) -> int:
        """Into how many shares the global batch is dealt.

        Raises:
            LayoutError: the ranks do not divide, or tensor parts would not lie on one host.
        """
        if world.size % self.model:
            raise LayoutError(
                "the ranks do not fill the grid",
                found=f"{world.size} ranks, pp={self.pp} x cp={self.cp} x tp={self.tp} = {self.model}",
                do=f"use a multiple of {self.model} ranks, or other sizes",
            )
        near = self.cp * self.tp
        if world.nodes > 1 and world.local_size % near:
            raise LayoutError(
                "tensor and sequence parts would lie on two hosts",
                found=f"{world.local_size} ranks a host, cp={self.cp} x tp={self.tp} = {near}",
                do=f"choose sizes whose product divides {world.local_size}",
            )
        return world.size // self.model


@dataclass(frozen=True, slots=True)
class Grid:
    """Where a rank stands. `sizes` and `at` are by axis, in the order of `AXES`."""

    sizes: tuple[int, ...]
    at: tuple[int, ...]

    @classmethod
    def of(cls, world: World, sizes: Sizes, replicas: int) -> Grid:
        """The grid of a world whose shares of the batch are `replicas` times the same shards of the model."""
        shares = sizes.shares(world)
        if shares % replicas:
            raise LayoutError(
                "the replicas do not divide the ranks",
                found=f"{shares} shares of the batch, {replicas} replicas",
                do="choose a number of replicas that divides them",
            )
        lengths = (sizes.pp, replicas, shares // replicas, sizes.cp, sizes.tp)
        place, rest = [], world.rank
        for length in reversed(lengths):
            rest, here = divmod(rest, length)
            place.append(here)
        return cls(lengths, tuple(reversed(place)))

    def size(self, axis: str) -> int:
        """How long an axis is."""
        return self.sizes[AXES.index(axis)]

    def where(self, axis: str) -> int:
        """Where this rank stands along an axis."""
        return self.at[AXES.index(axis)]

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return math.prod(self.sizes)

    @property
    def shares(self) -> int:
        """Into how many shares the global batch is dealt."""
        return self.size("dp_replicate") * self.size("dp_shard")

    @property
    def share(self) -> int:
        """Which of them is this rank's."""
        return self.where("dp_replicate") * self.size("dp_shard") + self.where("dp_shard")

    @property
    def speaks(self) -> bool:
        """Whether this rank's numbers count: of those that work on one share, the last stage's first one does."""
        return self.where("pp") == self.size("pp") - 1 and self.where("cp") == 0 and self.where("tp") == 0

    def written(self) -> dict[str, int]:
        """The axes that are longer than one, by name."""
        return {axis: size for axis, size in zip(AXES, self.sizes, strict=True) if size > 1}
