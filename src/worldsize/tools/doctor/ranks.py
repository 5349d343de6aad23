"""Room: one rank of the measurement of collectives: latency and bus bandwidth, of all ranks and of pairs of them.

Bus bandwidth as NCCL's tests count it: what each link carries, so that the figure is the link's whatever the number of
ranks: 2 (n-1)/n of the bytes over the time for an all-reduce, (n-1)/n of all bytes for an all-gather.
"""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from worldsize.runtime import env
from worldsize.runtime.device import choose_device
from worldsize.runtime.farewell import dismiss
from worldsize.tools.doctor.collect import RESULT, SECONDS
from worldsize.tools.doctor.rounds import tournament

if TYPE_CHECKING:
    from collections.abc import Callable

    from worldsize.world import World

_MIB = 1 << 20
_WHOLE = {"cuda": 1024 * _MIB, "cpu": 4 * _MIB}
_PAIR = {"cuda": 256 * _MIB, "cpu": 2 * _MIB}
_SMALL = 4
_WARM, _FEW, _MANY = 3, 3, 200
_LONGEST_S = 40.0
"""For all pairs of one kind: with many hosts each is then measured with some of the others."""


class Probe:
    """Measures on one rank."""

    def __init__(self, world: World, device: torch.device, seconds: float) -> None:
        self._world, self._device, self._seconds = world, device, seconds

    def seen(self) -> dict[str, Any] | None:
        """Everything, on rank 0."""
        whole = self._group(None, _WHOLE[self._device.type])
        places: list[Any] = [None] * self._world.size
        dist.all_gather_object(
            places, (self._world.node, self._world.local_rank, socket.gethostname(), self._peers())
        )
        pairs = self._local(places) + self._between(places)
        every: list[Any] = [None] * self._world.size
        dist.all_gather_object(every, pairs)
        if self._world.rank:
            return None
        return {
            "backend": dist.get_backend(),
            "ranks": self._world.size,
            "device": self._device.type,
            "whole": whole,
            "places": [place[:2] for place in places],
            "peers": {str(place[0]): place[3] for place in places if place[1] == 0},
            "pairs": [pair for found in every for pair in found],
        }

    def _peers(self) -> list[tuple[int, int]]:
        """GPUs of this host that cannot read each other's memory."""
        count = torch.cuda.device_count() if self._device.type == "cuda" else 0
        pairs = [(one, other) for one in range(count) for other in range(one + 1, count)]
        return [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]

    def _local(self, places: list[Any]) -> list[dict[str, Any]]:
        """Pairs of ranks on one host, on all hosts at the same time."""
        mine = [rank for rank, place in enumerate(places) if place[0] == self._world.node]
        most = max(sum(place[0] == each[0] for each in places) for place in places)
        return self._rounds(tournament(mine), len(tournament(range(most))))

    def _between(self, places: list[Any]) -> list[dict[str, Any]]:
        """Pairs of hosts, by the first rank of each."""
        firsts = [rank for rank, place in enumerate(places) if place[1] == 0]
        rounds = tournament(firsts)
        return self._rounds(rounds, len(rounds))

    def _rounds(self, rounds: list[list[tuple[int, int]]], count: int) -> list[dict[str, Any]]:
        """What this rank measured as the first of a pair. All ranks go through the same number of rounds."""
        end, found = time.monotonic() + _LONGEST_S, []
        for number in range(count):
            over = torch.tensor([time.monotonic() > end], dtype=torch.int32, device=self._device)
            dist.all_reduce(over)
            if over.item():
                break
            pairs = rounds[number] if number < len(rounds) else []
            pair = next((sorted(pair) for pair in pairs if self._world.rank in pair), None)
            if pair is not None:
                found += self._pair(pair)
        return found

    def _pair(self, pair: list[int]) -> list[dict[str, Any]]:
        """What the first of the two has measured; nothing on the other."""
        group = dist.new_group(pair, use_local_synchronization=True)
        values = self._group(group, _PAIR[self._device.type])
        dist.destroy_process_group(group)
        return [{"ranks": pair, **values}] if self._world.rank == pair[0] else []

    def _group(self, group: dist.ProcessGroup | None, size: int) -> dict[str, float]:
        """Bytes/s and seconds, of the group's slowest member."""
        ranks = dist.get_world_size(group)
        if ranks == 1:
            return {}
        share = size // ranks // _SMALL
        one = torch.zeros(size // _SMALL, device=self._device)
        part = torch.zeros(share, device=self._device)
        parts = torch.zeros(share * ranks, device=self._device)
        tiny = torch.zeros(1, device=self._device)
        reduce = self._timed(lambda: dist.all_reduce(one, group=group), group)
        gather = self._timed(lambda: dist.all_gather_into_tensor(parts, part, group=group), group)
        trip = self._timed(lambda: dist.all_reduce(tiny, group=group), group)
        return {
            "all_reduce": 2 * (ranks - 1) / ranks * size / reduce,
            "all_gather": (ranks - 1) / ranks * share * ranks * _SMALL / gather,
            "latency": trip,
        }

    def _timed(self, call: Callable[[], object], group: dist.ProcessGroup | None) -> float:
        """Seconds of one call: warm, then so many that they fill the time; the same number on all ranks."""
        for _ in range(_WARM - 1):
            call()
        first = self._spent(call, 1, group)
        count = max(_FEW, min(_MANY, int(self._seconds / first))) if first < self._seconds else 1
        return self._spent(call, count, group) / count

    def _spent(self, call: Callable[[], object], count: int, group: dist.ProcessGroup | None) -> float:
        self._settle()
        began = time.perf_counter()
        for _ in range(count):
            call()
        self._settle()
        spent = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device=self._device)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX, group=group)
        return float(spent.item())

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    """Meet, measure, leave what was found."""
    environ = env.read()
    world = env.detect(environ)
    device = choose_device(world, "auto", environ)
    # Without device_id: bound to one, NCCL splits each group off the whole, for which all ranks would have to come.
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=world.rank, world_size=world.size)
    try:
        found = Probe(world, device, float(environ[SECONDS])).seen()
    finally:
        dismiss()
    if found is not None:
        Path(environ[RESULT]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
