"""Room: one step: which micro-batches, with what weight, exchanged when, and the update at its end.

A step is one turn over all optimizers unless the program opens turns of its own (`step.turn`), each over some of them.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from worldsize.data.batch import Piece
from worldsize.data.loader import StepBatches
from worldsize.errors import StepError
from worldsize.runtime.clock import COLLECTIVES, COMPUTE, OPTIMIZER, OTHER
from worldsize.runtime.keys import key
from worldsize.runtime.seeds import reseed
from worldsize.strategies.base import Coming
from worldsize.train import losses as meaning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    from worldsize.data.loader import Micro
    from worldsize.train.engine import Engine
    from worldsize.train.parts import Trained


class Turn:
    """One pass over the step's micro-batches that ends in one update.

    Args:
        engine: parts, strategy, seed and precision of the run.
        batches: this rank's micro-batches of the step, and the step's totals.
        trained: the optimizers that this turn updates.
        ordinal: which turn of the step it is, from 0.
    """

    def __init__(
        self, engine: Engine, batches: StepBatches, trained: list[Trained], ordinal: int, *, made: bool = False
    ) -> None:
        self._engine, self._batches, self._trained, self._ordinal = engine, batches, trained, ordinal
        self._own = list({id(placed): placed for entry in trained for placed in entry.models}.values())
        self._others = [placed for placed in engine.parts.models.values() if placed not in self._own]
        self._sender = self._own[0].strategy if self._own else engine.strategy
        if len({placed.strategy.averaged for placed in self._own}) > 1:
            raise StepError(
                "one turn trains models whose strategies sum gradients and models whose strategies average them",
                found=", ".join(f"{placed.name!r} under {placed.strategy.name}" for placed in self._own),
                do="open a turn for each of them: with step.turn(optimizer)",
            )
        self._micro: Micro | None = None
        self._read = self._sent = 0
        self._kinds: set[str] = set()
        self._explicit = 0.0
        self._loss: Tensor | None = None
        self._arriving: Callable[[], Any] | None = None
        self.updated, self._made = False, made
        self.grad_norm: Tensor | None = None

    @property
    def micro_batches(self) -> Iterator[Any]:
        """This rank's micro-batches of the step, on the device. Iterate over all of them, with one backward each."""
        self._engine.clock.enter(COMPUTE)
        self._begin()
        for placed in self._own:
            placed.strategy.open(placed.module, [self._coming(micro) for micro in self._batches.micro])
        for position, micro in enumerate(self._batches.micro):
            last = position == len(self._batches.micro) - 1
            for placed in self._own:
                placed.strategy.exchange(placed.module, last=last)
            for placed in self._others:
                placed.strategy.stand_by(placed.module, last=last)
            self._micro = micro
            reseed(self._key("micro", micro.index), self._engine.device)
            if micro.dummy:
                with self._hidden():
                    yield micro.batch
            else:
                yield micro.batch
            self._read += 1
        self._micro = None
        for placed in self._own:
            placed.strategy.close(placed.module)
        reseed(self._key("tail"), self._engine.device)

    def backward(
        self,
        losses: Tensor | None = None,
        *,
        mean_over: float | None = None,
        sum_over: float | None = None,
        share: Tensor | None = None,
        of: str | None = None,
    ) -> None:
        """Send this micro-batch's losses backward with their exact weight in the step.

        Args:
            losses: one number for each counted item of the micro-batch (any shape; `reduction="none"`); or one
                number together with mean_over or sum_over.
            mean_over: the number is a mean over this many items.
            sum_over: the number is a sum over this many items.
            share: a loss that is already divided by `step.totals`.
            of: which count the losses are over, where `count=` gives several.

        Raises:
            StepError: the meaning is not clear, outside of the loop over micro_batches, or after update.
        """
        if self.updated or self._micro is None:
            raise StepError(
                "backward after update" if self.updated else "backward outside of the loop over step.micro_batches",
                do="call it once for each micro-batch, before update",
            )
        micro = self._micro
        part = meaning.read(
            losses, mean_over, sum_over, share, meaning.counted(micro.count or {}, len(micro.ids), of)
        )
        self._same_kind("explicit" if part.explicit is not None else "counted")
        weight = 0.0 if micro.dummy else self._weight(part, of)
        scaled = weight * self._sender.averaged * self._engine.loss_scale
        weights, clock = self._engine.weight(scaled, part.losses.dtype).expand_as(part.losses), self._engine.clock
        if self._read == len(self._batches.micro) - 1 and self._sender.ranks > 1:
            clock.backward(part.losses)
        self._sender.backward(part.losses, weights)
        clock.sent()
        if not micro.dummy and self._sender.grid.speaks:
            self._add(part.losses.detach(), weight)
            self._explicit += part.explicit or 0.0
        for placed in self._own:
            placed.strategy.sent(placed.module)
        self._sent += 1

    def update(self, closure: Callable[[], Any] | None = None) -> Tensor | None:
        """Make the step: compose statistics, normalise, clip, move the optimizers, the averages and the schedules.

        Args:
            closure: for optimizers that evaluate several times (LBFGS): runs the loop over micro_batches anew.

        Returns:
            the norm of all gradients before clipping (0-dim tensor, on the device), or None where neither clipping
            nor a log line asked for it.

        Raises:
            StepError: micro-batches were left unread, or a parameter got no gradient where that is wrong.
        """
        if self.updated:
            raise StepError("update was called twice")
        if self._made:
            self.updated = True
            return None
        self._engine.clock.enter(OPTIMIZER)
        if closure is None:
            self._finish()
            self._move()
        else:
            self._optimize(closure)
        self._arrive()
        self._engine.guard.after(self._engine.pulse.step, self.ids, self.loss, self.grad_norm)
        self.updated = True
        for entry in self._trained:
            entry.optimizer.zero_grad(set_to_none=True)
        for placed in self._others:
            placed.module.zero_grad(set_to_none=True)
        self._engine.clock.enter(OTHER)
        return self.grad_norm

    @property
    def loss(self) -> Tensor:
        """The step's loss over all ranks (0-dim, float64, on the device); complete once update was called."""
        self._arrive()
        return torch.zeros((), dtype=torch.float64, device=self._engine.device) if self._loss is None else self._loss

    @property
    def ids(self) -> list[list[int]]:
        """Ids of the samples of each micro-batch of this rank; dummies left out."""
        return [micro.ids for micro in self._batches.micro if not micro.dummy]

    def _arrive(self) -> None:
        if self._arriving is not None:
            before = self._engine.clock.enter(COLLECTIVES)
            self._arriving()
            self._arriving = None
            self._engine.clock.enter(before)

    def _add(self, losses: Tensor, weight: float) -> None:
        mine = losses.sum(dtype=torch.float64).mul_(weight)
        self._loss = mine if self._loss is None else self._loss.add_(mine)

    def _begin(self) -> None:
        self._read = self._sent = 0
        self._explicit = 0.0
        self._loss = None
        for placed in self._engine.parts.models.values():
            placed.statistics.begin()

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        """What a dummy does is seen by nobody: not by running statistics, not by logs."""
        with ExitStack() as blocks:
            for placed in self._engine.parts.models.values():
                # A rank that holds only some of the names runs a micro-batch's passes at other times, and hides them then.
                if placed.strategy.names(placed.module) is None:
                    blocks.enter_context(placed.statistics.hidden())
            yield

    def _coming(self, micro: Micro) -> Coming:
        return Coming(micro.batch, self._key("micro", micro.index), micro.dummy)

    def _same_kind(self, kind: str) -> None:
        self._kinds.add(kind)
        if len(self._kinds) > 1:
            raise StepError(
                "one turn mixes losses counted beforehand with mean_over= or sum_over=",
                do="use one of them for all micro-batches of the turn",
            )

    def _weight(self, part: meaning.Contribution, of: str | None) -> float:
        if part.divided or part.explicit is not None:
            return 1.0
        names = [name for name in self._batches.totals if name != "samples"]
        total = self._batches.totals[of or (names[0] if len(names) == 1 else "samples")]
        return 1.0 / total if total else 0.0

    def _finish(self) -> None:
        """After the last backward: everything that makes gradients the whole world's."""
        if self._read < len(self._batches.micro):
            raise StepError(
                "micro-batches were left unread",
                found=f"{self._read} of {len(self._batches.micro)}",
                do="iterate over all of step.micro_batches before update",
            )
        if self._sent < self._read:
            raise StepError("a micro-batch had no backward", found=f"{self._sent} for {self._read} micro-batches")
        for placed in self._own:
            self._engine.check_gradients(placed)
        for placed in self._engine.parts.models.values():
            placed.statistics.compose()
        # On its way while the optimizers move: nothing before the end of the update needs it.
        self._loss = self.loss
        self._arriving = self._engine.strategy.start_sum_(self._loss)

    def _divisor(self) -> float:
        """What gradients are still multiplied by: the loss scale, and a count that was only said at the calls."""
        divisor = self._engine.loss_scale
        if "explicit" in self._kinds:
            total = self._engine.comm.sum([self._explicit])[0] or 1.0
            self._loss = self.loss / total
            divisor *= total
        return divisor

    def _move(self) -> None:
        divisor = self._divisor()
        norms = [self._clip(entry, divisor) for entry in self._trained]
        known = [value for value in norms if value is not None]
        self.grad_norm = torch.linalg.vector_norm(torch.stack(known)) if len(known) > 1 else next(iter(known), None)
        if self._engine.accept_step(self):
            self._engine.hold()
            for entry in self._trained:
                entry.named.step()
            self._engine.after_update(self._trained)

    def _clip(self, entry: Trained, divisor: float) -> Tensor | None:
        wanted = self._engine.wants_norm(entry)
        return self._sender.clip_(entry.named.parameters, divisor=divisor, most=entry.clip, wanted=wanted)

    def _optimize(self, closure: Callable[[], Any]) -> None:
        if len(self._trained) != 1:
            raise StepError("a closure moves one optimizer", do="open a turn for it: with step.turn(optimizer)")
        if self._engine.guard.eager(self._engine.pulse.step):
            raise StepError(
                "no update can be skipped in the midst of a closure", do="use nonfinite='stop' or 'ignore'"
            )
        if self._engine.scale is not None:
            raise StepError("fp16 cannot skip an overflow in the midst of a closure", do="use precision bf16 or fp32")
        entry = self._trained[0]

        def evaluate() -> float:
            entry.optimizer.zero_grad(set_to_none=True)
            closure()
            self._finish()
            divisor = self._divisor()
            self.grad_norm = self._clip(entry, divisor)
            return float(self.loss)

        self._engine.hold()
        entry.optimizer.step(evaluate)
        self._engine.after_update(self._trained)

    def _key(self, *words: int | str) -> int:
        return key(self._engine.seed, *words, self._batches.piece.step, self._ordinal)


