"""Room: losses and gradients that are not finite: who had the first one, in which step, on which samples, and what follows.

Where nobody asked for more, nothing is read from a device before it is there: on a GPU a step's loss is looked at when the next
one is over, or before a commit. To skip an update the host must know before the optimizers move, so that is asked for by name.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

import torch

from worldsize.errors import StepError
from worldsize.runtime.sharded import local
from worldsize.strategies.base import brief
from worldsize.train.arriving import Arrivals

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from worldsize.runtime.comm import Comm
    from worldsize.train.parts import Placed

_MOST_SKIPPED, _MOST_REWINDS = 10, 3
_SHOWN = 12


class Guard:
    """Looks at what each turn of a step gives.

    Args:
        policy: see `Run`: stop, skip, rewind or ignore.
        comm: the agreement between all ranks; models: the run's.
        device: where they are.
        scaled: gradients overflow now and then as a matter of course (fp16): only losses count.
        note: takes a line for a person.

    Attributes:
        rewinds: how often the training went back.
        goes_back: whether it is to go back to the last commit now.
    """

    def __init__(
        self, policy: str, comm: Comm, models: dict[str, Placed], device: torch.device, *, scaled: bool,
        note: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._policy, self._comm, self._models, self._device, self._note = policy, comm, models, device, note
        self._scaled = scaled
        self._late: deque[_Numbers] = deque()
        self._arrivals = Arrivals()
        self._careful, self._skipped, self.rewinds = -1, 0, 0
        self.goes_back = False

    def eager(self, step: int) -> bool:
        """Whether this step's update is only made once its numbers are known to be finite."""
        return self._policy == "skip" or step <= self._careful

    @property
    def needs_norm(self) -> bool:
        """Whether each step's norm is looked at. Where it is not, a gradient shows by the next loss."""
        return self._policy in ("skip", "rewind") and not self._scaled

    def admits(self, step: int, ids: list[list[int]], loss: Tensor, norm: Tensor | None) -> bool:
        """Whether an update may be made. Collective where not.

        Raises:
            StepError: too many in a row may not.
        """
        numbers = _Numbers(step, ids, loss, None if self._scaled else norm, self._arrivals)
        numbers.read()
        if numbers.finite:
            self._skipped = 0
            return True
        self._skipped += 1
        what, found = self._words(numbers, "gradient")
        if self._skipped > _MOST_SKIPPED:
            raise StepError(f"{what}, nor were those of {_MOST_SKIPPED} steps before it", found=found, do=_DO)
        self._note(f"{what}, and the update is left out: {found}")
        return False

    def after(self, step: int, ids: list[list[int]], loss: Tensor, norm: Tensor | None) -> None:
        """After a turn's update, while its gradients are still there.

        Raises:
            StepError: something was not finite, and that ends the run.
        """
        if self._policy in ("ignore", "skip") or self.eager(step):
            return
        self._late.append(_Numbers(step, ids, loss, None if self._scaled else norm, self._arrivals))
        self._look(step, late=0 if self._device.type == "cpu" else 1)

    def drain(self) -> bool:
        """Before a commit, and at the end: look at what is late. Returns whether the training is to go back.

        Raises:
            StepError: something was not finite, and that ends the run.
        """
        self._look(None, late=0)
        return self.goes_back

    def check_weights(self, step: int) -> None:
        """Before a commit. Collective. Raises StepError where a weight is not finite."""
        if self._policy == "ignore":
            return
        held = [local(value.detach()) for placed in self._models.values() for value in placed.module.parameters()]
        largest = torch.nn.utils.get_total_norm([value for value in held if _counts(value)], math.inf)
        if self._comm.max([float(not torch.isfinite(largest))])[0]:
            where = self._first("weights")
            raise StepError(f"weights of step {step} are not finite, and were not committed", found=where, do=_DO)

    def back(self, step: int) -> None:
        """The training stands at a commit again, at this step."""
        self.goes_back = False
        self._note(
            f"went back to step {step}; up to step {self._careful} every update is looked at before it is made"
        )

    def _look(self, step: int | None, *, late: int) -> None:
        """Read all but the last so many. The gradients that are there are those of `step`, or of none."""
        while len(self._late) > late:
            numbers = self._late.popleft()
            numbers.read()
            if not numbers.finite:
                self._late.clear()
                self._answer(numbers, "gradient" if numbers.step == step else "weights")

    def _answer(self, numbers: _Numbers, kind: str) -> None:
        what, found = self._words(numbers, kind)
        if self._policy == "rewind" and self.rewinds < _MOST_REWINDS:
            self.rewinds += 1
            self.goes_back, self._careful = True, numbers.step
            self._note(f"{what}: {found}")
            return
        often = f", after going back {self.rewinds} times" if self.rewinds else ""
        raise StepError(f"{what}{often}", found=found, do=_DO)

    def _words(self, numbers: _Numbers, kind: str) -> tuple[str, str]:
        ids = sorted({number for rank in self._comm.gather(numbers.ids) for micro in rank for number in micro})
        where = self._first(kind) or self._first("weights") or "no gradient nor weight"
        what = "loss" if not math.isfinite(numbers.loss) else "gradient"
        norm = "" if numbers.norm is None else f", gradient norm {numbers.norm:g}"
        samples = brief([str(number) for number in ids], _SHOWN)
        return (
            f"the {what} of step {numbers.step} is not finite",
            f"loss {numbers.loss:g}{norm}; first in {where}; samples {samples}",
        )

    def _first(self, kind: str) -> str:
        """The first parameter in the models' order that has a gradient, or is itself, not finite on some rank."""
        found: list[tuple[int, int, str]] = []
        for number, placed in enumerate(self._models.values()):
            order = {name: place for place, name in enumerate(placed.strategy.names(placed.module) or ())}
            for place, (name, value) in enumerate(placed.module.named_parameters()):
                tensor = value.grad if kind == "gradient" else value.detach()
                if tensor is not None and _broken(local(tensor)):
                    found.append((number, order.get(name, place), f"{placed.name}.{name}"))
                    break
        firsts = [each for each in self._comm.gather(min(found, default=None)) if each is not None]
        return f"{'the gradient of ' if kind == 'gradient' else 'the weights '}{min(firsts)[2]!r}" if firsts else ""


_DO = "look at these samples, the learning rate and the clipping; or Run(nonfinite='skip') or 'rewind': see docs/watchdog.md"


class _Numbers:
    """What one turn gave.

    Args:
        step: which step; ids: of each micro-batch of this rank.
        loss, norm: 0-dim tensors.
        arrivals: takes them to the host.
    """

    def __init__(
        self, step: int, ids: list[list[int]], loss: Tensor, norm: Tensor | None, arrivals: Arrivals
    ) -> None:
        self.step, self.ids = step, ids
        self.loss, self.norm = 0.0, None if norm is None else 0.0
        self._arriving = arrivals.send([loss] if norm is None else [loss, norm])

    def read(self) -> None:
        """Wait until they are there: not at all, where a step was made since."""
        self.loss, *norms = self._arriving.read()
        self.norm = norms[0] if norms else None

    @property
    def finite(self) -> bool:
        """Whether all of them are."""
        return math.isfinite(self.loss) and (self.norm is None or math.isfinite(self.norm))


def _counts(value: Tensor) -> bool:
    return bool(value.numel()) and value.device.type != "meta" and value.is_floating_point()


def _broken(value: Tensor) -> bool:
    return _counts(value) and not bool(torch.isfinite(value).all())
