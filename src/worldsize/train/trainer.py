"""Room: `Trainer`, for those who give the parts. It is a loop over `Run` that anybody could have written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from worldsize.config import Duration
from worldsize.errors import ConfigError
from worldsize.train.criterion import Criterion
from worldsize.train.run import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from worldsize.train.step import Step


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What a hook is given after a step: the run, the step, the model, and the evaluation if there was one."""

    run: Run
    step: Step
    model: nn.Module
    scores: Mapping[str, float] | None


class Trainer:
    """Train a model from its parts.

    Args:
        model: a module class or function without arguments, or a module.
        loss: `loss(output, target)`, as torch's losses; its mean is taken over the whole global batch.
        optimizer: called with the placed model.
        data: a dataset of (input…, target), or a DataLoader as it is.
        run_dir: the run folder; started again, training goes on where it stood.
        global_batch, micro_batch, duration: see `Run`.
        eval_data: evaluated every `eval_every`, each sample once.
        metrics: name -> `metric(output, target)`: one number a sample, or (sum, n), such as `ws.accuracy`.
        schedule: called with the optimizer and the number of steps.
        forward: `forward(model, batch) -> (output, target)` for batches that are not (input…, target).
        clip: largest norm of all gradients together.
        average: decay of an average of the weights that is evaluated in the model's place.
        eval_every: a duration in epochs or steps.
        best: the score that says which checkpoint is best; ("loss", "min") where None.
        patience: stop after this many evaluations without a better one.
        model_options: options of `Run.model`.
        run: further arguments of `Run`.
    """

    def __init__(
        self,
        *,
        model: Callable[[], nn.Module] | nn.Module,
        loss: Callable[[Any, Any], Tensor],
        optimizer: Callable[[nn.Module], Optimizer],
        data: Any,
        run_dir: str | Path,
        global_batch: int,
        duration: str | Duration,
        micro_batch: int | None = None,
        eval_data: Any = None,
        metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
        schedule: Callable[[Any, int], Any] | None = None,
        forward: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None,
        clip: float | None = None,
        average: float | None = None,
        eval_every: str | Duration = "1ep",
        best: str | tuple[str, str] | None = None,
        patience: int | None = None,
        model_options: Mapping[str, Any] | None = None,
        **run: Any,
    ) -> None:
        self._every = Duration.parse(eval_every)
        if self._every.unit not in ("ep", "st"):
            raise ConfigError(f"eval_every={eval_every!r}", do="give epochs or steps")
        self._best = best if isinstance(best, tuple) else (best, "max") if best else ("loss", "min")
        self._forward, self._metrics = forward or _forward, dict(metrics or {})
        self._data, self._eval_data, self._patience = data, eval_data, patience
        self.run = Run(
            run_dir, global_batch=global_batch, micro_batch=micro_batch, duration=duration, data=data, **run
        )
        self.model = self.run.model(model, **(model_options or {}))
        self.optimizer = self.run.optimizer(optimizer, self.model, clip=clip)
        if schedule is not None:
            self.run.schedule(self.optimizer, lambda made: schedule(made, self.run.total_steps))
        self._average = self.run.average(self.model, average) if average is not None else None
        self._kept = self.run.keep(evaluations_without_better=0)
        self._criterion = Criterion(loss, self.run.comm)
        self._hooks: list[tuple[Callable[[StepInfo], None], int]] = []

    def hook(self, fn: Callable[[StepInfo], None], every: int = 1) -> Trainer:
        """Call `fn` after every n-th step, on every rank in the same order."""
        self._hooks.append((fn, every))
        return self

    def fit(self) -> dict[str, Any]:
        """Train to the end, from wherever the run folder stands.

        Returns:
            where the run stands, and the last evaluation's scores.
        """
        scores: Mapping[str, float] = {}
        for step in self.run.steps():
            for batch in step.micro_batches:
                output, target = self._forward(self.model, batch)
                step.backward(**self._criterion.arguments(output, target))
            step.update()
            found = self._evaluate() if self._due(step) else None
            scores = found or scores
            for fn, every in self._hooks:
                if (step.index + 1) % every == 0:
                    fn(StepInfo(self.run, step, self.model, found))
        return {**self.run.result, "scores": dict(scores)}

    def _due(self, step: Step) -> bool:
        if self._eval_data is None:
            return False
        if self._every.unit == "ep":
            return step.ends_epoch and (step.epoch + 1) % self._every.count == 0
        return (step.index + 1) % self._every.count == 0

    def _evaluate(self) -> dict[str, float]:
        if self._average is None:
            scores = self.run.evaluate(self._scores, self._eval_data, model=self.model)
        else:
            with self._average.applied():
                scores = self.run.evaluate(self._scores, self._eval_data, model=self.model)
        self.run.log({f"eval/{name}": value for name, value in scores.items()})
        name, mode = self._best
        if self.run.best(scores[str(name)], mode):
            self._kept.evaluations_without_better = 0
        else:
            self._kept.evaluations_without_better += 1
        if self._patience is not None and self._kept.evaluations_without_better >= self._patience:
            self.run.stop(f"no better {name} in {self._patience} evaluations")
        return scores

    def _scores(self, batch: Any) -> dict[str, Any]:
        output, target = self._forward(self.model, batch)
        found = {name: metric(output, target) for name, metric in self._metrics.items()}
        return {"loss": self._criterion.scores(output, target), **found}


def _forward(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, list | tuple) or len(batch) < 2:  # noqa: PLR2004 - an input and a target
        raise ConfigError(
            f"a batch is a {type(batch).__name__}, not (input..., target)",
            do="give forward=lambda model, batch: (output, target)",
        )
    return model(*batch[:-1]), batch[-1]
