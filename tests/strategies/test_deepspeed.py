from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import worldsize as ws
from tests.integration import program
from tests.pools import pool
from tests.strategies.models import WIDTH, Blocks, Frozen, TiedBlocks, TiedInRoot
from worldsize.errors import WorldsizeError
from worldsize.runtime import session
from worldsize.train.optim import NamedOptimizer

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from worldsize.testing.ranks import RankPool

STAGES = ("zero0", "zero1", "zero2", "zero3")
SHARDED = STAGES[1:]


def _data(length: int = 44) -> torch.utils.data.TensorDataset:
    drawn = torch.Generator().manual_seed(5)
    return torch.utils.data.TensorDataset(
        torch.randn(length, WIDTH, generator=drawn), torch.randint(3, (length,), generator=drawn)
    )


def _run(folder: Path, strategy: str, **settings: Any) -> ws.Run:
    defaults: dict[str, Any] = {
        "duration": "2ep",
        "precision": "fp64",
        "device": "cpu",
        "saving": ws.Saving(every=None),
    }
    return ws.Run(folder, global_batch=16, micro_batch=4, strategy=strategy, **{**defaults, **settings})


def _grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Groups by shape, one of them without decay: shapes must be the whole ones, whatever lies where."""
    values = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [value for value in values if value.dim() > 1], "weight_decay": 0.3},
            {"params": [value for value in values if value.dim() < 2], "lr": 3e-2},
        ],
        lr=1e-2,
    )


def _fit(
    folder: Path,
    strategy: str,
    build: Callable[[], nn.Module] = Blocks,
    make: Callable[[nn.Module], torch.optim.Optimizer] = _grouped,
    *,
    options: Mapping[str, Any] | None = None,
    clip: float | None = 0.4,
    call: str = "__call__",
    **settings: Any,
) -> dict[str, Any]:
    """A training of two ragged epochs on this rank: numbers and final weights, or what was refused."""
    try:
        run = _run(folder, strategy, **settings)
        model = run.model(build, **options or {})
        optimizer = run.optimizer(make, model, clip=clip)
        run.schedule(optimizer, lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5))
        losses, norms = [], []
        for step in run.steps(_data()):
            for x, y in step.micro_batches:
                output = getattr(model, call)(x)
                step.backward(nn.functional.cross_entropy(output, y, reduction="none"))
            norms.append(step.update())
            losses.append(float(step.loss))
        whole = run.whole(model)
        run.close()
    except WorldsizeError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"losses": losses, "norms": [float(each) for each in norms if each is not None], "weights": whole}


def _alone(folder: Path, *args: Any, **settings: Any) -> dict[str, Any]:
    try:
        return _fit(folder, "single", *args, **settings)
    finally:
        session.close()


def _same(found: list[dict[str, Any]], wanted: dict[str, Any], rel: float = 1e-10) -> None:
    for each in found:
        assert "error" not in each, each
        assert each["losses"] == pytest.approx(wanted["losses"], rel=rel)
        assert each["norms"] == pytest.approx(wanted["norms"], rel=10 * rel)
        assert each["weights"].keys() == wanted["weights"].keys()
        for name, value in wanted["weights"].items():
            torch.testing.assert_close(each["weights"][name], value, rtol=rel, atol=rel)
    program.same(found[0]["weights"], found[-1]["weights"])


@pytest.mark.parametrize("strategy", STAGES)
def test_one_curve_in_float64(strategy: str, two: RankPool, tmp_path: Path) -> None:
    """Accumulation, a ragged last batch, two groups, clipping, a schedule: ranks of other samples end with single's weights."""
    _same(two.run(_fit, tmp_path / "ranks", strategy), _alone(tmp_path / "one"))


@pytest.mark.parametrize("build", [Frozen, TiedBlocks, TiedInRoot])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_frozen_and_tied_parameters(strategy: str, build: type[nn.Module], two: RankPool, tmp_path: Path) -> None:
    """What is not trained stays, and what is shared is one."""
    _same(two.run(_fit, tmp_path / "ranks", strategy, build), _alone(tmp_path / "one", build))


