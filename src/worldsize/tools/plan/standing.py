"""Room: what stands in for the parts of a run that need values, other ranks or files, and where the counting begins and ends.

The program, the model, the strategy, the turns and the optimizer are the real ones. Tensors are fake while models are built
and while the body of a step runs; data is real up to the device.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from worldsize.data import loader, tree
from worldsize.data.batch import BatchPlan, deal
from worldsize.strategies import building, context, ddp, ranked, splitting
from worldsize.strategies.pipeline import shapes
from worldsize.tools.plan import cuda
from worldsize.tools.plan.buckets import Buckets
from worldsize.tools.plan.meter import Meter
from worldsize.tools.plan.posed import pose
from worldsize.train import commit, engine, evaluate, loop, record, run, start, step, warm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

STEPS = 2
"""How many are run: the optimizer's state is made in the first."""
_FEW = 2
"""Micro-batches of a step that are run where the others are like the second."""

_aten = torch.ops.aten


class Trace:
    """One layout's run.

    Args:
        question: see `asking.Question`.
        write: gets the answer, and ends the process.
    """

    def __init__(self, question: Mapping[str, Any], write: Callable[[Mapping[str, Any]], None]) -> None:
        self._question, self._write = question, write
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._meter = Meter(self._kinds, question["local"], _ANSWERS)
        self._rules = cuda.Rules() if question["cuda"] else None
        self._engine: Any = None
        self._batch: dict[str, Any] = {}
        self._built: dict[str, Any] = {}
        self._inputs: dict[str, float] = {"bytes": 0.0, "count": 0}
        self._notes: list[str] = []
        self._steps = 0
        self._held: list[torch.nn.Parameter] = []

    def begin(self) -> None:
        """From now on this process poses, and the program can run."""
        pose(self._question["rank"], self._question["ranks"], self._question["local"])
        if self._question["cuda"]:
            cuda.many()
        for name in ("__init__", "__getitem__", "_flatten"):
            setattr(DeviceMesh, name, _real(getattr(DeviceMesh, name)))
        _put(ranked, init_device_mesh=_real(vars(ranked)["init_device_mesh"]))
        for stand in (self._build, self._data, self._loop, self._optimizer, self._shapes, self._nothing):
            stand()

    # --- where tensors are fake

    @contextmanager
    def _shadow(self, phase: str) -> Iterator[None]:
        before, self._meter.phase = self._meter.phase, phase
        try:
            with self._fake, self._meter:
                yield
        finally:
            self._meter.phase = before

    def _build(self) -> None:
        place = engine.Engine.place

        def placed(this: Any, build: Any, name: str, strategy: Any, options: Any) -> Any:
            self._engine = this
            if options.get("compile"):
                self._notes.append("compile is planned as if it were off: an upper bound")
            maker = build if not isinstance(build, torch.nn.Module) else lambda: self._faked(build)
            with self._shadow("build"):
                found = place(this, maker, name, strategy, options)
            self._held += found.module.parameters()
            return found

        _put(engine.Engine, place=placed)
        _put(building, _untouched=lambda _: False)
        _put(torch.nn.Module, _apply=_applied)
        _put(ddp, _wrap=_wrapped)
        self._meter.follow()

    def _faked(self, value: Any) -> Any:
        for module in value.modules():
            for slots in (module._parameters, module._buffers):  # noqa: SLF001
                slots.update({name: self._one(each) for name, each in slots.items() if each is not None})
        return value

    def _one(self, value: Tensor) -> Tensor:
        return value if isinstance(value, FakeTensor) else self._fake.from_tensor(value, static_shapes=True)

    def _data(self) -> None:
        plan, placed = start.plan, loader.Loader._placed  # noqa: SLF001

        def planned(this: Any, settings: Any, data: Any) -> Any:
            settled, source, cut = plan(this, settings, data)
            shares = this.strategy.ranks
            micro = len(cut.micro(cut.step(0)))
            most = max(stop - begin for begin, stop in deal(micro, shares))
            count = min(most, self._question["live"] or most)
            few = min(cut.global_batch, count * shares * cut.micro_batch)
            self._batch = {
                "global_batch": cut.global_batch, "micro_batch": cut.micro_batch, "shares": shares, "micro_batches": micro,
                "most": most, "fewest": min(stop - begin for begin, stop in deal(micro, shares)), "length": cut.length,
                "traced": count, "precision": settled.precision,
            }  # fmt: skip
            return (
                replace(settled, global_batch=few),
                source,
                BatchPlan(cut.length, few, cut.micro_batch, drop_last=cut.drop_last),
            )

        def faked(this: Any, batch: Any) -> Any:
            batch = placed(this, batch)
            self._inputs["bytes"] += _bytes(batch)
            self._inputs["count"] += 1
            return tree.mapped(batch, torch.Tensor, self._one)

        _put(start, plan=planned)
        _put(loader.Loader, _placed=faked)

    # --- where counting begins and ends

    def _loop(self) -> None:
        offer, batches = loop.Loop._offer, vars(step.Turn)["micro_batches"].fget  # noqa: SLF001

        def offered(this: Any, current: Any) -> Iterator[Any]:
            if not self._steps:
                self._built = {"size": self._meter.peak.size, "parts": self._meter.peak.parts}
                self._meter.restart()
            with self._shadow("step"):
                yield from offer(this, current)
            self._steps += 1
            if self._steps == STEPS:
                self._write(self._answer())

        def counted(turn: Any) -> Iterator[Any]:
            for index, batch in enumerate(batches(turn)):
                self._meter.micro = index
                yield batch

        _put(loop.Loop, _offer=offered)
        _put(step.Turn, micro_batches=property(counted))

    def _optimizer(self) -> None:
        move, make, keep = step.Turn._move, run.Run.optimizer, run.Run.average  # noqa: SLF001

        def moved(turn: Any) -> None:
            before, self._meter.phase = self._meter.phase, "optimizer"
            move(turn)
            self._meter.phase = before

        def made(this: Any, *args: Any, **kwargs: Any) -> Any:
            with self._shadow("optimizer"):
                return make(this, *args, **kwargs)

        def kept(this: Any, *args: Any, **kwargs: Any) -> Any:
            with self._shadow("averages"):
                return keep(this, *args, **kwargs)

        _put(step.Turn, _move=moved)
        _put(run.Run, optimizer=made, average=kept)

    def _shapes(self) -> None:
        """What a pipeline and sharded tensors know of shapes is made of the same fake tensors, and is no memory."""
        begin, trace = shapes.Shapes.__init__, shapes.Shapes._trace  # noqa: SLF001

        def begun(this: Any, *args: Any) -> None:
            with self._meter.paused():
                begin(this, *args)

        def traced(this: Any, *args: Any) -> Any:
            with self._meter.paused():
                return trace(this, *args)

        propagate = ShardingPropagator._propagate_tensor_meta_non_cached  # noqa: SLF001

        def propagated(this: Any, *args: Any) -> Any:
            with self._meter.paused():
                return propagate(this, *args)

        _put(ShardingPropagator, _propagate_tensor_meta_non_cached=propagated)
        _put(shapes, FakeTensorMode=lambda **_: self._fake)
        _put(shapes.Shapes, __init__=begun, _trace=traced)

    def _nothing(self) -> None:
        """What is not planned: evaluations, lines, commits, weights from files; what compares the values of ranks."""
        _put(evaluate.Evaluator, scores=lambda *_, **__: _Scores())
        for kind in (record.StepRecorder, record.SumRecorder):
            _put(kind, take=_quiet, flush=_quiet, write=_quiet)
        _put(commit.Committer, prepare=_quiet, commit=_quiet, report=_quiet)
        _put(start, Checkpointer=_Unsaved)
        _put(splitting.Split, _apart=lambda _, digests: [False] * len(digests))
        _put(context.Parted, _try=_quiet)
        _put(warm, start=lambda *_, **__: [])
        _put(run.Run, rehearse=lambda *_, **__: True)

    # --- the answer

    def _kinds(self) -> dict[int, str]:
        """What models and optimizers point to."""
        found: dict[int, str] = {}
        if self._engine is None:
            return found
        for placed in self._engine.parts.models.values():
            found |= {_key(value): "parameters" for value in placed.module.buffers()}
            # While a unit is gathered its whole parameters stand in the place of the shards.
            for value in (*placed.module.parameters(), *self._held):
                found[_key(value)] = "buffers"
                if value.grad is not None:
                    found[_key(value.grad)] = "gradients"
        found |= {_key(value): "parameters" for value in self._held}
        for entry in self._engine.parts.optimizers:
            held = entry.optimizer.state.values()
            found |= {_key(value): "optimizer" for each in held for value in each.values() if _is(value)}
        return found

    def _answer(self) -> dict[str, Any]:
        peak, traffic = self._meter.peak, self._meter.traffic
        per = self._inputs["bytes"] / max(1, self._inputs["count"])
        return {
            "peak": peak.size, "parts": peak.parts,
            "phases": {name: {"size": each.size, "parts": each.parts} for name, each in self._meter.peaks.items()},
            "built": self._built, "batch": self._batch, "input": per,
            "whole": self._whole(), "notes": sorted(set(self._notes)), "precision": self._engine.precision.name,
            "traffic": {"within": traffic.within, "between": traffic.between, "calls": traffic.calls, "steps": STEPS},
            "layout": self._engine.strategy.layout(),
        }  # fmt: skip

    def _whole(self) -> dict[str, float]:
        """Bytes and numbers of what a checkpoint keeps, shards put together; of a pipeline, this rank's stages."""
        models = [placed.module for placed in self._engine.parts.models.values()]
        parameters = [value for model in models for value in model.parameters()]
        buffers = [value for model in models for value in model.buffers()]
        states = [
            value
            for entry in self._engine.parts.optimizers
            for each in entry.optimizer.state.values()
            for value in each.values()
            if _is(value)
        ]
        return {
            "parameters": sum(value.numel() for value in parameters),
            "trained": sum(value.numel() for value in parameters if value.requires_grad),
            "model": sum(value.numel() * value.element_size() for value in (*parameters, *buffers)),
            "optimizer": sum(value.numel() * value.element_size() for value in states),
        }


