"""Room: trainings for one set of processes, one after another: a start on GPUs costs more than any of them.

Started as `worldsize run ... battery.py FOLDER CASE...`. Rank 0 leaves FOLDER/<case>.json for each: what was seen, or how
it failed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import worldsize as ws

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS, HALF, ENDLESS = 20, 9, 1_000_000
MICRO, GLOBAL, LENGTH, CLASSES = 8, 96, 500, 10
"""A step of 12 micro-batches, and epochs whose last step has a ragged one."""


class Net(nn.Module):
    """Convolution, running statistics, repeated blocks, drop-out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(3))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(512, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """x: (samples, 1, 8, 8). Returns (samples, CLASSES)."""
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(self.drop(x))
        return out


def dataset() -> TensorDataset:
    """Images whose class can be learnt."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(LENGTH) % CLASSES
    patterns = torch.randn(CLASSES, 1, 8, 8, generator=generator)
    return TensorDataset(patterns[classes] + 3.0 * torch.randn(LENGTH, 1, 8, 8, generator=generator), classes)


def train(folder: Path, *, strategy: str | None = None, steps: int = STEPS, every: str | None = "3st", precision: str = "fp32",
          seen: Callable[[int], None] = lambda _: None, **options: Any) -> dict[str, Any]:  # fmt: skip
    """One run to its end, or on to its end.

    Returns:
        loss, norm and lr by step; a digest of the weights; the device, and what it holds at most (bytes).
    """
    run = ws.Run(
        folder, global_batch=GLOBAL, micro_batch=MICRO, duration=f"{steps}st", strategy=strategy, precision=precision,
        saving=ws.Saving(every=every, keep_last=2), timeout=60,
    )  # fmt: skip
    model = run.model(Net, **options)
    optimizer = run.optimizer(lambda m: torch.optim.AdamW(m.parameters(), 1e-3), model, clip=1.0)
    run.schedule(optimizer, lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1.0 + step / STEPS)))
    average = run.average(model, 0.9)
    found: dict[str, Any] = {"loss": {}, "norm": {}, "lr": {}}
    for step in run.steps(dataset()):
        found["lr"][step.index] = optimizer.param_groups[0]["lr"]
        for x, y in step.micro_batches:
            step.backward(cross_entropy(model(x), y, reduction="none"))
        norm = step.update()
        assert norm is not None
        found["loss"][step.index], found["norm"][step.index] = float(step.loss), float(norm)
        seen(step.index)
    device = next(iter(model.parameters())).device
    with average.applied():
        averaged = run.evaluate(lambda batch: {"hit": model(batch[0]).argmax(1) == batch[1]}, dataset())
    return found | {"weights": _digest(run.whole(model)), "device": str(device), "averaged": averaged["hit"]}


def again(strategy: str, folder: Path) -> dict[str, Any]:
    """The same training in two folders, with deterministic algorithms."""
    torch.use_deterministic_algorithms(mode=True)
    try:
        runs = [train(folder / name, strategy=strategy, every=None) for name in ("one", "two")]
    finally:
        torch.use_deterministic_algorithms(mode=False)
    return {"one": runs[0], "two": runs[1]}


def switch(first: str, second: str, folder: Path, **options: Any) -> dict[str, Any]:
    """A training that one strategy begins, with these options, and another one takes up."""
    shared = folder / "-".join([first, *options, "to", second])
    train(shared, strategy=first, steps=HALF, **options)
    return train(shared, strategy=second)


def forever(folder: Path) -> dict[str, Any]:
    """Tell who we are once training is under way, and train on."""

    def seen(step: int) -> None:
        if step == HALF:
            (folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()), encoding="utf-8")

    return train(folder / "forever", strategy="ddp", steps=ENDLESS, seen=seen)


def _digest(weights: dict[str, Tensor]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        found.update(weights[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


Case = Callable[[Path], dict[str, Any]]


def cases() -> dict[str, Case]:
    """Name -> what to do in a folder; names are `<strategy>-<what>`."""
    found: dict[str, Case] = {"ddp-forever": forever}
    for strategy, precision in itertools.product(("single", "ddp", "fsdp"), ("fp32", "fp64", "bf16", "fp16")):
        found[f"{strategy}-{precision}"] = _in(f"{strategy}-{precision}", strategy, every=None, precision=precision)
    for strategy in ("single", "ddp", "fsdp"):
        found[f"{strategy}-compiled"] = _in(f"{strategy}-compiled", strategy, every=None, compile=True)
        found[f"{strategy}-twice"] = partial(again, strategy)
        found[f"{strategy}-begin"] = _in(f"begun-{strategy}", strategy, steps=HALF)
        found[f"{strategy}-resume"] = _in(f"resumed-{strategy}", strategy)
    found["fsdp-offloaded"] = _in("fsdp-offloaded", "fsdp", every=None, offload=True)
    found["ddp-to-fsdp"], found["fsdp-to-ddp"] = partial(switch, "ddp", "fsdp"), partial(switch, "fsdp", "ddp")
    found["fsdp-offloaded-to-ddp"] = partial(switch, "fsdp", "ddp", offload=True)
    return found


def _in(name: str, strategy: str, **options: Any) -> Case:
    return lambda folder: train(folder / name, strategy=strategy, **options)


def _answers(folder: Path, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    known = cases()
    for name in names:
        try:
            yield name, known[name](folder)
        except Exception:  # noqa: BLE001 - the others must still be tried; the test shows it
            yield name, {"error": traceback.format_exc()}


def main() -> None:
    """Every case that was asked for."""
    torch.backends.cudnn.allow_tf32 = False
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, answer in _answers(folder, sys.argv[2:]):
        if os.environ.get("RANK", "0") == "0":
            (folder / f"{name}.json").write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