def _frozen_apart(model: nn.Module) -> torch.optim.Optimizer:
    """A group in which nothing is trained, before one with both."""
    inside = {True: list[nn.Parameter](), False: list[nn.Parameter]()}
    for name, value in model.named_parameters():
        inside[name.startswith("blocks.1.")].append(value)
    return torch.optim.AdamW([{"params": inside[each]} for each in (True, False)], lr=1e-2)


@pytest.mark.parametrize("strategy", ["zero0", "zero2"])
def test_a_run_with_frozen_parameters_goes_on(strategy: str, two: RankPool, tmp_path: Path) -> None:
    """DeepSpeed's optimizer has the trained ones only, and counts them by itself."""
    how = (strategy, Frozen, _frozen_apart)
    two.run(_fit, tmp_path / "ranks", *how, duration="1ep")
    wanted = _alone(tmp_path / "one", *how[1:])
    _same(
        two.run(_fit, tmp_path / "ranks", *how),
        {**wanted, **{name: wanted[name][3:] for name in ("losses", "norms")}},
    )


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


@pytest.mark.parametrize("strategy", SHARDED)
def test_parameters_on_three_ranks_need_not_divide(strategy: str, three: RankPool, tmp_path: Path) -> None:
    """Partitions of uneven parameters, an idle rank in the last step, another optimizer."""
    _same(three.run(_fit, tmp_path / "ranks", strategy, Blocks, _sgd), _alone(tmp_path / "one", Blocks, _sgd))


class Gained(Blocks):
    """A parameter of fewer values than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> Any:
        """Of the logits."""
        return super().forward(x) * self.gain


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_some_ranks_may_have_nothing_of_a_parameter(strategy: str, three: RankPool, tmp_path: Path) -> None:
    """They save it, read it and train with it like the others."""
    three.run(_fit, tmp_path / "ranks", strategy, Gained, duration="1ep")
    wanted = _alone(tmp_path / "one", Gained)
    _same(
        three.run(_fit, tmp_path / "ranks", strategy, Gained),
        {**wanted, **{name: wanted[name][3:] for name in ("losses", "norms")}},
    )


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_what_is_frozen_since_the_checkpoint_leaves_its_state_behind(
    strategy: str, two: RankPool, tmp_path: Path
) -> None:
    """It lies in no partition, and goes on as in one process."""
    two.run(_fit, tmp_path / "ranks", strategy, duration="1ep")
    _alone(tmp_path / "one", duration="1ep")
    _same(two.run(_fit, tmp_path / "ranks", strategy, Frozen), _alone(tmp_path / "one", Frozen))


@pytest.mark.parametrize("strategy", ["single", "zero2", "zero3"])
def test_another_optimizer_is_refused_under_the_name_of_the_program_s(
    strategy: str, two: RankPool, tmp_path: Path
) -> None:
    """Whatever DeepSpeed puts into its place, and whichever layout wrote."""
    if strategy == "single":
        _alone(tmp_path, duration="1ep")
    else:
        two.run(_fit, tmp_path, strategy, duration="1ep")
    for found in two.run(_fit, tmp_path, "zero2", Blocks, _sgd):
        assert "now torch.optim.sgd.SGD, before torch.optim.adamw.AdamW" in found["error"]


@pytest.mark.parametrize("strategy", ["zero0", "zero2", "zero3"])
def test_another_optimizer_that_is_accepted_begins_anew(strategy: str, two: RankPool, tmp_path: Path) -> None:
    """In the partitions too: the curve is that of one process which changes it there."""
    how: dict[str, Any] = {"accept": ("optimizer",)}
    two.run(_fit, tmp_path / "ranks", strategy, duration="1ep")
    _alone(tmp_path / "one", duration="1ep")
    wanted = _alone(tmp_path / "one", Blocks, _sgd, **how)
    assert len(wanted["losses"]) == 3
    _same(two.run(_fit, tmp_path / "ranks", strategy, Blocks, _sgd, **how), wanted)


def test_four_ranks_of_stage_two_go_on_as_two(two: RankPool, tmp_path: Path) -> None:
    """Shards of the optimizer's state are those of the ranks that read, with the curve of one process (B087)."""
    pool(4).run(_fit, tmp_path / "ranks", "zero2", duration="1ep")
    wanted = _alone(tmp_path / "one")
    _same(
        two.run(_fit, tmp_path / "ranks", "zero2"),
        {**wanted, **{name: wanted[name][3:] for name in ("losses", "norms")}},
    )


