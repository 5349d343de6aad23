"""Which trackers are wanted, in the words of a program and of a command line."""

from __future__ import annotations

from pathlib import Path

import pytest

import worldsize as ws
from worldsize.config import Duration
from worldsize.errors import ConfigError
from worldsize.track.base import Training
from worldsize.track.spec import Track, override, parse, start
from worldsize.train.settings import Settings


def test_names_objects_and_text_mean_the_same() -> None:
    """One name, a list, a line of the command line."""
    assert parse("mlflow") == parse(["mlflow"]) == parse(Track("mlflow")) == (ws.Track("mlflow"),)
    assert parse("mlflow,wandb:required") == (Track("mlflow"), Track("wandb", required=True))
    assert parse("none") == parse(()) == ()


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError, match=r"'neptun' is not known.*tensorboard, mlflow, wandb"):
        parse("neptun")
    with pytest.raises(ConfigError, match="named twice"):
        parse("mlflow,mlflow")
    with pytest.raises(ConfigError, match="mlflow:required"):
        parse("mlflow:needed")


def test_the_command_line_names_them_and_the_program_keeps_their_options() -> None:
    """WORLDSIZE_TRACK wins, as the other settings do."""
    program = (Track("mlflow", uri="http://there"), Track("tensorboard"))
    settings = Settings(Path("run"), 8, 2, Duration(1, "ep"), track=program)
    found = settings.overridden({"WORLDSIZE_TRACK": "mlflow:required,wandb"}).track
    assert found == (Track("mlflow", required=True, uri="http://there"), Track("wandb"))
    assert override(program, "none") == ()


def test_an_unknown_option_is_an_error_in_words(tmp_path: Path) -> None:
    """Not a traceback."""
    with pytest.raises(ConfigError, match=r"tracker 'tensorboard' has no such option.*colour"):
        start(Track("tensorboard", colour="red"), Training(tmp_path, "id", 0, 0))
