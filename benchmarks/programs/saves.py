"""Room: one sharded training that saves in several ways in turn, in one set of processes. Every iteration is timed.

A turn is a row of steps with a save in its first iteration; the first turn of each way has none. After a turn everything
that still writes is waited for, untimed, and the save is deleted. Prints JSON: seconds of each iteration, for each way
and turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import worldsize as ws

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RANK, LOCAL_RANK, WORLD = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", LOCAL_RANK) if CUDA else torch.device("cpu")
BATCH, STEPS = 8, 10
"""Samples a rank, and steps of a turn."""
COMMIT_S = 300.0


class Block(nn.Module):
    """8 * width**2 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (samples, width), and returns the same."""
        return x + self.down(nn.functional.gelu(self.up(x)))


def network(width: int, blocks: int) -> nn.Module:
    """A row of blocks."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


def now() -> float:
    """The time when the device has done all it was given."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


class Ours:
    """A `Run` that saves by itself after every STEPS steps."""

    def __init__(self, folder: Path, width: int, blocks: int, turns: int) -> None:
        saving = ws.Saving(every=f"{STEPS}st", keep_last=1)
        batch = BATCH * WORLD
        self._run = ws.Run(
            folder,
            global_batch=batch,
            micro_batch=BATCH,
            duration=f"{STEPS * turns}st",
            strategy="fsdp",
            saving=saving,
        )
        model = self._run.model(lambda: network(width, blocks))
        self._run.optimizer(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4), model)
        self._saves, self._turn = folder / "checkpoints", 0
        x = torch.randn(BATCH, width, device=DEVICE)

        def steps() -> Iterator[None]:
            for step in self._run.steps():
                for _ in step.micro_batches:
                    step.backward(model(x).square().mean(1))
                step.update()
                yield

        self._steps = steps()

    def turn(self) -> list[float]:
        """The first iteration begins the save that follows the turn before."""
        marks = [now()]
        marks += [now() for _ in islice(self._steps, STEPS)]
        if self._turn:
            _wait_for(self._saves / f"step-{self._turn * STEPS:08d}")
        self._turn += 1
        return [end - begin for begin, end in pairwise(marks)]

    def close(self) -> None:
        """The run ends with a last save."""
        list(self._steps)


class ByHand:
    """The same training by hand; `save` is called at the begin of a turn and returns what must end before the next."""

    def __init__(
        self, step: Callable[[], None], save: Callable[[Path], Callable[[], Any] | None], folder: Path
    ) -> None:
        self._step, self._save, self._folder, self._turn = step, save, folder, 0

    def turn(self) -> list[float]:
        """Times of the iterations."""
        marks, pending = [now()], None
        for number in range(STEPS):
            if self._turn and not number:
                pending = self._save(self._folder / f"save-{self._turn}")
            self._step()
            marks.append(now())
        if pending is not None:
            pending()
        self._turn += 1
        dist.barrier()
        if RANK == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        dist.barrier()
        return [end - begin for begin, end in pairwise(marks)]

    def close(self) -> None:
        """Nothing is open."""


def _wait_for(path: Path) -> None:
    """Until this rank sees the commit. Raises TimeoutError where it does not come."""
    until = time.monotonic() + COMMIT_S
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path} was not committed within {COMMIT_S:g} s")
        time.sleep(0.05)


def training(width: int, blocks: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model in shards, its optimizer, and one step of it, by hand."""
    mesh = init_device_mesh(DEVICE.type, (WORLD,))
    model = network(width, blocks).to(DEVICE)
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(BATCH, width, device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


def ways(folder: Path, width: int, blocks: int, turns: int) -> dict[str, Ours | ByHand]:
    """Every way to save, by name."""
    found: dict[str, Ours | ByHand] = {"ours": Ours(folder / "ours", width, blocks, turns)}
    model, optimizer, step = training(width, blocks)
    group = dist.new_group(backend="gloo")

    def whole(path: Path) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, state = get_state_dict(model, optimizer, options=options)
        if RANK == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"model": weights, "optimizer": state}, path)
        dist.barrier(group)

    def background(path: Path, **more: Any) -> Callable[[], Any]:
        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": state}
        pending: Any = dcp.async_save(saved, checkpoint_id=path, process_group=group, **more)
        return pending.result  # type: ignore[no-any-return]

    found["torch.save"] = ByHand(step, whole, folder / "whole")
    found["DCP async_save"] = ByHand(step, background, folder / "dcp")
    if CUDA:
        stager = BlockingAsyncStager(cache_staged_state_dict=True)
        told = "DCP async_save, pinned and cached"
        found[told] = ByHand(step, lambda path: background(path, async_stager=stager), folder / "dcp-pinned")
    return found


def main() -> None:
    """Take turns and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048 if CUDA else 128)
    parser.add_argument("--params", type=float, default=1e9 if CUDA else 2e6)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--dir", type=Path, required=True)
    asked = parser.parse_args()
    if CUDA:
        torch.cuda.set_device(DEVICE)
    blocks = max(1, round(asked.params / (8 * asked.width**2)))
    loops = ways(asked.dir, asked.width, blocks, asked.turns)
    seen: dict[str, list[list[float]]] = {name: [] for name in loops}
    for _ in range(asked.turns):
        for name, loop in loops.items():
            dist.barrier()
            seen[name].append(loop.turn())
            if RANK == 0:
                print(f"{name}: first iteration {seen[name][-1][0]:.3f} s", flush=True)
    if RANK == 0:
        answer = {"ways": seen, "params": blocks * 8 * asked.width**2, "ranks": WORLD, "device": DEVICE.type}
        print(json.dumps(answer), flush=True)
    for loop in loops.values():
        loop.close()


if __name__ == "__main__":
    main()
