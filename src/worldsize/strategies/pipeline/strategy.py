"""Room: a model in stages over ranks (pipeline parallel), each stage laid out by another strategy. Knows both interfaces.

Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "PipeDream" (1F1B), SOSP 2019, and "Megatron-LM" (interleaved), SC 2021;
Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023; Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from worldsize.errors import LayoutError, StepError
from worldsize.strategies import building
from worldsize.strategies.base import Coming, Options, Setting, Strategy
from worldsize.strategies.pipeline import chain
from worldsize.strategies.pipeline.flat import Flat
from worldsize.strategies.pipeline.line import Line, Wire
from worldsize.strategies.pipeline.measure import costs
from worldsize.strategies.pipeline.order import Schedule
from worldsize.strategies.pipeline.passage import Passage
from worldsize.strategies.pipeline.shapes import Shapes
from worldsize.strategies.pipeline.ties import Shared, between
from worldsize.strategies.routing import route

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from worldsize.strategies.pipeline.chain import Cut
    from worldsize.strategies.ranked import Ranked


class Pipeline(Strategy):
    """Each rank holds some stages of the model, and only these.

    Args:
        setting: where it works.
        inner: lays a stage over the ranks that have the same one; `Flat` where None.
    """

    name = "pipeline"
    rehearses: ClassVar[bool] = False

    def __init__(self, setting: Setting, inner: Ranked | None = None) -> None:
        self._inner = Flat(setting) if inner is None else inner
        super().__init__(setting)
        self.grid = self._inner.grid
        self.padding = self._inner.padding  # type: ignore[misc]
        self._line: Line | None = None
        self._shared: Shared | None = None
        self._turn: Passage | None = None
        self._parameters: list[str] = []
        self._state: dict[str, tuple[int, Tensor]] = {}

    @property
    def averaged(self) -> int:
        """As the strategy of the stages has it."""
        return self._inner.averaged

    def lay(self, build: Callable[[], nn.Module], options: Options) -> nn.Module:
        """The model with this rank's stages in it, and nothing of the others."""
        if self._line is not None:
            raise LayoutError("a pipeline is for one model", do="put them into one module, or use fsdp or tp")
        schedule = Schedule(self.setting.schedule or options.schedule, self.grid.size("pp"), options.stages)
        home = torch.device("cpu") if options.init == "here" else self.device
        model, fill = building.begin(build, options, self.setting.precision, home)
        if options.init == "here":
            self._inner.refuse_differences(model)
        cut = chain.cut(model, schedule.stages, options, costs(model, options, self.setting))
        ties = between(model, cut, schedule, alone=isinstance(self._inner, Flat) and self._inner.ranks == 1)
        self._note(model, cut, schedule)
        shapes = Shapes(model, cut, self.device, self.setting.precision)
        plan = self._plan(model, cut, options)
        rank = self.grid.where("pp")
        mine = schedule.held(rank)
        for tie in ties:
            if rank in tie.ranks:
                tie.fill(fill)
        for path, part in cut.parts:
            if any((path, part) in cut.stages[stage] for stage in mine):
                fill(part)
        chain.keep_only(model, cut, mine)
        stages = [cut.stage(stage) for stage in mine]
        here = replace(options, init="here", tp_plan=plan)
        with chain.followed(model, stages):
            placed = [self._inner.place(lambda stage=stage: stage, here) for stage in stages]  # type: ignore[misc]
        halves = isinstance(self._inner, Flat) and not options.activation_checkpointing and not options.compile
        wire = Wire(self._inner.mesh["pp"].get_group(), self.device)
        self._line = Line(
            rank, schedule, dict(zip(mine, placed, strict=True)), self._inner, shapes, wire, cut.own, halves,  # type: ignore[arg-type]
        )  # fmt: skip
        self._shared = Shared(model, ties, rank, wire)
        return route(model, _Entry(self, model), replace(self.setting.precision, autocast=None), self.device)

    def open(self, model: nn.Module, batches: Sequence[Coming]) -> None:
        """The turn's micro-batches are known: begin with the first."""
        line = self._lined()
        for stage in line.stages.values():
            self._inner.open(stage, batches)
        self._turn = Passage(line, model, batches)

    def exchange(self, model: nn.Module, *, last: bool) -> None:
        """The loop comes to the next micro-batch. What is exchanged when is the schedule's."""
        super().exchange(model, last=last)
        assert self._turn is not None
        self._turn.next()

    def backward(self, losses: Tensor, weights: Tensor) -> None:
        """Noted where the last stage is; of no consequence elsewhere."""
        assert self._turn is not None
        self._turn.lose(losses, weights)

    def close(self, model: nn.Module) -> None:
        """Work through what is left, and complete the gradients of each stage."""
        del model
        assert self._turn is not None
        self._turn.finish()
        self._turn = None
        for stage in self._lined().stages.values():
            self._inner.close(stage)
        assert self._shared is not None
        self._shared.sum_()

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The program calls the model.

        Raises:
            StepError: where its ranks could not work together on it.
        """
        if torch.is_grad_enabled() is not (self._turn is not None):
            raise StepError(
                "under a pipeline the model is called with gradients inside the loop over micro_batches, and without them "
                "outside of it",
                do="evaluate after the loop, in run.evaluate or under torch.no_grad()",
            )
        if self._turn is not None:
            return self._turn.call(args, kwargs)
        line = self._lined()
        return line.glance(line.shapes.of(model, args, kwargs), torch.initial_seed(), args, kwargs)

    def check_gradients(self, model: nn.Module) -> list[str]:
        """What the stages of this rank miss."""
        del model
        return [name for stage in self._lined().stages.values() for name in self._inner.check_gradients(stage)]

    def differing_buffers(self, model: nn.Module) -> list[str]:
        """Compared between the ranks that have the same stage."""
        return self._inner.differing_buffers(model)

    def adopt(self, optimizer: Optimizer, models: Sequence[nn.Module], clip: float | None) -> Optimizer:
        """As the strategy of the stages has it."""
        return self._inner.adopt(optimizer, models, clip)

    def norm(self, grads: Sequence[Tensor]) -> Tensor:
        """Over the gradients of all stages together, the same number on all ranks. Collective."""
        if self._shared is not None:
            grads = self._shared.once(grads)
        mine = self._inner.norm(grads)
        squared = mine.double().square()
        dist.all_reduce(squared, group=self._lined().wire.group)
        # A rank whose stages are frozen has no gradients to say what they are.
        return squared.sqrt().to(mine.dtype if grads else self.setting.precision.parameters)

    def names(self, model: nn.Module) -> list[str]:
        """All parameters of the whole model in its order, on every rank."""
        del model
        return self._parameters

    def start_sum_(self, tensor: Tensor) -> Callable[[], Any]:
        """Over the world: ranks that do not speak give zeros."""
        return self._inner.start_sum_(tensor)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Over the ranks that have the same stages."""
        return self._inner.gather(tensor)

    def whole(self, model: nn.Module) -> dict[str, Tensor]:
        """The union of all stages, one tensor after another."""
        mine, wire = super().whole(model), self._lined().wire
        found: dict[str, Tensor] = {}
        for name, (owner, like) in self._state.items():
            room = mine[name].to(self.device) if name in mine else torch.empty_like(like, device=self.device)
            wire.spread([room], owner)
            found[name] = room.cpu()
        return found

    def layout(self) -> dict[str, Any]:
        """As the strategy of the stages says, over a mesh with the pipeline in it."""
        return self._inner.layout()

    def _lined(self) -> Line:
        assert self._line is not None, "no model was placed"
        return self._line

    def _plan(self, model: nn.Module, cut: Cut, options: Options) -> Mapping[str, Any] | None:
        """The plan of the whole model, by the names that modules have in their stages."""
        parts = self.grid.size("tp")
        if parts == 1:
            return options.tp_plan
        from worldsize.strategies.tensorplan import resolve

        styles = {model.get_submodule(name): style for name, style in resolve(model, options.tp_plan, parts).items()}
        inside = [pair for stage in range(len(cut.stages)) for pair in cut.stage(stage).named_modules()]
        return {name: styles[module] for name, module in inside if module in styles}

    def _note(self, model: nn.Module, cut: Cut, schedule: Schedule) -> None:
        """Remember what the whole model has, and who holds it."""
        self._parameters = [name for name, _ in model.named_parameters()]
        holders = {
            value: schedule.owner(index)
            for index, stage in enumerate(cut.stages)
            for _, part in stage
            for value in (*part.parameters(), *part.buffers())
        }
        dtype = self.setting.precision.parameters
        for name, value in model.state_dict(keep_vars=True).items():
            like = torch.empty(value.shape, dtype=dtype if value.is_floating_point() else value.dtype, device="meta")
            self._state[name] = holders.get(value, 0), like


class _Entry:
    """The way into the model: the call, and nothing else."""

    def __init__(self, pipeline: Pipeline, model: nn.Module) -> None:
        self._pipeline, self._model = pipeline, model

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method not in ("__call__", "forward"):
            raise StepError(
                f"the model's method {method!r} was called, and no rank of a pipeline has all of the model",
                do="call the model itself, or use fsdp or tp",
            )
        return self._pipeline.call(self._model, args, kwargs)
