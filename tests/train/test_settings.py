"""What decides a training, what may override it, and what must not change between attempts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from worldsize.config import Duration
from worldsize.errors import ConfigError, LayoutError
from worldsize.train.settings import Saving, Settings, Stall

BASE = Settings(Path("run"), 48, 4, Duration(2, "ep"))


def test_the_command_line_wins_over_the_program() -> None:
    """Strategy, precision, device, folder, duration, and how often is saved."""
    said = {
        "WORLDSIZE_STRATEGY": "fsdp", "WORLDSIZE_PRECISION": "fp64", "WORLDSIZE_DEVICE": "cpu",
        "WORLDSIZE_RUN_DIR": "/else", "WORLDSIZE_DURATION": "7st", "WORLDSIZE_SAVE_EVERY": "3st",
        "WORLDSIZE_STOP_AFTER": "5", "WORLDSIZE_LEDGER": "/ledger",
    }  # fmt: skip
    found = BASE.overridden(said)
    assert (found.strategy, found.precision, found.device) == ("fsdp", "fp64", "cpu")
    assert (found.dir, found.ledger) == (Path("/else"), Path("/ledger"))
    assert (found.duration, found.saving.every, found.stop_after) == (Duration(7, "st"), "3st", 5)


def test_an_empty_variable_says_nothing() -> None:
    """As one that is not there."""
    assert BASE.overridden({"WORLDSIZE_STRATEGY": ""}) == BASE


@pytest.mark.parametrize(("name", "value"), [("STOP_AFTER", "soon"), ("DURATION", "long"), ("SAVE_EVERY", "often")])
def test_a_wrong_variable_is_an_error_in_words(name: str, value: str) -> None:
    """Not a traceback of int()."""
    with pytest.raises(ConfigError, match=value):
        BASE.overridden({f"WORLDSIZE_{name}": value})


def test_the_micro_batch_must_be_said() -> None:
    """It belongs to the training, not to the machine."""
    with pytest.raises(ConfigError, match=r"micro_batch is not set.*DataLoader with batch_size"):
        replace(BASE, micro_batch=None).with_micro_batch(None)


def test_the_micro_batch_must_not_be_said_twice() -> None:
    """Both places and numbers are named."""
    with pytest.raises(ConfigError, match=r"said twice, differently.*micro_batch=': 4.*batch_size\": 8"):
        BASE.with_micro_batch(8)
    assert BASE.with_micro_batch(4).micro_batch == 4


def test_the_micro_batch_may_follow_from_their_number() -> None:
    """48 samples in 5 parts: the last is ragged."""
    assert replace(BASE, micro_batch=None).with_micro_batch(None, 5).micro_batch == 10


@pytest.mark.parametrize(("whole", "part"), [(0, 1), (8, 0), (4, 8)])
def test_impossible_batches_are_refused(whole: int, part: int) -> None:
    """With the numbers."""
    with pytest.raises(ConfigError, match=rf"{whole}"):
        Settings(Path("run"), whole, part, Duration(1, "st"))


def test_an_unknown_acceptance_is_refused() -> None:
    """A misspelt one would be silently without effect."""
    with pytest.raises(ConfigError, match=r"accept=\['dat'\] is not known"):
        replace(BASE, accept=("dat",))


@pytest.mark.parametrize("field", ["global_batch", "micro_batch", "seed", "precision"])
def test_what_makes_it_another_training_is_refused_with_both_values(field: str) -> None:
    """And accepted where asked for, with a line that says so."""
    before = BASE.frozen()
    now = {**before, field: "other"}
    with pytest.raises(LayoutError, match=rf"{field}: began with {before[field]}, now other.*accept=\('{field}',\)"):
        BASE.refuse_changes(before, now)
    assert replace(BASE, accept=(field,)).refuse_changes(before, now) == [
        f"{field} changed from {before[field]} to other, accepted"
    ]


def test_a_longer_training_is_the_same_training() -> None:
    """Up to where they part."""
    assert BASE.refuse_changes(BASE.frozen(), replace(BASE, duration=Duration(9, "ep")).frozen()) == []


@pytest.mark.parametrize("wrong", [{"on_error": "ignore"}, {"every": "often"}])
def test_wrong_saving_is_refused_at_once(wrong: dict[str, str]) -> None:
    """Not at the first save."""
    with pytest.raises(ConfigError):
        Saving(**wrong)  # type: ignore[arg-type]


def test_a_stall_is_said_in_words() -> None:
    """A policy, and lengths by name; the command line changes what it names."""
    assert Stall().said("requeue,floor=30, data=600") == Stall("requeue", floor=30, data=600)
    assert Stall("requeue", first=9).said("off") == Stall("off", first=9)
    assert BASE.overridden({"WORLDSIZE_STALL": "times=3"}).stall == Stall(times=3)
    found = BASE.overridden({"WORLDSIZE_NONFINITE": "skip", "WORLDSIZE_DIGEST_EVERY": "50"})
    assert (found.nonfinite, found.digest_every) == ("skip", 50)


@pytest.mark.parametrize("words", ["sometimes", "floor=soon", "floor=0", "ground=3"])
def test_a_wrong_stall_is_an_error_in_words(words: str) -> None:
    """It shows what was said."""
    with pytest.raises(ConfigError, match="stall"):
        Stall().said(words)


def test_wrong_guards_are_errors_in_words() -> None:
    """Of numbers that are not finite, and of digests."""
    with pytest.raises(ConfigError, match="nonfinite"):
        replace(BASE, nonfinite="hope")
    with pytest.raises(ConfigError, match="digest_every"):
        replace(BASE, digest_every=0)