@pytest.mark.parametrize("strategy", SHARDED)
def test_dropout_and_batch_normalisation(strategy: str, two: RankPool, tmp_path: Path) -> None:
    """Random numbers and running statistics do not depend on the stage."""
    wanted = program.train(tmp_path / "one", "single:1")
    session.close()
    found = program.everyone(two.run(program.train, tmp_path / "ranks", f"{strategy}:2"))
    program.close(wanted, found, 1e-10)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_optimizer_in_host_memory(strategy: str, two: RankPool, tmp_path: Path) -> None:
    """CPU offload trains the same curve."""
    offload: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
    if strategy == "zero3":
        offload["offload_param"] = {"device": "cpu"}
    options = {"deepspeed": {"zero_optimization": offload}}
    found = two.run(_fit, tmp_path / "ranks", strategy, options=options, precision="fp32")
    _same(found, _alone(tmp_path / "one", precision="fp32"), 1e-5)


@pytest.mark.parametrize(
    ("strategy", "json"), [("zero0", {}), ("zero3", {}), ("zero2", {"bf16": {"enabled": "auto"}})]
)
def test_bf16(strategy: str, json: dict[str, Any], two: RankPool, tmp_path: Path) -> None:
    """By autocast as everywhere, or with DeepSpeed's own float32 masters of bf16 parameters."""
    options = {"deepspeed": json}
    found = two.run(_fit, tmp_path / "ranks", strategy, options=options, precision="bf16")
    assert found[0]["weights"]["head.weight"].dtype is torch.float32
    _same(found, _alone(tmp_path / "one", precision="bf16"), 1e-4 if not json else 2e-2)


@pytest.mark.parametrize("call", ["__call__", "logits"])
@pytest.mark.parametrize("strategy", ["zero0", "zero3"])
def test_other_methods_go_through_the_engine(strategy: str, call: str, two: RankPool, tmp_path: Path) -> None:
    """A method of the root gathers the root's own parameters too, with activations computed again."""
    options = {"activation_checkpointing": True}
    _same(
        two.run(_fit, tmp_path / "ranks", strategy, Scaled, call=call, options=options),
        _alone(tmp_path / "one", Scaled),
    )


