"""Room: memory that was not enough: which, what the training did, with what batch, length and layout, and what to lower."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from worldsize.errors import OutOfMemoryError
from worldsize.runtime.clock import COLLECTIVES, COMPUTE, DATA, EVALUATION, OPTIMIZER, SAVE

if TYPE_CHECKING:
    from worldsize.train.engine import Engine
    from worldsize.train.settings import Settings
    from worldsize.train.step import Step

_DEVICE = re.compile(r"(?:CUDA|HIP) out of memory|CUBLAS_STATUS_ALLOC_FAILED")
_HOST = re.compile(r"DefaultCPUAllocator|Cannot allocate memory|DataLoader worker .* killed by signal: Killed")
_ASKED = re.compile(r"tried to allocate ([\d.]+ \w+)", re.IGNORECASE)
_LEFT = re.compile(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")
_SPLIT = re.compile(r"([\d.]+) GiB is reserved by PyTorch but unallocated")
_MOST_TENSORS = 3
_SCATTERED_GIB = 1.0
"""With so much reserved and unused it is the pieces that are too small."""
_DOING = {
    DATA: "while it waited for data",
    COMPUTE: "in the forward or backward pass",
    COLLECTIVES: "in the forward or backward pass",
    OPTIMIZER: "in the optimizer",
    SAVE: "in a save",
    EVALUATION: "in an evaluation",
}


def ran_out(error: BaseException) -> bool:
    """Whether the error says that there is no memory, of a device or of the host."""
    return _on_device(error) or isinstance(error, MemoryError) or _HOST.search(str(error)) is not None


def _on_device(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or _DEVICE.search(str(error)) is not None


def explain(error: BaseException, engine: Engine, settings: Settings, step: Step | None) -> OutOfMemoryError | None:
    """The error to be told in place of one that says that there is no memory; None for any other.

    Args:
        error: what ended the training.
        engine: the training.
        settings: what decides it.
        step: where it was; None where it was in none.
    """
    if not ran_out(error):
        return None
    text, device = str(error), _on_device(error)
    shapes = [] if step is None else _shapes(step.at_work)
    doing = (
        "before the first step"
        if step is None
        else f"{_DOING.get(engine.clock.phase, 'after the update')} of step {step.index}"
    )
    return OutOfMemoryError(
        f"out of {'GPU' if device else 'host'} memory {doing} ({type(error).__name__})",
        found="; ".join([*_batch(settings, shapes), _layout(engine), *_numbers(text)]),
        do=_device(text, engine.clock.phase, settings, shapes, step)
        if device
        else _host(engine.clock.phase, settings),
    )


def _batch(settings: Settings, shapes: list[torch.Tensor]) -> list[str]:
    micro = "not said yet" if settings.micro_batch is None else f"{settings.micro_batch}"
    length = [f"length {found}"] if (found := _length(shapes)) else []
    sizes = ", ".join("x".join(map(str, each.shape)) for each in shapes[:_MOST_TENSORS])
    tensors = [f"tensors {sizes}"] if sizes else []
    return [f"micro_batch {micro} of global_batch {settings.global_batch}", *length, *tensors]


def _layout(engine: Engine) -> str:
    layout = engine.strategy.layout()
    sizes = ", ".join(f"{name} {size}" for name, size in layout.get("mesh", {}).items())
    return (
        f"{layout['strategy']} on {layout['ranks']} rank(s){f' ({sizes})' if sizes else ''} in {layout['precision']}"
    )


def _numbers(text: str) -> list[str]:
    asked, left = _ASKED.search(text), _LEFT.search(text)
    return [*([f"asked for {asked[1]}"] if asked else []), *([f"{left[2]} of {left[1]} free"] if left else [])]


def _device(text: str, phase: int, settings: Settings, shapes: list[torch.Tensor], step: Step | None) -> str:
    split = _SPLIT.search(text)
    ways = ["set PYTORCH_ALLOC_CONF=expandable_segments:True"] if split and float(split[1]) > _SCATTERED_GIB else []
    if phase == EVALUATION and step is not None:
        return "; or ".join([*ways, "evaluate with a DataLoader of a smaller batch_size"])
    if step is not None and phase != OPTIMIZER:
        ways += [
            *_lower(settings),
            *(["the length"] if _length(shapes) else []),
            "recompute activations (activation_checkpointing)",
        ]
    return "; or ".join([*ways, "spread the model over more ranks (fsdp, --tp, --pp)"])


def _host(phase: int, settings: Settings) -> str:
    lower = ["use fewer or no workers of the DataLoader"] if phase == DATA else _lower(settings)
    return "; or ".join([*lower, "ask for more memory (--mem), or for fewer ranks on each node"])


def _lower(settings: Settings) -> list[str]:
    """The same global batch in smaller pieces."""
    return (
        ["lower micro_batch (a run that goes on: accept=('micro_batch',))"] if (settings.micro_batch or 1) > 1 else []
    )


def _length(shapes: list[torch.Tensor]) -> int | None:
    """Of the sequences, where there are tokens."""
    return max((each.shape[1] for each in shapes if each.dim() > 1 and not each.is_floating_point()), default=None)


def _shapes(batch: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(batch) if isinstance(each, torch.Tensor)]