_apply: Any = torch.nn.Module._apply  # noqa: SLF001


def _put(owner: Any, **stands: Any) -> None:
    """Let these stand in the place of what the owner has."""
    for name, stand in stands.items():
        setattr(owner, name, stand)


def _wrapped(model: torch.nn.Module, options: Any) -> Buckets:
    """In the place of DistributedDataParallel."""
    allow = options.unused_parameters == "allow"
    return Buckets(ddp._Door(model), options.bucket_mb * 2**20, find_unused=allow)  # noqa: SLF001


def _applied(
    root: torch.nn.Module, change: Callable[[Tensor], Tensor], *more: Any, **options: Any
) -> torch.nn.Module:
    """Torch would swap fake parameters in place, which fails where something watches them: here new ones take their place."""
    if not any(isinstance(value, FakeTensor) for value in (*root.parameters(), *root.buffers())):
        same: torch.nn.Module = _apply(root, change, *more, **options)
        return same
    new: dict[int, Tensor] = {}
    for module in root.modules():
        for slots in (module._parameters, module._buffers):  # noqa: SLF001
            for name, value in slots.items():
                if value is None:
                    continue
                if id(value) not in new:
                    with torch.no_grad():
                        made = change(value)
                    is_parameter = isinstance(value, torch.nn.Parameter) and made is not value
                    new[id(value)] = torch.nn.Parameter(made, value.requires_grad) if is_parameter else made
                slots[name] = new[id(value)]  # type: ignore[assignment]
    return root


