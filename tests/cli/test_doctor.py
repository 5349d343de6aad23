"""`worldsize doctor`: this host, and what cannot be asked for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from worldsize.cli.main import commands
from worldsize.errors import EXIT_USAGE, ConfigError, NotStartedError

if TYPE_CHECKING:
    from pathlib import Path


def test_this_host_is_well(tmp_path: Path) -> None:
    """Every check that one host has is made, by an agent of ours; nothing is left behind."""
    words = ("doctor", "--quick", "--json", "--run-dir", str(tmp_path))
    done = CliRunner().invoke(commands, words, catch_exceptions=False)
    found = json.loads(done.stdout)
    assert done.exit_code == 0 == found["problems"]
    assert {"hosts", "versions", "disk"} <= {each["check"] for each in found["findings"]}
    assert all(each["level"] == "ok" or each["do"] for each in found["findings"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ("--nodes", "2", "--hosts", "a,b"),
        ("--hosts", "a,b", "--hostfile", "x"),
        ("--hostfile", "/nowhere"),
        ("--ssh-args", "-v"),
        ("--srun-args", "-v"),
    ],
)
def test_contradictions_are_refused(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError) as told:
        CliRunner().invoke(commands, ("doctor", *words), catch_exceptions=False)
    assert told.value.exit_code == EXIT_USAGE


def test_no_host_at_all_is_no_finding() -> None:
    """The reason is what the agent's Python said."""
    with pytest.raises(NotStartedError, match="no host answered"):
        CliRunner().invoke(commands, ("doctor", "--quick", "--", "/bin/false"), catch_exceptions=False)


def test_one_of_many_tasks_does_not_ask_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each task of a step would look at every node."""
    for name, value in {"JOB_ID": "7", "JOB_NUM_NODES": "2", "STEP_ID": "0", "PROCID": "1", "NTASKS": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(ConfigError, match="once on each task"):
        CliRunner().invoke(commands, ("doctor",), catch_exceptions=False)
