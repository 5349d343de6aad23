"""The site profile: where it is found, and what it may say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from worldsize.errors import ConfigError
from worldsize.launch.profile import Profile, find

if TYPE_CHECKING:
    from pathlib import Path

JSC = """
address_suffix: i
gpus-form: gres
skip: [exclusive, --mem]
add: [--hint=nomultithread]
modules: [Stages/2026, CUDA]
mpi: pspmix
"""


def written(path: Path, text: str) -> Path:
    """A profile in a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_without_a_file_everything_is_as_slurm_comes() -> None:
    """Where there is no profile, nothing is skipped, added or renamed, and jobs may be requeued."""
    profile = find({})
    assert profile == Profile()
    assert (profile.skip, profile.add, profile.gpus_form, profile.requeue) == ((), (), "gpus_per_node", True)


def test_the_usual_place_is_in_the_home_folder(tmp_path: Path) -> None:
    """~/.config/worldsize/profile.yaml is read where nothing else is named."""
    written(tmp_path / ".config" / "worldsize" / "profile.yaml", "interface: ib0\n")
    assert find({"HOME": str(tmp_path)}).interface == "ib0"


def test_a_path_wins_over_the_variable_and_that_over_home(tmp_path: Path) -> None:
    """An explicit path is taken first, then $WORLDSIZE_PROFILE, then the usual place."""
    written(tmp_path / ".config" / "worldsize" / "profile.yaml", "interface: a\n")
    second, first = written(tmp_path / "b", "interface: b\n"), written(tmp_path / "c", "interface: c\n")
    environ = {"HOME": str(tmp_path), "WORLDSIZE_PROFILE": str(second)}
    assert find(environ).interface == "b"
    assert find(environ, first).interface == "c"


def test_a_named_profile_must_be_there(tmp_path: Path) -> None:
    """A profile that was named and is not there is an error, never the defaults."""
    with pytest.raises(ConfigError, match="cannot be read"):
        find({"WORLDSIZE_PROFILE": str(tmp_path / "none.yaml")})


def test_a_wrong_value_is_told_with_its_line(tmp_path: Path) -> None:
    """A value that is not known is refused with file, line and the nearest."""
    path = written(tmp_path / "jsc.yaml", JSC)
    with pytest.raises(ConfigError, match=r"jsc\.yaml, line 7: .*mpi.*'pspmix'.*pmix"):
        find({}, path)


def test_names_of_options_are_sbatchs(tmp_path: Path) -> None:
    """What is skipped is named with or without the hyphens, and kept as sbatch writes it."""
    path = written(tmp_path / "jsc.yaml", JSC.replace("pspmix", "pmix") + "env: {NCCL_IB_TIMEOUT: 20}\n")
    profile = Profile.read(path)
    assert profile.skip == ("exclusive", "mem")
    assert (profile.gpus_form, profile.mpi, profile.modules) == ("gres", "pmix", ("Stages/2026", "CUDA"))
    assert profile.env == {"NCCL_IB_TIMEOUT": "20"}


def test_an_unknown_setting_is_refused_with_the_nearest() -> None:
    """A typo in a profile is no setting that does nothing."""
    with pytest.raises(ConfigError, match=r"adress_suffix is no setting.*write address_suffix"):
        Profile.of({"adress_suffix": "i"})