class _Scores(dict[str, float]):
    """Of an evaluation that was not made."""

    def __missing__(self, key: str) -> float:
        return 0.5


class _Unsaved:
    """The writer of checkpoints that are not written."""

    slowest = 0.0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.close = self.finish = self.hold = self.poll = self.wait = _quiet


def _real(method: Callable[..., Any]) -> Callable[..., Any]:
    """A mesh is made of the ranks' numbers, which are looked at."""

    @functools.wraps(method)
    def outside(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return method(*args, **kwargs)

    return outside


def _quiet(*_: Any, **__: Any) -> None:
    """Nothing is written."""


def _is(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _key(value: Tensor) -> int:
    local = value._local_tensor if isinstance(value, DTensor) else value  # noqa: SLF001
    return int(local.untyped_storage()._cdata)  # noqa: SLF001


def _bytes(batch: Any) -> float:
    sizes: list[float] = []
    tree.mapped(batch, torch.Tensor, lambda leaf: sizes.append(leaf.nbytes))
    return sum(sizes)


def _number(value: Tensor) -> Any:
    """What a program is told that asks for a value: a number that training goes on with."""
    if not isinstance(value, FakeTensor):
        return _aten._local_scalar_dense.default(value)  # noqa: SLF001
    return True if value.dtype is torch.bool else 1.0 if value.is_floating_point() else 1


def _places(value: Tensor) -> Tensor:
    """As if all were so: the most there can be."""
    return torch.zeros((value.numel(), value.dim()), dtype=torch.int64, device=value.device)


_ANSWERS: dict[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense.default: _number,  # noqa: SLF001
    _aten.equal.default: lambda *_: True,
    _aten.nonzero.default: _places,
    _aten.masked_select.default: lambda value, mask: torch.broadcast_tensors(value, mask)[0].flatten(),
}