class Step:
    """One optimizer step, as `run.steps()` yields it.

    Attributes:
        index: which step of the run, from 0.
        epoch: which epoch, from 0.
        made: it was updated before an interruption, and only what follows the update is done again.
        ends_epoch: whether the epoch's last sample is in it.
        totals: how many items all ranks count in this step, by name; "samples" is always there.
    """

    def __init__(self, engine: Engine, batches: StepBatches, shift: int = 0) -> None:
        self._engine, self._batches = engine, batches
        self.index, self.epoch = batches.piece.step - shift, batches.piece.epoch
        self.ends_epoch, self.totals = batches.piece.ends_epoch, batches.totals
        self.made = False
        self._lost: Tensor | None = None
        self._turns: list[Turn] = []
        self._whole: Turn | None = None
        self._sums: dict[str, tuple[float | Tensor, float]] = {}

    @classmethod
    def again(cls, engine: Engine, index: int, tail: Mapping[str, Any]) -> Step:
        """A step that was made before an interruption: no micro-batches, nothing to update, only what follows it."""
        piece = Piece(index, tail["epoch"], 0, int(tail["totals"]["samples"]), ends_epoch=tail["ends_epoch"])
        step = cls(engine, StepBatches(piece, [], dict(tail["totals"]), 0))
        step.made = True
        step._lost = torch.tensor(tail["loss"], dtype=torch.float64, device=engine.device)
        return step

    def tail(self) -> dict[str, Any]:
        """What `again` needs, in plain values."""
        where = {"epoch": self.epoch, "ends_epoch": self.ends_epoch}
        return {**where, "totals": dict(self.totals), "loss": float(self.loss)}

    @property
    def ids(self) -> list[int]:
        """Ids of the samples this rank sees, in the order of its micro-batches; dummies left out."""
        return [number for micro in self._batches.micro if not micro.dummy for number in micro.ids]

    @property
    def rng(self) -> torch.Generator:
        """A generator on the host, equal on all ranks, new for each step."""
        return torch.Generator().manual_seed(key(self._engine.seed, "rng", self.index))

    @property
    def micro_batches(self) -> Iterator[Any]:
        """See `Turn.micro_batches`."""
        return self._turn.micro_batches

    @property
    def loss(self) -> Tensor:
        """The loss over all ranks (0-dim, float64): of the last turn, where there are several."""
        if self._lost is not None:
            return self._lost
        return self._turns[-1].loss if self._turns else self._turn.loss

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients before clipping, where it was asked for."""
        return self._turns[-1].grad_norm if self._turns else None

    @property
    def at_work(self) -> Any:
        """The micro-batch that is computed, or the step's first one; None where it has none."""
        micro = self._turns[-1]._micro if self._turns else None  # noqa: SLF001 - one room, two classes
        found = micro or next(iter(self._batches.micro), None)
        return None if found is None else found.batch

    @property
    def updated(self) -> bool:
        """Whether every turn that was opened ended in an update."""
        return bool(self._turns) and all(turn.updated for turn in self._turns)

    def backward(self, losses: Tensor | None = None, **meaning: Any) -> None:
        """See `Turn.backward`."""
        self._turn.backward(losses, **meaning)

    def update(self, closure: Callable[[], Any] | None = None) -> Tensor | None:
        """See `Turn.update`."""
        return self._turn.update(closure)

    @contextmanager
    def turn(self, *optimizers: Optimizer) -> Iterator[Turn]:
        """A pass over the micro-batches that trains these optimizers' models only.

        Raises:
            StepError: the block ends without update, or the step already has a turn over all optimizers.
        """
        if self._whole is not None:
            raise StepError("step.turn after step.micro_batches", do="use turns for all of the step, or none")
        turn = self._open([self._engine.parts.trained(optimizer) for optimizer in optimizers])
        yield turn
        if not turn.updated:
            raise StepError("a turn ended without update", do="call turn.update() at its end")

    def log(self, name: str, total: float | Tensor, n: float = 1.0) -> None:
        """Add to a number that is logged as the sum of `total` over the sum of `n`, over all ranks and micro-batches."""
        micro = (self._turns[-1] if self._turns else self._turn)._micro  # noqa: SLF001 - one room, two classes
        if self._engine.strategy.grid.speaks and (micro is None or not micro.dummy):
            # Tensors stay on the device until a line is written: a float here would stop the host at each call.
            value = total.detach().sum(dtype=torch.float64) if isinstance(total, torch.Tensor) else total
            before, count = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (before + value, count + n)

    @property
    def sums(self) -> Mapping[str, tuple[float | Tensor, float]]:
        """What `log` gathered on this rank."""
        return self._sums

    @property
    def _turn(self) -> Turn:
        if self._whole is None:
            if self._turns:
                raise StepError("step.micro_batches after step.turn", do="use turns for all of the step, or none")
            self._whole = self._open(list(self._engine.parts.optimizers))
        return self._whole

    def _open(self, trained: list[Trained]) -> Turn:
        turn = Turn(self._engine, self._batches, trained, len(self._turns), made=self.made)
        self._turns.append(turn)
        return turn
