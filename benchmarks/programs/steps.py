"""Room: one small network trained by several loops in turn, in one set of processes, each loop timed in every round.

The loops share nothing but the process group. A round gives each loop as many steps as one epoch has. Loops that are
written over epochs are timed over the whole epoch ("whole") and without its first steps ("steady"); loops without end
(ours; the tuned one) are timed after as many untimed steps, so that what their workers prepared while others were at
work is used up, and with an epoch's end inside the timed part where they have epochs. Prints JSON: milliseconds a
step, for each loop and round.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from hosttime import HostTime
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RANK, LOCAL_RANK, WORLD = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", LOCAL_RANK) if CUDA else torch.device("cpu")
CLASSES, KEPT = 10, 4096
UNTIMED = 24
"""Steps of each turn before the clock of "steady" starts: three times what 4 workers prepare ahead."""


@dataclass(frozen=True)
class Shape:
    """What is trained: a network of `layers` square layers of `width`, `batch` samples a rank, `steps` an epoch."""

    width: int
    layers: int
    batch: int
    steps: int
    in_memory: bool
    workers: int

    def make(self) -> nn.Module:
        """The network."""
        torch.manual_seed(0)
        blocks = [m for _ in range(self.layers) for m in (nn.Linear(self.width, self.width), nn.GELU())]
        return nn.Sequential(*blocks, nn.Linear(self.width, CLASSES))

    def dataset(self) -> Dataset[Any]:
        """One epoch of all ranks: item by item, or tensors in memory."""
        if self.in_memory:
            size = self.batch * self.steps * WORLD
            return TensorDataset(*samples(size, self.width))
        return Items(self.width, self.batch * self.steps * WORLD)

    def loader(self, **more: Any) -> DataLoader[Any]:
        """A DataLoader with the settings that all loops share."""
        workers = 0 if self.in_memory else self.workers
        return DataLoader(
            more.pop("dataset"), num_workers=workers, pin_memory=CUDA, persistent_workers=workers > 0, **more
        )


@cache
def samples(size: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and classes, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, width, generator=generator), torch.randint(0, CLASSES, (size,), generator=generator)


class Items(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that are fetched one by one."""

    def __init__(self, width: int, length: int) -> None:
        (self._x, self._y), self._length = samples(KEPT, width), length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x[index % KEPT], self._y[index % KEPT]


class Loop:
    """One way to train. `turn` makes as many steps as an epoch has and returns ms a step."""

    def turn(self) -> dict[str, float]:
        """Train and time."""
        raise AssertionError

    def close(self) -> None:
        """Bring it to its end."""


class Epochs(Loop):
    """A loop that iterates over its data anew in every epoch."""

    def __init__(self, shape: Shape, data: Any, step: Callable[[Any, Any], Any], begin: Callable[[], Any]) -> None:
        self._shape, self._data, self._step, self._begin = shape, data, step, begin

    def turn(self) -> dict[str, float]:
        """One epoch."""
        began = middle = together()
        self._begin()
        for number, (x, y) in enumerate(self._data, start=1):
            self._step(x, y)
            if number == UNTIMED:
                middle = now()
        end = now()
        steps = self._shape.steps
        return {"whole": (end - began) / steps * 1e3, "steady": (end - middle) / (steps - UNTIMED) * 1e3}


class Endless(Loop):
    """A loop that goes on where it stood."""

    def __init__(self, shape: Shape, steps: Iterator[Any], offset: int) -> None:
        self._shape, self._steps = shape, steps
        self._go(offset)

    def turn(self) -> dict[str, float]:
        """As many steps as an epoch has."""
        together()
        self._go(UNTIMED)
        began = now()
        self._go(self._shape.steps - UNTIMED)
        return {"steady": (now() - began) / (self._shape.steps - UNTIMED) * 1e3}

    def close(self) -> None:
        """The iterator ends by itself after all turns."""
        self._go(self._shape.steps)

    def profile(self) -> None:
        """One more turn, with the host's time by function."""
        self._go(UNTIMED)
        with HostTime(self._shape.steps - UNTIMED, shown=RANK == 0):
            self._go(self._shape.steps - UNTIMED)
            now()

    def _go(self, steps: int) -> None:
        for _ in islice(self._steps, steps):
            pass