class Scaled(Blocks):
    """With a parameter of its own, and a method besides forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        """As by the method."""
        return self.logits(x)

    def logits(self, x: torch.Tensor) -> Any:
        """Three a sample."""
        return self.head(self.encode(x) * self.scale)


def _half(folder: Path, strategy: str) -> tuple[list[float], float]:
    """fp16 with a scale that must overflow first: gradients of the skipped step are thrown away."""
    run = _run(folder, strategy, precision="fp16")
    model = run.model(Blocks)
    run.optimizer(_grouped, model)
    assert run._engine.scale is not None
    run._engine.scale.value = 2.0**130
    losses = []
    for step in run.steps(_data()):
        for x, y in step.micro_batches:
            step.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
        step.update()
        losses.append(float(step.loss))
    scale = run._engine.scale.value
    run.close()
    return losses, scale


@pytest.mark.parametrize("strategy", STAGES)
def test_a_step_that_overflows_is_skipped(strategy: str, two: RankPool, tmp_path: Path) -> None:
    """The scale is halved until gradients are finite, on all ranks at once, as on one."""
    wanted, scale = _half(tmp_path / "one", "single")
    session.close()
    for losses, found in two.run(_half, tmp_path / "ranks", strategy):
        assert losses == pytest.approx(wanted, rel=1e-3)
        assert found == scale < 2.0**130


def _adversaries(folder: Path, strategy: str) -> list[float]:
    """Each trains in its own turn, one of them through the other."""
    run = _run(folder, strategy)
    maker = run.model(functools.partial(Blocks, out=WIDTH), name="maker")
    critic = run.model(Blocks, name="critic")
    first, second = run.optimizer(_grouped, maker), run.optimizer(_grouped, critic)
    losses = []
    for step in run.steps(_data()):
        for optimizer, sign in ((second, 1.0), (first, -1.0)):
            with step.turn(optimizer) as turn:
                for x, y in turn.micro_batches:
                    made = maker(x) if sign < 0 else maker(x).detach()
                    turn.backward(sign * nn.functional.cross_entropy(critic(made), y, reduction="none"))
                turn.update()
                losses.append(float(turn.loss))
    run.close()
    return losses


@pytest.mark.parametrize("strategy", ["zero0", "zero2", "zero3"])
def test_two_models_in_turns(strategy: str, two: RankPool, tmp_path: Path) -> None:
    """Gradients that a model gets in another's turn count for nothing."""
    wanted = _adversaries(tmp_path / "one", "single")
    session.close()
    for found in two.run(_adversaries, tmp_path / "ranks", strategy):
        assert found == pytest.approx(wanted, rel=1e-10)


def _own(folder: Path, strategy: str) -> tuple[bool, bool]:
    run = _run(folder, strategy, duration="1st")
    model = run.model(Blocks)
    optimizer: Any = run.optimizer(_grouped, model)
    for step in run.steps(_data()):
        for x, y in step.micro_batches:
            step.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
        step.update()
    value = next(value for value in model.parameters() if value.requires_grad)
    named = NamedOptimizer("0", optimizer, {"model": model})
    first, again = optimizer.state[value]["exp_avg"], optimizer.state[value]["exp_avg"]
    run.close()
    return named.own, first is again


@pytest.mark.parametrize("strategy", STAGES)
def test_state_that_is_made_when_asked_for_is_not_the_optimizers_own(
    strategy: str, two: RankPool, tmp_path: Path
) -> None:
    """It would take memory of the device as long as it was kept for a save's copies."""
    for own, same in two.run(_own, tmp_path, strategy):
        assert own == same


def _warm(folder: Path, strategy: str, source: Path, *, late: bool) -> dict[str, torch.Tensor]:
    run = _run(folder, strategy)
    model = run.model(Blocks)
    if not late:
        run.warm_start(model, source)
    run.optimizer(_grouped, model)
    if late:
        run.warm_start(model, source)
    found = run.whole(model)
    run.close()
    return found


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_warm_start(strategy: str, late: bool, two: RankPool, tmp_path: Path) -> None:
    """Weights from elsewhere reach the partitions, before and after they were cut."""
    weights = {name: value.double() for name, value in Blocks().state_dict().items()}
    torch.save(weights, tmp_path / "weights.pt")
    for found in two.run(_warm, tmp_path / "run", strategy, tmp_path / "weights.pt", late=late):
        program.same(found, weights)


def _effects(folder: Path, strategy: str, json: dict[str, Any]) -> dict[str, Any]:
    run = _run(folder, strategy, precision="fp32")
    model = run.model(Blocks, deepspeed=json)
    run.optimizer(_grouped, model)
    inner = run._engine.strategy._entries[model].engine.optimizer  # type: ignore[attr-defined]
    found = {
        name: getattr(inner, name, None) for name in ("reduce_bucket_size", "overlap_comm", "round_robin_gradients")
    }
    stage = 3 if hasattr(inner, "fp16_groups") else 2 if getattr(inner, "partition_gradients", False) else 1
    numbers = {"stage": stage, "whole": len(getattr(inner, "persistent_parameters", []))}
    run.close()
    return found | numbers


