"""A job of a real Slurm: looked at by its number, and what its report knows of the queue."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.integration import slurmjob
from tests.tools.report import runs
from worldsize.launch import shell
from worldsize.tools.report import reading

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.testing.slurm import Cluster


@pytest.mark.slurm
@pytest.mark.matrix
def test_a_job_is_watched_by_its_number(slurm: Cluster, tmp_path: Path) -> None:
    """From the queue to its end; the run folder says which job it was, and how long it waited."""
    program = tmp_path / "train.py"
    program.write_text(runs.PROGRAM.replace('os.environ["TORCHELASTIC_RESTART_COUNT"]', '"0"'), encoding="utf-8")
    job = slurmjob.submit(slurm, tmp_path, program, ("--nproc-per-node", "2"), ())
    argv = [sys.executable, "-m", "worldsize", "watch", job.id]
    done = shell.call(argv, {**slurm.env, "HOME": str(tmp_path)}, timeout=120, cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out.rstrip().endswith("attempt 0  finished")
    run = reading.facts(job.run)
    assert run.last.job == job.id
    assert run.last.queued
    assert run.last.facts["submitted"] <= run.last.began <= (run.last.started or 0)
    assert run.last.wait == pytest.approx(run.last.began - run.last.facts["submitted"])
