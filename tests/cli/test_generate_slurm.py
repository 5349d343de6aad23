"""`worldsize generate-slurm`: four combinations of its two switches, on a real Slurm where a job is handed over."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.testing.slurm import looking
from worldsize.launch import shell

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from worldsize.testing.slurm import Cluster

CONFIG = """
time: 00:05:00
num_nodes: 2
num_tasks_per_node: 2
std_out: logs/${distributed_strategy}.out
pre_exec_command: |
  export SAID="it's set"
training_cmd: |
  train.py -s {distributed_strategy} \\
    --note '{"a": "b c"}'
"""
SAYS = """
import os, sys
words = (os.environ["SAID"], *sys.argv[1:], os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
os.write(1, (" ".join(words) + "\\n").encode())  # ranks share the log: at once, or lines get mixed
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a program and its slurm_config.yaml."""
    (tmp_path / "slurm_config.yaml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "train.py").write_text(SAYS, encoding="utf-8")
    return tmp_path


def generate(folder: Path, *options: str, env: Mapping[str, str] | None = None) -> shell.Done:
    """Call the command in that folder; without `env` there is no Slurm."""
    argv = [sys.executable, "-m", "worldsize", "generate-slurm", "-c", "slurm_config.yaml", *options]
    base = {"PATH": "/nowhere"} if env is None else dict(env)
    return shell.call(argv, {**base, "HOME": str(folder)}, timeout=60, cwd=folder)


def kept(folder: Path) -> list[Path]:
    """The scripts that were kept."""
    return sorted((folder / "slurm-scripts").glob("*.slurm"))


def test_neither_shows_the_script_and_touches_nothing(folder: Path) -> None:
    """A preview needs no Slurm."""
    before = sorted(folder.rglob("*"))
    done = generate(folder, "--no-save-script", "--no-submit-job")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("#!/bin/bash\n#SBATCH --job-name=ddp-2x2\n")
    assert sorted(folder.rglob("*")) == before


def test_options_win_over_the_file_and_short_ones_are_known(folder: Path) -> None:
    """Every setting is an option; _ and - are alike."""
    (folder / "slurm_config.yaml").write_text(f"{CONFIG}\nsubmit_job: true\n", encoding="utf-8")
    done = generate(folder, "-s", "--no-submit_job", "--num_nodes", "3", "--save-dir", "kept")
    assert (done.code, done.out) == (0, "")
    (script,) = (folder / "kept").glob("ddp-3x2-*.slurm")
    assert "#SBATCH --nodes=3\n" in script.read_text(encoding="utf-8")


def test_a_setting_that_there_is_not_is_told_with_its_line(folder: Path) -> None:
    """And the nearest one."""
    (folder / "slurm_config.yaml").write_text(f"{CONFIG}memry: 4G\n", encoding="utf-8")
    done = generate(folder)
    assert done.code == 2
    assert done.err == (
        "worldsize: slurm_config.yaml, line 11: slurm config: memry is no setting. Do: write memory, if that is meant.\n"
    )


@pytest.mark.slurm
def test_both_keep_and_hand_over_and_the_job_is_known(slurm: Cluster, folder: Path) -> None:
    """As the builder does when nothing is said; its log has the job's id, and the words are whole."""
    done = generate(folder, env=slurm.env)
    assert done.code == 0, done.err
    job = done.out.strip()
    assert looking.wait(slurm, job, lambda state, _: state in ("COMPLETED", "FAILED"))[0] == "COMPLETED"
    log = (folder / "logs" / f"ddp-{job}.out").read_text(encoding="utf-8")
    said = [line for line in log.splitlines() if "it's set" in line]
    assert sorted(said) == [f'it\'s set -s ddp --note {{"a": "b c"}} {rank} of 4' for rank in range(4)]
    assert len(kept(folder)) == 1
    known = shell.call(
        [sys.executable, "-m", "worldsize", "status", job], {**slurm.env, "HOME": str(folder)}, timeout=60, cwd=folder
    )
    assert "completed" in known.out, known


@pytest.mark.slurm
def test_only_handed_over_keeps_no_script_and_only_kept_hands_nothing_over(slurm: Cluster, folder: Path) -> None:
    """A kept script is one that sbatch takes as it is."""
    job = generate(folder, "--no-save-script", "-j", env=slurm.env).out.strip()
    assert job.isdecimal()
    assert kept(folder) == []
    done = generate(folder, "--no-submit-job", env=slurm.env)
    assert (done.code, done.out) == (0, "")
    (script,) = kept(folder)
    answer = slurm.run(["sbatch", "--parsable", str(script)])
    other = answer.out.strip()
    for number in (job, other):
        assert looking.wait(slurm, number, lambda state, _: state in ("COMPLETED", "FAILED"))[0] == "COMPLETED"
        assert (folder / "logs" / f"ddp-{number}.out").read_text(encoding="utf-8").count("of 4") == 4


@pytest.mark.slurm
def test_an_exec_command_starts_its_own_steps(slurm: Cluster, folder: Path) -> None:
    """After what comes before; its failure is the job's."""
    line = "srun -N2 -n4 /bin/bash -c 'echo \"$SAID: $SLURM_PROCID of 4\"; exit 3'"
    done = generate(folder, "--no-save-script", "--training-cmd", "", "--exec-command", line, env=slurm.env)
    job = done.out.strip()
    assert looking.wait(slurm, job, lambda state, _: state in ("COMPLETED", "FAILED"))[0] == "FAILED"
    log = (folder / "logs" / f"ddp-{job}.out").read_text(encoding="utf-8")
    assert log.count("\nit's set: ") == 4
    assert "ended with code 3" in log