def now() -> float:
    """The time when the device has done all it was given."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def together() -> float:
    """The time when all ranks have come here."""
    dist.all_reduce(torch.zeros(1, device=DEVICE))
    return now()


def group() -> None:
    """The default process group, where no loop has made it."""
    if not dist.is_initialized():
        dist.init_process_group("nccl", device_id=DEVICE) if CUDA else dist.init_process_group("gloo")


def raw(shape: Shape) -> Loop:
    """By hand, as a tutorial has it."""
    group()
    model = DistributedDataParallel(shape.make().to(DEVICE), device_ids=[LOCAL_RANK] if CUDA else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of, data = nn.CrossEntropyLoss(), shape.dataset()
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=False)
    loader = shape.loader(dataset=data, batch_size=shape.batch, sampler=sampler)

    def step(x: Any, y: Any) -> None:
        x, y = x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()

    return Epochs(shape, loader, step, lambda: None)


class Batches:
    """Batches of this rank without end, in the order of the data: no pause between epochs."""

    def __init__(self, shape: Shape) -> None:
        self._shape, self._length = shape, shape.batch * shape.steps * WORLD

    def __iter__(self) -> Iterator[list[int]]:
        for number in count():
            start = (number * WORLD + RANK) * self._shape.batch
            yield [index % self._length for index in range(start, start + self._shape.batch)]


def ahead(loader: Any) -> Iterator[Any]:
    """Each batch copied to the device on a stream of its own while the one before it is computed."""
    if not CUDA:
        yield from loader
        return
    side, coming = torch.cuda.Stream(DEVICE), None
    for batch in loader:
        with torch.cuda.stream(side):
            moved = [tensor.to(DEVICE, non_blocking=True) for tensor in batch]
        if coming is not None:
            yield coming
        torch.cuda.current_stream(DEVICE).wait_stream(side)
        for tensor in moved:
            tensor.record_stream(torch.cuda.current_stream(DEVICE))
        coming = moved


def on_device(shape: Shape) -> Iterator[Any]:
    """Batches cut out of tensors that lie on the device: the least that data in memory can cost."""
    x = torch.randn(shape.batch * shape.steps, shape.width, device=DEVICE)
    y = torch.randint(0, CLASSES, (len(x),), device=DEVICE)
    for number in count():
        start = number * shape.batch % len(x)
        yield x[start : start + shape.batch], y[start : start + shape.batch]


def tuned(shape: Shape) -> Loop:
    """By hand, with everything that is known to help and changes neither model nor arithmetic."""
    group()
    model = DistributedDataParallel(
        shape.make().to(DEVICE),
        device_ids=[LOCAL_RANK] if CUDA else None,
        gradient_as_bucket_view=True,
        static_graph=True,
        broadcast_buffers=False,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loss_of = nn.CrossEntropyLoss()
    endless = {"batch_sampler": Batches(shape), "prefetch_factor": 8}
    data = on_device(shape) if shape.in_memory else ahead(shape.loader(dataset=shape.dataset(), **endless))

    def steps() -> Iterator[None]:
        for x, y in data:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(DEVICE.type, torch.bfloat16):
                loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            yield

    return Endless(shape, steps(), 0)


def accelerate(shape: Shape) -> Loop:
    """Accelerate, as its documentation has it."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=not CUDA)
    model = shape.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = shape.loader(dataset=shape.dataset(), batch_size=shape.batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loss_of = nn.CrossEntropyLoss()

    def step(x: Any, y: Any) -> None:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            accelerator.backward(loss)
            optimizer.step()

    return Epochs(shape, loader, step, lambda: None)


def fabric(shape: Shape) -> Loop:
    """Lightning Fabric, as its documentation has it."""
    from lightning.fabric import Fabric

    made = Fabric(accelerator=DEVICE.type, devices=WORLD, strategy="ddp", precision="bf16-mixed")
    made.launch()
    module = shape.make()
    model, optimizer = made.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
    loader = made.setup_dataloaders(shape.loader(dataset=shape.dataset(), batch_size=shape.batch))
    loss_of = nn.CrossEntropyLoss()

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        made.backward(loss)
        optimizer.step()

    return Epochs(shape, loader, step, lambda: None)


def ours(shape: Shape, folder: Path, turns: int, *, fused: bool) -> Loop:
    """A `Run` at its defaults; periodic saves are off, as none of the peers saves."""
    import worldsize as ws

    run = ws.Run(
        folder,
        global_batch=shape.batch * WORLD,
        duration=f"{shape.steps // 2 + shape.steps * turns}st",
        strategy="ddp",
        precision="bf16",
        saving=ws.Saving(every=None),
    )
    model = run.model(shape.make)
    run.optimizer(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, fused=fused or None), model)
    loss_of = nn.CrossEntropyLoss(reduction="none")
    loader = shape.loader(dataset=shape.dataset(), batch_size=shape.batch)

    def steps() -> Iterator[None]:
        for step in run.steps(loader):
            for x, y in step.micro_batches:
                step.backward(loss_of(model(x), y))
            step.update()
            yield

    return Endless(shape, steps(), shape.steps // 2)


def build(names: list[str], shape: Shape, folder: Path, turns: int) -> dict[str, Loop]:
    """The loops asked for; ours first, so that it opens the process group as it does by itself."""
    makers: dict[str, Callable[[], Loop]] = {
        "ours": lambda: ours(shape, folder / "ours", turns, fused=False),
        "ours-fused": lambda: ours(shape, folder / "ours-fused", turns, fused=True),
        "raw": lambda: raw(shape),
        "tuned": lambda: tuned(shape),
        "accelerate": lambda: accelerate(shape),
        "fabric": lambda: fabric(shape),
    }
    return {name: make() for name, make in makers.items() if name in names}


def arguments() -> argparse.Namespace:
    """What to train and how often."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("width", 64), ("layers", 2), ("batch", 8), ("steps", 200), ("rounds", 5), ("workers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--loops", default="ours,raw")
    parser.add_argument("--in-memory", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    return parser.parse_args()


def take_turns(loops: dict[str, Loop], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Train in rounds, the loops in another order in each; the first one warms everything up."""
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in loops}
    names = list(loops)
    for number in range(rounds + 1):
        at = number % len(names)
        for name in names[at:] + names[:at]:
            took = loops[name].turn()
            if number:
                seen[name].append(took)
    return seen


def profile(loops: dict[str, Loop]) -> None:
    """Where the host's time goes in each of our loops."""
    for name, loop in loops.items():
        if isinstance(loop, Endless) and name.startswith("ours"):
            if RANK == 0:
                print(f"host time of {name}, rank 0", flush=True)
            loop.profile()


def main() -> None:
    """Train, and print what was seen."""
    asked = arguments()
    if CUDA:
        torch.cuda.set_device(DEVICE)
    shape = Shape(asked.width, asked.layers, asked.batch, asked.steps, asked.in_memory, asked.workers)
    loops = build(asked.loops.split(","), shape, asked.dir, asked.rounds + 1 + asked.profile)
    seen = take_turns(loops, asked.rounds)
    if asked.profile:
        profile(loops)
    device = torch.cuda.get_device_name() if CUDA else "cpu"
    if RANK == 0:
        print(json.dumps({"loops": seen, "ranks": WORLD, "device": device}), flush=True)
    for name, loop in loops.items():
        if name.startswith("ours"):
            loop.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
