"""What an error says, and how it travels."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize import errors
from worldsize.errors import LayoutError, MissingExtraError, WorldsizeError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, WorldsizeError)]
TEXTS = st.none() | st.text(max_size=20)


def test_three_parts_in_order() -> None:
    """An error says what is wrong, what was found, and what to do."""
    error = LayoutError("global_batch does not divide.", found="10 over micro_batch 4", do="choose 8 or 12")
    assert str(error) == "global_batch does not divide. Found: 10 over micro_batch 4. Do: choose 8 or 12."


def test_parts_that_help_nobody_are_left_out() -> None:
    """Without `found` and `do` the sentence stands alone."""
    assert str(LayoutError("no layout")) == "no layout."


def test_the_parts_can_be_read() -> None:
    """A launcher can show the parts in its own form."""
    error = LayoutError("what", found="found", do="do")
    assert (error.what, error.found, error.do) == ("what", "found", "do")


@given(st.text(max_size=20), TEXTS, TEXTS)
def test_always_one_line(what: str, found: str | None, do: str | None) -> None:
    """For any texts, a traceback of somebody else's among them, the error is one line."""
    assert len(str(WorldsizeError(what, found=found, do=do)).splitlines()) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_survives_the_way_between_processes(kind: type[WorldsizeError]) -> None:
    """Every error comes out of a pickle as it went in: same kind, same parts."""
    error = pickle.loads(pickle.dumps(kind("what", found="found", do="do")))
    assert type(error) is kind
    assert (error.what, error.found, error.do) == ("what", "found", "do")
    assert str(error) == str(kind("what", found="found", do="do"))


@pytest.mark.parametrize("kind", KINDS)
def test_exit_codes_are_few(kind: type[WorldsizeError]) -> None:
    """An error ends a program with "failed" or with "nothing was started", never with the code of a clean stop."""
    assert kind.exit_code in {errors.EXIT_FAILED, errors.EXIT_USAGE}
    assert errors.EXIT_STOPPED not in {errors.EXIT_FAILED, errors.EXIT_USAGE, 0}


def test_a_missing_extra_says_how_to_get_it() -> None:
    """What is not installed is named with the command that installs it."""
    assert (
        str(MissingExtraError.of("deepspeed", "ds")) == "deepspeed is not installed. Do: pip install 'worldsize[ds]'."
    )
