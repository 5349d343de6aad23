"""Room: what fits: the least recomputation, and the largest micro-batch, tried out before the first step and then kept.

Trials are steps without an update, with rows as long as there may be, on every rank at once; the rank that needs most decides,
against the rank that has least. A run that goes on takes what was found, unless its layout has changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

import worldsize as ws
from worldsize.errors import OutOfMemoryError
from worldsize.recipes.llm import measure
from worldsize.recipes.llm.modes import AUTO, FULL, NONE, SELECTIVE, Mode

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from worldsize.recipes.llm.config import LLMConfig
    from worldsize.recipes.llm.data import Batch
    from worldsize.recipes.llm.recompute import Recomputation

NAME = "fitting"
"""Under "settled" in run.json."""
_MODES = (Mode(NONE), Mode(SELECTIVE), Mode(FULL))
_HOPELESS = 1.1
"""A micro-batch that by the two before it would need so much more than there is, is not tried."""


def fit(run: ws.Run, config: LLMConfig, bench: Bench) -> int:
    """Settle what the settings leave to be measured. Collective; before the first step.

    Returns:
        rows of a micro-batch. The bench's layers compute as was settled.

    Raises:
        OutOfMemoryError: nothing fits; with the numbers.
        ConfigError: the layout cannot try anything out.
    """
    if AUTO not in (config.micro_batch, config.activation_checkpointing):
        assert isinstance(config.micro_batch, int)
        return config.micro_batch
    begun, layout = run.begun, {**run.layout, **_facts(run, config)}
    before = begun.get("settled", {}).get(NAME, {})
    micro = _kept_micro(run, config, begun, layout["shares"])
    mode = _kept_mode(run, config, before, {**layout, "micro_batch": micro}) if micro else None
    found = Found(config, run, bench, layout["shares"])
    micro, mode = found.settle(micro, mode)
    bench.how.take(mode)
    if found.tried:
        run.say(found.told(micro, mode))
        run.settle(**{NAME: {
            "micro_batch": micro, "activation_checkpointing": str(mode), "layout": {**layout, "micro_batch": micro},
            "limit": found.limit, "needs": {f"{tried} x {rows}": need for (tried, rows), need in found.tried.items()},
        }})  # fmt: skip
    return micro


def sizes(global_batch: int, shares: int) -> list[int]:
    """Micro-batches that cut a step into whole ones, as many for each share where that can be; the smallest first."""
    even = global_batch % shares == 0
    found = [
        size
        for size in range(1, global_batch // shares + 1)
        if global_batch % size == 0 and (not even or global_batch // size % shares == 0)
    ]
    return found or [1]


@dataclass
class Bench:
    """Tries a step out.

    Attributes:
        run: the training, before its first step.
        model: placed.
        optimizer: of the run; has moved nothing yet.
        how: what computes the model's layers.
        losses: (model, batch) -> one loss a position.
        batch: rows -> a micro-batch as large as any.
        device: of this rank.
    """

    run: ws.Run
    model: nn.Module
    optimizer: torch.optim.Optimizer
    how: Recomputation
    losses: Callable[[nn.Module, Batch], Tensor]
    batch: Callable[[int], Batch]
    device: torch.device

    @cached_property
    def gauge(self) -> measure.Gauge:
        """What counts here."""
        if self.device.type == "cuda":
            return measure.Device(self.device)
        return measure.Host([*self.model.parameters(), *self.model.buffers()])

    def limit(self, given: int | None) -> int:
        """Bytes that every rank has."""
        return -int(self.run.comm.max([-self.gauge.limit(given, ws.here().local_size)])[0])

    def need(self, mode: Mode, rows: int, passes: int) -> int | None:
        """The most bytes that a rank holds in a step, with the optimizer's state; None where one ran out of memory.

        Args:
            mode: of the layers.
            rows: of a micro-batch.
            passes: how many follow each other: behind the first one there are gradients.
        """
        self.how.take(mode)
        peak = 0

        def passed(turn: Any) -> None:
            for batch in turn.micro_batches:
                turn.backward(share=self.losses(self.model, batch).sum() / batch["tokens"].numel())

        def measured(turn: Any) -> None:
            nonlocal peak
            peak = self.gauge.peak(lambda: passed(turn))

        fits = self.run.rehearse([self.batch(rows)] * passes, measured)
        torch.compiler.reset()  # code that was made for a trial's sizes would take those of the training for varying ones
        return int(self.run.comm.max([peak + self._later()])[0]) if fits else None

    def _later(self) -> int:
        """AdamW holds two moments of each number that is trained; they are made in the first update."""
        return 2 * sum(_bytes(value) for group in self.optimizer.param_groups for value in group["params"])


@dataclass
class Found:
    """What trials found, by mode and rows."""

    config: LLMConfig
    run: ws.Run
    bench: Bench
    shares: int
    tried: dict[tuple[str, int], int | None] = field(default_factory=dict)
    limit: int = 0

    def settle(self, rows: int | None, mode: Mode | None) -> tuple[int, Mode]:
        """What is open (None) is measured: the least recomputation, at the smallest micro-batch; then how far that goes."""
        if rows is not None and mode is not None:
            return rows, mode
        self.limit = self.bench.limit(self.config.memory_limit)
        given = self.config.activation_checkpointing
        modes = [mode] if mode is not None else list(_MODES) if given == AUTO else [Mode.parse(given)]
        choices = sizes(self.config.global_batch, self.shares) if rows is None else [rows]
        least = next((each for each in modes if self._fits(each, choices[0])), None)
        if least is None:
            raise OutOfMemoryError(
                f"a micro-batch of {choices[0]} does not fit",
                found=self._numbers(),
                do="use a smaller micro_batch or max_seq_len, or spread the model over more ranks (fsdp, tensor parallel)",
            )
        largest = choices[0]
        for size in choices[1:]:
            if self._hopeless(least, size) or not self._fits(least, size):
                break
            largest = size
        return largest, least

    def told(self, rows: int, mode: Mode) -> str:
        """The decision in one line, with the numbers."""
        return f"measured: activation_checkpointing {mode}, micro_batch {rows}; {self._numbers()}"

    def _fits(self, mode: Mode, rows: int) -> bool:
        passes = min(2, -(-self.config.global_batch // (rows * self.shares)))
        self.tried[str(mode), rows] = need = self.bench.need(mode, rows, passes)
        return need is not None and need <= self.limit

    def _hopeless(self, mode: Mode, rows: int) -> bool:
        known = [(size, need) for (name, size), need in self.tried.items() if name == str(mode) and need is not None]
        steps = list(pairwise(known))
        if not steps:
            return False
        (size, need), (larger, more) = steps[-1]
        return more + (more - need) / (larger - size) * (rows - larger) > _HOPELESS * self.limit

    def _numbers(self) -> str:
        needs = ", ".join(f"{mode} x {rows}: {_told(need)}" for (mode, rows), need in self.tried.items())
        return f"needs {needs}; limit {_told(self.limit)} a rank"


def _facts(run: ws.Run, config: LLMConfig) -> dict[str, Any]:
    """What else memory depends on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() and config.device != "cpu" else "cpu"
    return {
        "world": run.comm.size, "device": device, "max_seq_len": config.max_seq_len, "compile": config.compile,
        "memory_limit": config.memory_limit,
    }  # fmt: skip


