"""Room: the digits example and the demo: the real thing in short, and that its three checks can fail."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.examples.programs import DIGITS, PYTHON, call, load
from worldsize.track.jsonl import latest, read

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import ModuleType


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    """The demo's functions."""
    return load(DIGITS / "demo.py")


def recorded(
    demo: ModuleType, folder: Path, losses: Sequence[float], ids: Sequence[Sequence[int]], **row: Any
) -> Any:
    """A training of one epoch over four samples as its files show it: a step for each loss."""
    run = folder / "run"
    run.mkdir(parents=True)
    said = {"data": {"length": 4}, "config": {"global_batch": 2}}
    (run / "run.json").write_text(json.dumps(said), encoding="utf-8")
    found = demo.Training(run, 1)
    found.ledger.mkdir()
    steps = [{"step": step, "loss": loss, "attempt": 0, **row} for step, loss in enumerate(losses)]
    given = [{"step": step, "epoch": 0, "ids": numbers, "attempt": 0} for step, numbers in enumerate(ids)]
    for path, lines in ((run / "metrics.jsonl", steps), (found.ledger / "rank-0000.jsonl", given)):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return found


@pytest.mark.timeout(600)
def test_demo_is_killed_moved_and_ends_on_the_same_curve(tmp_path: Path) -> None:
    """Killed on 2 x DDP, stopped on 1, finished on 3 x FSDP, each inside an epoch: all three checks hold."""
    ended = call(*PYTHON, DIGITS / "demo.py", "--folder", tmp_path, "--epochs", "3", cwd=tmp_path)
    assert ended.code == 0, ended.text
    assert ended.text.count("   yes  ") == 3
    assert [f"exit code {code}" in ended.text for code in (137, 75, 0)] == [True, True, True]
    events = read(tmp_path / "disturbed" / "events.jsonl")
    began = [event for event in events if event["event"] in ("start", "resume")]
    assert [(each["layout"]["strategy"], each["layout"]["ranks"]) for each in began] == [
        ("ddp", 2),
        ("single", 1),
        ("fsdp", 3),
    ]
    assert [each["step"] % 23 > 0 for each in began[1:]] == [True, True]


def test_demo_sees_a_sample_that_comes_twice(demo: ModuleType, tmp_path: Path) -> None:
    """The audit fails where a sample comes twice in an epoch, and where one does not come."""
    assert demo.audit(recorded(demo, tmp_path / "a", [1, 1], [[0, 1], [2, 3]])) == (1, "")
    _, odd = demo.audit(recorded(demo, tmp_path / "b", [1, 1], [[0, 1], [2, 2]]))
    assert odd == "epoch 0: 1 samples not seen, 1 seen again"


def test_demo_counts_a_repeated_step_as_made_last(demo: ModuleType, tmp_path: Path) -> None:
    """Of a step that two attempts made, the audit takes what the latest was given."""
    training = recorded(demo, tmp_path, [1, 1], [[0, 1], [2, 3]])
    again = {"step": 1, "epoch": 0, "ids": [3, 2], "attempt": 1}
    with (training.ledger / "rank-0001.jsonl").open("w", encoding="utf-8") as file:
        file.write(json.dumps(again) + "\n" + '{"step": 2, "ep')
    assert demo.audit(training) == (1, "")


def test_demo_sees_another_curve(demo: ModuleType, tmp_path: Path) -> None:
    """The largest relative difference is found over all attempts, and the comparison fails above 1e-10."""
    ids = [[0, 1], [2, 3]]
    straight = recorded(demo, tmp_path / "a", [2.0, 4.0], ids, accuracy=0.99)
    other = recorded(demo, tmp_path / "b", [2.0, 4.0 + 4e-9], ids, accuracy=0.99)
    assert demo.largest_difference(straight, other) == (2, pytest.approx(1e-9, rel=1e-3))
    assert demo.compare(straight, straight)
    assert not demo.compare(straight, other)


def test_demo_wants_97_percent(demo: ModuleType, tmp_path: Path) -> None:
    """The comparison fails below 97% on the held-out fifth."""
    training = recorded(demo, tmp_path, [2.0, 4.0], [[0, 1], [2, 3]], accuracy=0.969)
    assert not demo.compare(training, training)


def test_trainer_and_loop_are_one_training(tmp_path: Path) -> None:
    """`ws.Trainer` from the parts gives the curve of the loop written by hand."""
    env = {"WORLDSIZE_DURATION": "12st", "WORLDSIZE_PRECISION": "fp64"}
    for program in ("train", "train_trainer"):
        ended = call(*PYTHON, DIGITS / f"{program}.py", tmp_path / program, cwd=tmp_path, env=env)
        assert ended.code == 0, ended.text
    loop, trainer = (latest(read(tmp_path / name / "metrics.jsonl"), "loss") for name in ("train", "train_trainer"))
    assert len(loop) == 12
    assert trainer == pytest.approx(loop, rel=1e-10)
