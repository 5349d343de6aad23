"""One step: what it refuses, and what it makes of the work of several ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from tests.integration.program import may_stop
from tests.pools import pool
from tests.train import small
from worldsize.errors import StepError
from worldsize.testing.nursery import Crew

if TYPE_CHECKING:
    from pathlib import Path

    import worldsize as ws
    from worldsize.train.step import Step


def loop(folder: Path, body: Any) -> None:
    """One step whose body is the given one."""
    run = small.make(folder, duration="2st")
    model, optimizer = small.parts(run)
    try:
        for step in run.steps(small.data()):
            body(run, model, optimizer, step)
    finally:
        run._problem = None  # the process goes on after an error that the test wants
        run.close()


def no_update(_run: ws.Run, model: small.Line, _opt: Any, step: Step) -> None:
    """Forgets it."""
    small.send(step, model)


def unread(_run: ws.Run, model: small.Line, _opt: Any, step: Step) -> None:
    """Takes the first micro-batch only."""
    step.backward(small.errors(model, next(step.micro_batches)))
    step.update()


def no_backward(_run: ws.Run, model: small.Line, _opt: Any, step: Step) -> None:
    """Leaves the last one out."""
    for number, batch in enumerate(step.micro_batches):
        if number < 3:
            step.backward(small.errors(model, batch))
    step.update()


def late_backward(_run: ws.Run, model: small.Line, _opt: Any, step: Step) -> None:
    """Goes on after the update."""
    small.send(step, model)
    step.update()
    step.backward(torch.zeros(2, requires_grad=True))


def outside(_run: ws.Run, _model: small.Line, _opt: Any, step: Step) -> None:
    """No micro-batch, no weight."""
    step.backward(torch.zeros(2, requires_grad=True))


def twice(_run: ws.Run, model: small.Line, _opt: Any, step: Step) -> None:
    """One step is one update."""
    small.send(step, model)
    step.update()
    step.update()


def late_model(run: ws.Run, _model: small.Line, _opt: Any, _step: Step) -> None:
    """A model in the loop."""
    run.model(small.Line, name="other")


def late_optimizer(run: ws.Run, model: small.Line, _opt: Any, _step: Step) -> None:
    """An optimizer in the loop."""
    run.optimizer(lambda m: torch.optim.SGD(m.parameters(), 0.1), model)


def late_keep(run: ws.Run, _model: small.Line, _opt: Any, _step: Step) -> None:
    """Kept state in the loop."""
    run.keep(seen=0)


def mixed(_run: ws.Run, model: small.Line, _opt: Any, step: Step) -> None:
    """Counted beforehand, and said at the call."""
    for number, batch in enumerate(step.micro_batches):
        losses = small.errors(model, batch)
        if number:
            step.backward(losses.sum(), sum_over=2)
        else:
            step.backward(losses)


def turn_after(_run: ws.Run, model: small.Line, opt: Any, step: Step) -> None:
    """A turn in a step that is none."""
    small.send(step, model)
    with step.turn(opt):
        pass


def micro_after(_run: ws.Run, _model: small.Line, opt: Any, step: Step) -> None:
    """The other way round."""
    with step.turn(opt) as turn:
        for batch in turn.micro_batches:
            turn.backward(small.errors(_model, batch))
        turn.update()
    next(step.micro_batches)


def open_turn(_run: ws.Run, _model: small.Line, opt: Any, step: Step) -> None:
    """A turn that changes nothing."""
    with step.turn(opt):
        pass


def foreign(_run: ws.Run, model: small.Line, _opt: Any, step: Step) -> None:
    """An optimizer that the run does not know."""
    with step.turn(torch.optim.SGD(model.parameters(), 0.1)):
        pass


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (no_update, "step 0 ended without update"),
        (unread, "micro-batches were left unread.*0 of 4"),
        (no_backward, "a micro-batch had no backward.*3 for 4"),
        (late_backward, "backward after update"),
        (outside, "backward outside of the loop"),
        (twice, "update was called twice"),
        (late_model, "a model was made after the first step"),
        (late_optimizer, "an optimizer was made after the first step"),
        (late_keep, "kept state was made after the first step"),
        (mixed, "one turn mixes"),
        (turn_after, "step.turn after step.micro_batches"),
        (micro_after, "step.micro_batches after step.turn"),
        (open_turn, "a turn ended without update"),
        (foreign, "not one of this run"),
    ],
)
def test_a_wrong_body_is_refused_in_words(tmp_path: Path, body: Any, words: str) -> None:
    """API 15: a step used so that it would train something else than was meant."""
    with pytest.raises(StepError, match=words):
        pool(1).run(loop, tmp_path, body)


def breaks(folder: Path) -> None:
    """Leaves the loop by `break`."""
    run = small.make(folder)
    model, _ = small.parts(run)
    for step in small.steps(run, model):
        if step.index == 1:
            break
    with pytest.raises(StepError, match="loop left at step 1"):
        _ = run.result


def test_a_break_ends_the_process_with_a_message_and_a_code(tmp_path: Path) -> None:
    """API 15: the exit code says that work is not committed."""
    crew = Crew(1, tmp_path / "logs")
    crew.start(breaks, tmp_path / "run")
    codes = crew.wait(60)
    crew.close()
    assert codes == [1]
    assert "loop left at step 1: that step is not committed. Do: use run.stop()" in crew.said()
    assert "Traceback" not in crew.said()


def breaks_unheard(folder: Path, what: str) -> None:
    """The same where something cannot be written."""
    small.spoil(what, folder.parent)
    breaks(folder)


@pytest.mark.parametrize("what", ["error file", "stdout", "both streams"])
def test_the_code_after_a_break_needs_no_file(tmp_path: Path, what: str) -> None:
    """Nor anybody who reads what is printed."""
    crew = Crew(1, tmp_path / "logs")
    crew.start(breaks_unheard, tmp_path / "run", what)
    codes = crew.wait(60)
    crew.close()
    assert codes == [1], crew.said()
    assert what == "both streams" or "loop left at step 1: that step is not committed" in crew.said()


def stray(folder: Path, layout: str) -> list[float]:
    """Logs sums whose means differ by rank and micro-batch."""
    run = small.make(folder, strategy=layout)
    model, _ = small.parts(run)
    for step in run.steps(small.data()):
        for x, y in step.micro_batches:
            step.backward(small.errors(model, (x, y)))
            step.log("mean_y", y.sum(), len(y))
        step.update()
    return [float(step.rng.initial_seed()), float(torch.rand(1))]


@pytest.mark.parametrize(("layout", "ranks"), [("single", 1), ("ddp", 3), ("fsdp", 3)])
def test_logged_sums_are_means_over_all_ranks(tmp_path: Path, layout: str, ranks: int) -> None:
    """Each sample counts once, dummies not at all; the generator of a step is equal on all ranks."""
    seeds = pool(ranks).run(stray, tmp_path, layout)
    assert len({seed for seed, _ in seeds}) == 1
    expected = float(small.data().tensors[1].double().mean())
    found = small.numbers(tmp_path, "mean_y")
    assert list(found.values())[-1] == pytest.approx(expected, rel=1e-6)


class Words(nn.Module):
    """A language model of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Embedding(11, 6), nn.Linear(6, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for each next token."""
        found: torch.Tensor = self.outer(torch.tanh(self.inner(tokens)))
        return found


def sentences() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Targets of very different lengths: 10 and 90 tokens, and one that is masked whole."""
    drawn = torch.Generator().manual_seed(2)
    found = []
    for targets in (10, 90, 0, 33):
        tokens = torch.randint(0, 11, (100,), generator=drawn)
        labels = torch.where(torch.arange(100) < targets, tokens.roll(-1), -100)
        found.append((tokens, labels))
    return found


def speak(folder: Path, layout: str, micro_batch: int, how: str) -> tuple[list[float], list[float]]:
    """Two steps over all sentences; losses over target tokens."""
    run = small.make(folder, strategy=layout, global_batch=4, micro_batch=micro_batch, duration="2st")
    model = run.model(Words)
    run.optimizer(lambda m: torch.optim.SGD(m.parameters(), 0.5), model, clip=1e9)
    losses, norms = [], []
    count = (lambda batch: {"tokens": int((batch[1] != -100).sum())}) if how in ("counted", "share") else None
    for step in run.steps(sentences(), count=count):
        for tokens, labels in step.micro_batches:
            each = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="none")
            kept = labels.flatten() != -100
            if how == "counted":
                step.backward(each[kept])
            elif how == "share":
                step.backward(share=each.sum() / step.totals["tokens"])
            else:
                step.backward(each.sum(), sum_over=int(kept.sum()))
        norm = step.update()
        assert norm is not None
        losses.append(float(step.loss))
        norms.append(float(norm))
    return losses, norms


