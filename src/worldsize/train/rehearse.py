"""Room: a rehearsal: passes forward and backward as a step makes them, which leave nothing behind but an answer.

Parameters, gradients, buffers, random numbers, counters and the position in the data are afterwards what they were before.
"""

from __future__ import annotations

import gc
from contextlib import ExitStack, contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from worldsize.data.batch import Piece
from worldsize.data.loader import Micro, StepBatches
from worldsize.data.tree import move
from worldsize.errors import ConfigError, OutOfMemoryError
from worldsize.runtime.keys import key
from worldsize.runtime.seeds import reseeded
from worldsize.train import memory
from worldsize.train.step import Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from worldsize.runtime.comm import Comm
    from worldsize.train.engine import Engine

_ALONE = 60.0
"""Seconds that a rank without memory waits for the others, who may wait for it in the midst of a pass."""


def rehearse(engine: Engine, batches: Sequence[Any], body: Callable[[Turn], None]) -> bool:
    """Run `body` over these micro-batches. Collective.

    Args:
        engine: the training, with its models and optimizers, before its first step.
        batches: micro-batches of this rank, as the loader would give them.
        body: the loop of a step, without its update.

    Returns:
        whether memory sufficed on every rank.

    Raises:
        ConfigError: the layout cannot undo passes.
        OutOfMemoryError: this rank alone ran out of memory in the midst of an exchange between ranks.
    """
    engine.parts.refuse_late("a rehearsal")
    for placed in engine.parts.models.values():
        if not placed.strategy.rehearses:
            raise ConfigError(
                "nothing can be tried out under this layout before its first step",
                found=placed.strategy.name, do="use single, ddp, fsdp, hsdp or tp with them, or no rehearsal",
            )  # fmt: skip
    micro = [
        Micro(
            index,
            list(range(_samples(batch))),
            move(batch, engine.device, engine.precision.inputs),
            None,
            dummy=False,
        )
        for index, batch in enumerate(batches)
    ]
    samples = sum(len(each.ids) for each in micro) * engine.strategy.ranks
    piece = Piece(0, 0, 0, samples, ends_epoch=False)
    with _no_trace(engine):
        turn = Turn(
            engine, StepBatches(piece, micro, {"samples": float(samples)}, len(micro)), engine.parts.optimizers, 0
        )
        short = _short(body, turn)
        del turn
        if short:
            gc.collect()  # a traceback's frames hold what was computed
        return _agreed(engine.comm, short=short)


def _samples(batch: Any) -> int:
    """The first dimension of its first tensor."""
    return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)


def _short(body: Callable[[Turn], None], turn: Turn) -> bool:
    """Whether memory does not suffice here."""
    try:
        body(turn)
    except (RuntimeError, MemoryError) as error:
        if not memory.ran_out(error):
            raise
        return True
    return False


def _agreed(comm: Comm, *, short: bool) -> bool:
    """Whether memory suffices everywhere. One rank that left a pass may have left others waiting in it: they cannot answer."""
    pending = comm.start_any([short])
    answer: list[float] = []
    if not short:
        return not pending.wait()[0]
    waiting = Thread(target=lambda: answer.extend(pending.wait()), daemon=True)
    waiting.start()
    waiting.join(_ALONE)
    if not answer:
        raise OutOfMemoryError(
            "a trial before the first step did not fit this rank, and others still wait for it in the midst of a pass",
            found=f"no answer within {_ALONE:g} s",
            do="say what to use (a smaller micro-batch, more recomputation) in place of auto",
        )
    return False


@contextmanager
def _no_trace(engine: Engine) -> Iterator[None]:
    placed = list(engine.parts.models.values())
    with ExitStack() as blocks:
        blocks.enter_context(reseeded(key(engine.seed, "rehearsal"), engine.device))
        for each in placed:
            blocks.enter_context(each.statistics.hidden())
            each.strategy.rehearsing = True
        try:
            yield
        finally:
            for each in placed:
                each.strategy.rehearsing = False
                each.strategy.forget(each.module)
