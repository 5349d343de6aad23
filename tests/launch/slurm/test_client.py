"""Calling Slurm's commands: what they are given, what becomes of their errors. The commands here are scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.launch.slurm import lines
from worldsize.errors import ConfigError, LaunchError, NotStartedError
from worldsize.launch.slurm import client
from worldsize.launch.slurm.client import Client, Submitted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

UNREACHABLE = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
GONE = "slurm_load_jobs error: Invalid job id specified"


@pytest.fixture
def slurm(tmp_path: Path) -> Callable[..., Client]:
    """Slurm whose commands are these scripts."""
    return lambda **scripts: Client(lines.commands(tmp_path, **scripts))


def failing(words: str, code: int = 1) -> str:
    """A script that says `words` and fails."""
    return f"echo '{words}' >&2; exit {code}"


def test_jobs_are_read(slurm: Callable[..., Client]) -> None:
    """What squeue prints arrives."""
    found = slurm(squeue=f"/bin/cat '{lines.SEEN}/22.05-waiting.squeue'").queue()
    assert len(found) == len(lines.queue())


def test_a_forgotten_job_is_no_error(slurm: Callable[..., Client]) -> None:
    """Squeue -j of a purged id fails: there is no such job, and that is all (B034)."""
    assert slurm(squeue=failing(GONE)).queue(["99"]) == []


def test_one_forgotten_job_does_not_hide_the_others(slurm: Callable[..., Client]) -> None:
    """Where one unknown id fails the whole question, it is asked without ids (B034)."""
    script = f'case "$*" in *--jobs*) echo "{GONE}" >&2; exit 1;; esac; /bin/cat "{lines.SEEN}/22.05-over.squeue"'
    assert {facts.job for facts in slurm(squeue=script).queue(["18", "99"])} == {"18"}


def test_many_ids_go_in_chunks(slurm: Callable[..., Client], tmp_path: Path) -> None:
    """A command line is never too long."""
    slurm(squeue=f"echo x >> '{tmp_path}/calls'").queue([str(number) for number in range(1, 2 * client.CHUNK + 2)])
    assert (tmp_path / "calls").read_text() == "x\n" * 3


def test_an_unreachable_controller_is_one_line(slurm: Callable[..., Client]) -> None:
    """Slurm's own words, and what to do."""
    with pytest.raises(LaunchError) as told:
        slurm(squeue=failing(UNREACHABLE)).queue()
    assert str(told.value) == (
        f"squeue cannot reach Slurm. Found: {UNREACHABLE}. Do: see `scontrol ping`, and try again in a minute."
    )


def test_a_missing_command_is_one_line(slurm: Callable[..., Client]) -> None:
    """Usage: nothing was started."""
    with pytest.raises(NotStartedError, match=r"squeue is not here\. .* Do: work on a login node"):
        slurm().queue()


def test_a_listing_that_fails_says_so(slurm: Callable[..., Client]) -> None:
    """Whoever merges sources goes on with the others."""
    assert slurm(squeue=failing(UNREACHABLE)).listing().missing == f"squeue cannot reach Slurm: {UNREACHABLE}"


def test_a_command_that_hangs_is_given_up(tmp_path: Path) -> None:
    """After its time, in one line."""
    with pytest.raises(LaunchError, match=r"^squeue had not answered after 0\.2 s\."):
        Client(lines.commands(tmp_path, squeue="exec /bin/sleep 60"), timeout=0.2).queue()


def test_accounting_is_read(slurm: Callable[..., Client]) -> None:
    """Every incarnation."""
    found = slurm(sacct=f"/bin/cat '{lines.SEEN}/22.05.sacct'").accounting(["1"])
    assert [facts.state for facts in found.jobs if facts.job == "1"] == ["NODE_FAIL", "CANCELLED"]


@pytest.mark.parametrize(
    ("script", "missing"),
    [
        (failing("Slurm accounting storage is disabled"), "accounting is disabled on this cluster"),
        (failing("sacct: error: Problem talking to the database"), "sacct cannot reach Slurm: "),
    ],
)
def test_absent_accounting_is_said(slurm: Callable[..., Client], script: str, missing: str) -> None:
    """No error, no guess: one line (B034)."""
    assert (slurm(sacct=script).accounting(["1"]).missing or "").startswith(missing)


def test_accounting_without_its_command_is_said(slurm: Callable[..., Client]) -> None:
    """A cluster may come without sacct."""
    assert (slurm().accounting(["1"]).missing or "").startswith("sacct is not here")


def test_a_wrong_id_reaches_no_command(slurm: Callable[..., Client]) -> None:
    """It is refused before."""
    with pytest.raises(ConfigError, match="'--me' is no job id"):
        slurm().queue(["--me"])