def test_what_only_deepspeed_knows_reaches_it(two: RankPool, tmp_path: Path) -> None:
    """Stage, bucket size, overlap and the size below which stage 3 keeps parameters whole."""
    zero = {"stage": 2, "reduce_bucket_size": 1234, "overlap_comm": True, "round_robin_gradients": True}
    (found, _) = two.run(_effects, tmp_path / "a", "deepspeed", {"zero_optimization": zero})
    assert found == {
        "stage": 2, "reduce_bucket_size": 1234, "overlap_comm": True, "round_robin_gradients": True, "whole": 0,
    }  # fmt: skip
    for least, whole in ((0, 0), (100_000, 10)):
        json = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": least}}
        (found, _) = two.run(_effects, tmp_path / str(least), "deepspeed", json)
        assert (found["stage"], found["whole"]) == (3, whole)


def _noted(folder: Path, json: dict[str, Any]) -> list[str]:
    run = _run(folder, "deepspeed")
    run.optimizer(_grouped, run.model(Blocks, deepspeed=json))
    found = list(run._engine.notes)
    run.close()
    return found


def test_what_deepspeed_passes_over_is_said_by_the_run(two: RankPool, tmp_path: Path) -> None:
    """One line names the keys of the file that do nothing here."""
    json = {"zero_optimization": {"stage": 1, "sub_group_size": 100}, "checkpoint": {"tag_validation": "Warn"}}
    for notes in two.run(_noted, tmp_path / "run", json):
        assert notes == ["of DeepSpeed's JSON without effect here: checkpoint, zero_optimization.sub_group_size"]


def _json_file(folder: Path, path: Path) -> dict[str, Any]:
    return _fit(folder, "deepspeed", options={"deepspeed": path})


def test_a_file_that_contradicts_is_named(two: RankPool, tmp_path: Path) -> None:
    """The JSON may be a file; both values are shown before DeepSpeed sees any of it."""
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 64, "zero_optimization": {"stage": 1}}))
    for found in two.run(_json_file, tmp_path / "run", tmp_path / "ds.json"):
        assert found["error"] == (
            "ConfigError: DeepSpeed's JSON: train_batch_size contradicts the run. Found: train_batch_size=64, global_batch=16. "
            "Do: leave it out, or give Run global_batch=64."
        )


class Sometimes(Blocks):
    """One of two heads, by the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> Any:
        """The second head is never asked."""
        return self.head(self.encode(x))


def _whole(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([value for value in model.parameters() if value.dim() == 2], 0.01)


@pytest.mark.parametrize(
    ("build", "make", "options", "said"),
    [
        (Sometimes, _grouped, {}, "parameters got no gradient in a micro-batch. Found: other.weight, other.bias"),
        (
            Sometimes,
            _grouped,
            {"unused_parameters": "allow"},
            "unused_parameters='allow': DeepSpeed moves every parameter",
        ),
        (
            Blocks,
            _whole,
            {},
            "ZeRO moves flat parts of parameters, and Muon may look at them as a whole. Found: stage 2",
        ),
        (
            Blocks,
            _grouped,
            {"deepspeed": {"zero_optimization": {"overlap_com": True}}},
            "mean zero_optimization.overlap_comm?",
        ),
    ],
)
def test_what_would_be_wrong_is_refused(  # noqa: PLR0917
    build: type[nn.Module], make: Any, options: dict[str, Any], said: str, two: RankPool, tmp_path: Path
) -> None:
    """On every rank, in words of the program."""
    for found in two.run(_fit, tmp_path / "run", "zero2", build, make, options=options):
        assert said in found["error"]