@pytest.mark.parametrize("how", ["counted", "share", "sum_over"])
@pytest.mark.parametrize(
    ("layout", "ranks", "micro_batch"),
    [("single", 1, 2), ("single", 1, 1), ("ddp", 2, 1), ("fsdp", 2, 1), ("ddp", 3, 1)],
)
def test_token_losses_are_weighted_over_all_tokens(
    tmp_path: Path, layout: str, ranks: int, micro_batch: int, how: str
) -> None:
    """B070, B071: two samples at once, one after the other, or on two ranks: one loss and one gradient norm."""
    expected = pool(1).run(speak, tmp_path / "a", "single", 4, "counted")[0]
    for losses, norms in pool(ranks).run(speak, tmp_path / "b", layout, micro_batch, how):
        assert losses == pytest.approx(expected[0], rel=1e-12)
        assert norms == pytest.approx(expected[1], rel=1e-12)


def drift(folder: Path, micro_batch: int) -> tuple[list[float], list[list[float]]]:
    """Ten micro-batches an epoch, and the parameters after every step."""
    run = small.make(folder, global_batch=micro_batch * 4, micro_batch=micro_batch, duration="2ep")
    model, _ = small.parts(run)
    seen = [
        [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]
        for _ in small.steps(run, model)
    ]
    return [], seen


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_replicas_stay_equal_with_a_ragged_window(tmp_path: Path, micro_batch: int) -> None:
    """B069: after each step, the last partial window included, and as one process has them."""
    alone = pool(1).run(drift, tmp_path / "a", micro_batch)[0][1]
    one, two = (seen for _, seen in pool(2).run(drift, tmp_path / "b", micro_batch))
    assert one == two
    for here, there in zip(one, alone, strict=True):
        assert here == pytest.approx(there, rel=1e-12)