def _kept_micro(run: ws.Run, config: LLMConfig, begun: dict[str, Any], shares: int) -> int | None:
    """What the settings say, or what the run was begun with, where ranks can share it out still."""
    if isinstance(config.micro_batch, int):
        return config.micro_batch
    before: int | None = begun.get("config", {}).get("micro_batch")
    if before is None or before in sizes(config.global_batch, shares):
        return before
    shared = f"does not divide {config.global_batch} rows over {shares} shares"
    run.say(f"micro_batch {before}, as this run was begun, {shared}: measured anew")
    return None


def _kept_mode(run: ws.Run, config: LLMConfig, before: dict[str, Any], layout: dict[str, Any]) -> Mode | None:
    """What the settings say, or what was measured for this layout."""
    if config.activation_checkpointing != AUTO:
        return Mode.parse(config.activation_checkpointing)
    if not before:
        return None
    changed = [name for name, value in layout.items() if before["layout"].get(name) != value]
    if not changed:
        run.say(f"activation_checkpointing {before['activation_checkpointing']}, as measured when this run was begun")
        return Mode.parse(before["activation_checkpointing"])
    pairs = ", ".join(f"{name} {before['layout'].get(name)}, now {layout[name]}" for name in changed)
    run.say(f"the layout has changed ({pairs}): recomputation is measured anew")
    return None


def _bytes(value: Tensor) -> int:
    part = value.to_local() if hasattr(value, "to_local") else value
    return int(part.numel() * part.element_size())


def _told(amount: int | None) -> str:
    if amount is None:
        return "out of memory"
    return f"{amount / 2**30:.2f} GiB" if amount >= 2**30 else f"{amount / 2**20:.2f} MiB"
