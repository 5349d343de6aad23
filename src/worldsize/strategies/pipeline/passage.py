"""Room: one turn's micro-batches on their way through this rank's stages, in the schedule's order. No model, no options.

The program's loop stays what it is. Its m-th call of the model goes on with the order until the m-th output is there (on the
rank of the last stage), or as far as it can with what is known (on the others). Losses wait until the order wants them.
All of it is one thread's work: what fails, fails in the line of the program or of the stage that is at fault.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from worldsize.errors import LayoutError, StepError
from worldsize.strategies.pipeline.halves import Half, divisible
from worldsize.strategies.pipeline.order import BACKWARD, FORWARD, INPUTS, RECEIVE, SEND, WEIGHTS, Action
from worldsize.strategies.pipeline.shapes import signature

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from worldsize.strategies.base import Coming
    from worldsize.strategies.pipeline.line import Line
    from worldsize.strategies.pipeline.shapes import Passed, Trace

At = tuple[int, int]
"""A stage and a micro-batch."""


@dataclass(slots=True)
class Call:
    """What the program called the model with, or will."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    trace: Trace
    guessed: bool = False


class Passage:
    """One turn.

    Args:
        line: this rank's place.
        model: the user's model.
        coming: the turn's micro-batches.
    """

    def __init__(self, line: Line, model: nn.Module, coming: Sequence[Coming]) -> None:
        self._line, self._model, self._coming = line, model, coming
        self._order = line.schedule.order(line.rank, len(coming))
        self._at, self._micro = 0, -1
        self._calls: dict[int, Call] = {}
        self._losses: dict[int, tuple[Tensor, Tensor]] = {}
        self._inputs: dict[At, list[Tensor]] = {}
        self._outputs: dict[At, list[Tensor]] = {}
        self._grads: dict[At, list[Tensor]] = {}
        self._works: dict[tuple[str, int, int], list[Any]] = {}
        self._halves: dict[At, Half] = {}
        self._whole: set[At] = set()
        self._divisible: dict[int, bool] = {}
        self._ends = {action.stage: action for action in self._order if action.kind in self._exchanging}
        self._do = {
            FORWARD: self._forward,
            BACKWARD: self._backward,
            INPUTS: self._backward_inputs,
            WEIGHTS: self._backward_weights,
            f"{SEND} {FORWARD}": self._send_forward,
            f"{SEND} {BACKWARD}": self._send_backward,
            f"{RECEIVE} {FORWARD}": self._receive_forward,
            f"{RECEIVE} {BACKWARD}": self._receive_backward,
        }

    @property
    def _exchanging(self) -> tuple[str, ...]:
        """The kinds of which a stage's last one makes its gradients complete."""
        return (BACKWARD, WEIGHTS) if self._line.halves else (BACKWARD, INPUTS)

    def next(self) -> None:
        """The program's loop comes to its next micro-batch."""
        self._refuse_uncalled()
        self._micro += 1

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The program calls the model. Returns its output, or zeros in its shape where that is on another rank.

        Raises:
            StepError: it did so for this micro-batch already, or another call was expected.
        """
        line, micro = self._line, self._micro
        before = self._calls.get(micro)
        if before is not None and not before.guessed:
            raise StepError("the model was called twice in one micro-batch", do="under a pipeline call it once")
        found = Call(args, kwargs, line.shapes.of(self._model, args, kwargs))
        if line.schedule.owner(0) == line.schedule.owner(line.last):
            self._refuse_made(found)
        if before is not None:
            self._refuse_other(before, found)
        self._calls[micro] = found
        if line.last not in line.stages:
            self._run()
            return line.placeholder(found.trace)
        self._run(Action(FORWARD, line.last, micro))
        return found.trace.passed[line.last].whole(self._outputs.pop((line.last, micro)))

    def lose(self, losses: Tensor, weights: Tensor) -> None:
        """The losses of this micro-batch, to go backward when the order comes to it."""
        if self._line.last in self._line.stages:
            self._losses[self._micro] = losses, weights

    def finish(self) -> None:
        """What is left of the order."""
        self._refuse_uncalled()
        self._run()
        assert self._at == len(self._order)
        self._line.wire.wait()

    def _refuse_uncalled(self) -> None:
        if self._micro >= 0 and (self._micro not in self._calls or self._calls[self._micro].guessed):
            raise StepError(
                "the model was not called in a micro-batch", do="under a pipeline call it once for each micro-batch"
            )

    def _run(self, until: Action | None = None) -> None:
        while self._at < len(self._order):
            action = self._order[self._at]
            if action.micro not in self._calls:
                if until is None:
                    return
                self._calls[action.micro] = self._guess(action.micro)
            self._at += 1
            self._do[action.kind](action)
            if action == until:
                return

    def _guess(self, micro: int) -> Call:
        """What the model will be called with, of what it is called with now: the same leaves of another batch."""
        here, there = self._coming[self._micro].batch, self._coming[micro].batch
        call, line = self._calls[self._micro], self._line
        places = {id(leaf): index for index, leaf in enumerate(tree_leaves(here)) if isinstance(leaf, torch.Tensor)}
        leaves, spec = tree_flatten((call.args, call.kwargs))
        later = tree_leaves(there)
        if all(id(leaf) in places or not isinstance(leaf, torch.Tensor) for leaf in leaves):
            args, kwargs = tree_unflatten(
                [later[places[id(leaf)]] if id(leaf) in places else leaf for leaf in leaves], spec
            )
            return Call(args, kwargs, line.shapes.of(self._model, args, kwargs), guessed=True)
        if signature(here) != signature(there):
            raise LayoutError(
                f"schedule {line.schedule.name} needs the shapes of the model's inputs before the loop comes to them",
                found="inputs made inside the loop, of batches of several shapes",
                do="call the model with tensors of the batch itself, or choose gpipe or 1f1b",
            )
        return Call(call.args, call.kwargs, call.trace, guessed=True)

    def _refuse_made(self, call: Call) -> None:
        """On every rank alike, so that none waits for another."""
        given = {id(leaf) for leaf in tree_leaves(self._coming[self._micro].batch)}
        made = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(id(leaf) not in given for leaf in made):
            raise LayoutError(
                f"schedule {self._line.schedule.name} has the first and the last stage on one rank, which needs the model's "
                "inputs before the loop comes to them",
                found="inputs that are made inside the loop",
                do="call the model with tensors of the batch itself, or choose another schedule",
            )

    def _refuse_other(self, guessed: Call, real: Call) -> None:
        first = tree_leaves((guessed.args, guessed.kwargs)), tree_leaves((real.args, real.kwargs))
        values = 0 in self._line.stages and any(a is not b for a, b in zip(*first, strict=False))
        shapes = signature((guessed.args, guessed.kwargs)) != signature((real.args, real.kwargs))
        if values or shapes:
            raise StepError(
                f"schedule {self._line.schedule.name} began this micro-batch with other inputs than the model was called with",
                do="call the model alike in every micro-batch, or choose gpipe or 1f1b",
            )

    def _forward(self, action: Action) -> None:
        _, stage, micro = action
        line, call, coming = self._line, self._calls[micro], self._coming[micro]
        args, kwargs = call.args, call.kwargs
        if stage > 0:
            self._wait(f"{RECEIVE} {FORWARD}", stage - 1, micro)
            args, kwargs = line.arguments(self._before(stage, micro), self._inputs[stage, micro]), {}
        unseen = _unseen(line.stages[stage]) if coming.dummy else nullcontext()
        with torch.enable_grad(), unseen:
            found = line.forward(stage, coming.seed, call.trace, args, kwargs)
        if line.halves:
            # Half a backward pass cuts its outputs off in place, which views refuse.
            found = [value.clone() if value._is_view() else value for value in found]  # noqa: SLF001
        self._outputs[stage, micro] = found
        if stage + 1 in line.stages:
            self._inputs[stage + 1, micro] = call.trace.passed[stage].leaves([value.detach() for value in found])

    def _backward(self, action: Action) -> None:
        _, stage, micro = action
        line, module = self._line, self._line.stages[action.stage]
        roots, grads = self._roots(stage, micro)
        line.inner.exchange(module, last=action == self._ends[stage])
        if len(roots) == 1 and stage == line.last:
            line.inner.backward(roots[0], grads[0])
        elif roots:
            torch.autograd.backward(roots, grads)
        line.inner.sent(module)
        self._give_back(stage, micro)

    def _backward_inputs(self, action: Action) -> None:
        _, stage, micro = action
        line, inputs = self._line, [value for value in self._inputs.get((stage, micro), []) if value.requires_grad]
        if not line.halves or (inputs and not self._divides(stage, micro)):
            self._backward(action)
            self._whole.add((stage, micro))
        elif inputs:
            roots, grads = self._roots(stage, micro)
            if stage == line.last:
                roots, grads = [(roots[0] * grads[0]).sum()], [torch.ones_like(grads[0].sum())]
            self._halves[stage, micro] = Half.first(roots, grads, inputs, line.stages[stage])
            self._give_back(stage, micro)

    def _backward_weights(self, action: Action) -> None:
        _, stage, micro = action
        line, half = self._line, self._halves.pop((stage, micro), None)
        if (stage, micro) in self._whole:
            return
        if half is None:
            self._backward(action)
            return
        line.inner.exchange(line.stages[stage], last=action == self._ends[stage])
        half.second(line.stages[stage])
        line.inner.sent(line.stages[stage])

    def _divides(self, stage: int, micro: int) -> bool:
        """Whether a stage's backward passes can be halved: looked at once a turn."""
        if stage not in self._divisible:
            ends = [self._losses[micro][0]] if stage == self._line.last else self._outputs[stage, micro]
            self._divisible[stage] = divisible(ends)
        return self._divisible[stage]

    def _roots(self, stage: int, micro: int) -> tuple[list[Tensor], list[Tensor]]:
        """Where a stage's backward pass begins, and with what gradients."""
        if stage == self._line.last:
            losses, weights = self._losses.pop(micro)
            return ([losses], [weights]) if losses.requires_grad else ([], [])
        self._wait(f"{RECEIVE} {BACKWARD}", stage + 1, micro)
        outputs = self._outputs.pop((stage, micro))
        facts = self._calls[micro].trace.passed[stage].facts
        roots = [value for value, fact in zip(outputs, facts, strict=True) if fact.trained]
        pairs = zip(roots, self._grads.pop((stage, micro), []), strict=True)
        kept = [(value, grad) for value, grad in pairs if value.requires_grad]
        return [value for value, _ in kept], [grad for _, grad in kept]

    def _give_back(self, stage: int, micro: int) -> None:
        """The gradients of a stage's inputs belong to the stage before."""
        if stage == 0:
            return
        inputs = [value for value in self._inputs.pop((stage, micro)) if value.requires_grad]
        self._grads[stage - 1, micro] = [
            value.grad if value.grad is not None else torch.zeros_like(value) for value in inputs
        ]

    def _send_forward(self, action: Action) -> None:
        self._line.wire.send(self._outputs[action.stage, action.micro], self._line.schedule.owner(action.stage + 1))

    def _send_backward(self, action: Action) -> None:
        grads = self._grads.pop((action.stage - 1, action.micro), [])
        self._line.wire.send(grads, self._line.schedule.owner(action.stage - 1))

    def _receive_forward(self, action: Action) -> None:
        _, stage, micro = action
        room, self._works[action] = self._line.wire.receive(
            self._calls[micro].trace.passed[stage].facts, self._line.schedule.owner(stage)
        )
        self._inputs[stage + 1, micro] = self._calls[micro].trace.passed[stage].leaves(room)

    def _receive_backward(self, action: Action) -> None:
        _, stage, micro = action
        wanted = [fact for fact in self._calls[micro].trace.passed[stage - 1].facts if fact.trained]
        self._grads[stage - 1, micro], self._works[action] = self._line.wire.receive(
            wanted, self._line.schedule.owner(stage)
        )

    def _wait(self, kind: str, stage: int, micro: int) -> None:
        for work in self._works.pop((kind, stage, micro), []):
            work.wait()

    def _before(self, stage: int, micro: int) -> Passed:
        return self._calls[micro].trace.passed[stage - 1]


@contextmanager
def _unseen(stage: nn.Module) -> Iterator[None]:
    """A forward pass in this block moves copies of the buffers: what other passes saved of them stays as it is."""
    kept = [(module, dict(module._buffers)) for module in stage.modules()]  # noqa: SLF001
    for module, buffers in kept:
        copies = {name: None if value is None else value.clone() for name, value in buffers.items()}
        module._buffers.update(copies)  # noqa: SLF001
    try:
        yield
    finally:
        for module, buffers in kept:
            module._buffers.update(buffers)  # noqa: SLF001