def test_nothing_of_an_outer_job_reaches_sbatch(tmp_path: Path) -> None:
    """Its variables would become options of the new job; the way to the configuration stays (B012)."""
    outer = {
        "SLURM_CPUS_PER_TASK": "4", "SLURM_CPU_BIND": "mask", "SLURM_ARRAY_JOB_ID": "77", "SBATCH_ACCOUNT": "a",
        "SRUN_CPUS_PER_TASK": "4", "PMI_RANK": "0", "SLURM_CONF": "/site/slurm.conf", "LANG": "C",
    }  # fmt: skip
    environ = outer | lines.commands(tmp_path, sbatch=f"/usr/bin/env > '{tmp_path}/seen'; echo 5")
    Client(environ).submit(["x.sh"])
    seen = {line.partition("=")[0] for line in (tmp_path / "seen").read_text().splitlines()}
    assert seen - {"PWD", "SHLVL", "_", "OLDPWD"} == {"SLURM_CONF", "LANG", "PATH", "HOME"}


def test_a_site_may_keep_more(tmp_path: Path) -> None:
    """Names on its list stay (B012)."""
    assert client.outside({"SLURM_SITE": "1", "SLURM_NTASKS": "2"}, keep=["SLURM_SITE"]) == {"SLURM_SITE": "1"}
    assert tmp_path


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        ("15786755\n", Submitted("15786755")),
        ("75168975;slaking\n", Submitted("75168975", "slaking")),
        ("Submitted batch job 60060368\n", Submitted("60060368")),
        ("Submitted batch job 60060368 on cluster slaking\n", Submitted("60060368", "slaking")),
        ("welcome to 2 clusters\n123\nbye\n", Submitted("123")),
    ],
)
def test_the_forms_of_sbatchs_answer(out: str, expected: Submitted) -> None:
    """Number, number and cluster, sentence, words of the site around it (B023)."""
    assert client.parse_submitted(out) == expected


def test_notes_of_sbatch_are_no_errors(slurm: Callable[..., Client]) -> None:
    """What it says on stderr while it takes the job is kept (B023)."""
    done = slurm(sbatch="echo 'sbatch: using default partition x' >&2; echo 12").submit([])
    assert done == Submitted("12", notes="sbatch: using default partition x")


def test_a_refused_job_shows_every_line(slurm: Callable[..., Client]) -> None:
    """Site banners included, on one line of ours (B022)."""
    words = "sbatch: error: see the rules\nsbatch: error: invalid partition specified: nope"
    with pytest.raises(LaunchError) as told:
        slurm(sbatch=failing(words)).submit([])
    assert str(told.value) == (
        f"sbatch was refused (exit code 1). Found: {' '.join(words.split())}. Do: see the partitions with `worldsize nodes`."
    )


def test_a_node_that_there_is_not_comes_with_advice(slurm: Callable[..., Client]) -> None:
    """More CPUs than any node has: Slurm says only that it is not available."""
    with pytest.raises(LaunchError, match="Do: ask for no more than one node has"):
        slurm(sbatch=failing("allocation failure: Requested node configuration is not available")).submit([])


def test_an_answer_without_an_id_is_an_error(slurm: Callable[..., Client]) -> None:
    """Nothing is guessed (B023)."""
    with pytest.raises(LaunchError, match="without a job id"):
        slurm(sbatch="echo hello").submit([])


def test_the_script_is_read_from_us(slurm: Callable[..., Client], tmp_path: Path) -> None:
    """Byte for byte."""
    slurm(sbatch=f"/bin/cat > '{tmp_path}/script'; echo 1").submit([], script="#!/bin/sh\necho 'é'\n")
    assert (tmp_path / "script").read_bytes() == "#!/bin/sh\necho 'é'\n".encode()


def test_one_member_is_requeued(slurm: Callable[..., Client], tmp_path: Path) -> None:
    """Only the member of the array that was named (B039)."""
    slurm(scontrol=f"echo \"$@\" > '{tmp_path}/seen'").requeue("1234_2")
    assert (tmp_path / "seen").read_text() == "requeue 1234_2\n"


def test_a_signal_for_the_batch_shell(slurm: Callable[..., Client], tmp_path: Path) -> None:
    """Scancel's own words."""
    slurm(scancel=f"echo \"$@\" > '{tmp_path}/seen'").cancel(["7"], signal="USR1", batch=True)
    assert (tmp_path / "seen").read_text() == "--signal=USR1 --batch 7\n"


def test_the_configuration_is_read(slurm: Callable[..., Client]) -> None:
    """Names and values."""
    assert slurm(scontrol="echo 'MinJobAge               = 3600 sec'").config() == {"MinJobAge": "3600 sec"}