def explode(folder: Path) -> list[tuple[list[float], float]]:
    """In step 1 one micro-batch, of the last rank, has gradients beyond all bounds."""
    run = small.make(folder, precision="fp16", duration="3st", global_batch=8, micro_batch=4)
    model, _ = small.parts(run)
    seen = []
    for step in run.steps(small.data(24)):
        for batch in step.micro_batches:
            huge = 1e38 if step.index == 1 and run.comm.rank == run.comm.size - 1 else 1.0
            step.backward(small.errors(model, batch) * huge)
        step.update()
        assert run._engine.scale is not None
        seen.append(([float(p.detach().sum()) for p in model.parameters()], run._engine.scale.value))
    return seen


def test_an_overflow_is_skipped_by_all_ranks(tmp_path: Path) -> None:
    """fp16: no weight moves, the scale halves, on every rank alike; then training goes on."""
    one, two = pool(2).run(explode, tmp_path)
    assert one == two
    (first, scale), (second, halved), (third, after) = one
    assert second == first
    assert third != second
    assert (halved, after) == (scale / 2, scale / 2)


class Gen(nn.Module):
    """Noise to samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Two numbers a sample."""
        found: torch.Tensor = self.net(z)
        return found


class Disc(Gen):
    """Samples to one score."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))


def penalty(disc: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """How far the slope between real and fake is from one (Gulrajani et al., 2017)."""
    mix = torch.rand(len(real), 1, dtype=real.dtype)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(disc(between).sum(), between, create_graph=True)
    found: torch.Tensor = (slope.norm(dim=1) - 1) ** 2
    return found


def duel(folder: Path, layout: str, stop_after: int | None = None) -> Any:
    """The GAN of the README, and what came of it."""
    run = small.make(folder, strategy=layout, duration="6st", global_batch=12, micro_batch=2)
    gen, disc = run.model(Gen, name="G"), run.model(Disc, name="D", strategy=None if layout == "single" else "ddp")
    og = run.optimizer(lambda m: torch.optim.Adam(m.parameters(), 1e-2), gen)
    od = run.optimizer(lambda m: torch.optim.Adam(m.parameters(), 1e-2), disc)
    losses = {}
    with may_stop():
        for step in run.steps(small.data(30)):
            with step.turn(od) as turn:
                for x, _ in turn.micro_batches:
                    fake = gen(torch.randn(len(x), 4, dtype=x.dtype)).detach()
                    turn.backward((disc(fake) - disc(x)).squeeze(1) + 10 * penalty(disc, x, fake))
                turn.update()
            losses[step.index] = float(step.loss)
            if step.index % 2 == 1:
                with step.turn(og) as turn:
                    for x, _ in turn.micro_batches:
                        turn.backward(-disc(gen(torch.randn(len(x), 4, dtype=x.dtype))).squeeze(1))
                    turn.update()
            if step.index + 1 == stop_after:
                small.stop()
    whole = {**run.whole(gen), **{f"D.{name}": value for name, value in run.whole(disc).items()}}
    return losses, whole


@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 2), ("ddp", 4), ("fsdp", 3)])
def test_a_gan_has_one_curve_too(tmp_path: Path, layout: str, ranks: int) -> None:
    """Two models, turns of their own, a gradient penalty; stopped in the middle and gone on elsewhere."""
    losses, whole = pool(1).run(duel, tmp_path / "a", "single")[0]
    before = pool(1).run(duel, tmp_path / "b", "single", 3)[0][0]
    assert sorted(before) == [0, 1, 2]
    for found, weights in pool(ranks).run(duel, tmp_path / "b", layout):
        assert sorted(found) == [3, 4, 5]
        for step, loss in found.items():
            assert loss == pytest.approx(losses[step], rel=1e-10)
        for name, value in weights.items():
            torch.testing.assert_close(value, whole[name], rtol=1e-10, atol=1e-12)


def closures(folder: Path, layout: str, **settings: Any) -> list[float]:
    """LBFGS evaluates several times a step."""
    run = small.make(folder, strategy=layout, duration="4st", global_batch=20, **settings)
    model = run.model(small.Line)
    run.optimizer(lambda m: torch.optim.LBFGS(m.parameters(), 0.5, max_iter=4), model)
    losses = []
    for step in run.steps(small.data()):
        step.update(partial(small.send, step, model))
        losses.append(float(step.loss))
    return losses


def test_an_optimizer_may_evaluate_several_times(tmp_path: Path) -> None:
    """LBFGS with a closure: one curve on one and on two ranks."""
    alone = pool(1).run(closures, tmp_path / "a", "single")[0]
    for losses in pool(2).run(closures, tmp_path / "b", "ddp"):
        assert losses == pytest.approx(alone, rel=1e-9)
    assert alone[-1] < 0.1 * alone[0]


def test_a_closure_in_fp16_is_refused(tmp_path: Path) -> None:
    """An overflow in one of its evaluations could not be skipped; bf16 needs no loss scale."""
    with pytest.raises(StepError, match=r"fp16 cannot skip an overflow.*bf16"):
        pool(1).run(closures, tmp_path / "a", "single", precision="fp16")
    assert len(pool(1).run(closures, tmp_path / "b", "single", precision="bf16")[0]) == 4


class Idle(small.Line):
    """A head that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 3)


def unused(folder: Path, **options: Any) -> list[float]:
    """Train the model with the idle head."""
    run = small.make(folder, duration="3st")
    model = run.model(Idle, **options)
    run.optimizer(lambda m: torch.optim.SGD(m.parameters(), 0.1), model)
    return [float(step.loss) for step in small.steps(run, model)]


def test_a_parameter_without_gradient_is_named_under_ddp(tmp_path: Path) -> None:
    """B068: with the option that allows it; with that option it trains."""
    with pytest.raises(StepError, match=r"got no gradient.*head.weight.*unused_parameters='allow'"):
        pool(2).run(unused, tmp_path / "a")
    alone = pool(1).run(unused, tmp_path / "b")[0]
    for losses in pool(2).run(unused, tmp_path / "c", unused_parameters="allow"):
        assert losses == pytest.approx(alone, rel=1e-12)
