"""Any job that a spec allows becomes a script that bash accepts and that hands on every text as it was given."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, seed, settings

from tests.launch.slurm.anyjob import AnyJob, any_jobs
from tests.launch.slurm.sham import BASH, Seen, Sham
from worldsize.errors import EXIT_STOPPED
from worldsize.launch import shell

_LINES = (
    "job_name",
    "partition",
    "account",
    "qos",
    "constraint",
    "reservation",
    "licenses",
    "begin",
    "mail_user",
    "comment",
)


_ALONE = {"nodes": 1, "launcher": "worldsize", "program": ["-m", "p"]}
_FOLDERS = {"job": "f", "chdir": "f", "venv": "f", "python": "f ="}
ENV_READS_EQUALS = AnyJob(_ALONE | {"container": {"image": "i", "runtime": "apptainer"}}, {}, _FOLDERS, 0)
"""`env`, which sets variables inside, took such an interpreter for one more."""
BACKSLASH = AnyJob(_ALONE | {"setup": [": \\", "f() { :; }; f"]}, {}, _FOLDERS, 0)
"""A command's last backslash joined the next one to it."""


@pytest.fixture(scope="module")
def sham(tmp_path_factory: pytest.TempPathFactory) -> Sham:
    """Commands that tell what they are given."""
    return Sham(tmp_path_factory.mktemp("sham"))


@example(ENV_READS_EQUALS)
@example(BACKSLASH)
@given(any_jobs())
def test_any_job_hands_on_what_it_was_given(sham: Sham, job: AnyJob) -> None:
    """Bash accepts the script; words, variables and options are the same bytes; no text of a person is executed."""
    _look(sham, job)


@pytest.mark.matrix
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_jobs_hand_on_what_they_were_given(sham: Sham, part: int) -> None:
    """A thousand each."""

    @seed(part)
    @settings(max_examples=1000, database=None)
    @given(any_jobs())
    def look(job: AnyJob) -> None:
        _look(sham, job)

    look()


def _look(sham: Sham, job: AnyJob) -> None:
    with tempfile.TemporaryDirectory() as folder:
        seen = sham.run(job, Path(folder))
        checked = shell.call([BASH, "-n"], {}, text=seen.text, timeout=60)
        assert (checked.code, checked.err) == (0, "")
        assert not sham.canary.exists(), seen.text
        _look_at_directives(seen)
        _look_at_the_task(seen)
        _look_at_the_end(seen, job.code)


def _look_at_directives(seen: Seen) -> None:
    """Each is one option of one value, as a shell would split the line."""
    head = seen.text.split("\n\n")[0].split("\n")[1:]
    assert all(line.startswith("#SBATCH ") for line in head)
    assert any("#SBATCH" not in line for line in seen.text.split("\n")[len(head) + 1 :])
    found = {
        words[0].partition("=")[0]: words
        for words in (shlex.split(line.removeprefix("#SBATCH ")) for line in head if "--switches=" not in line)
    }
    for name in _LINES:
        value, option = getattr(seen.spec, name), f"--{name.replace('_', '-')}"
        if value is not None and option[2:] not in seen.site.skip:
            assert found[option] == [f"{option}={value}"]


def _look_at_the_task(seen: Seen) -> None:
    spec, words = seen.spec, seen.words
    assert words, seen.said
    at = words.index("--")
    assert tuple(words[at + 1 :]) == spec.program
    if spec.command:
        assert f"--template={spec.command}" in words[:at]
    told = {"address-suffix": seen.site.address_suffix, "interface": seen.site.interface}
    assert all(f"--{name}={value}" in words[:at] for name, value in told.items() if value)
    assert [word for word in words[:at] if word.startswith("--stage=")] == [f"--stage={path}" for path in spec.stage]
    wanted = {**seen.site.env, **spec.env, **(spec.container.env if spec.container else {})}
    assert {name: seen.environ.get(name) for name in wanted} == wanted
    assert seen.told("modules") == [word for name in (*seen.site.modules, *spec.modules) for word in ("load", name)]
    assert seen.told("conda") == (["activate", spec.conda] if spec.conda else [])


def _look_at_the_end(seen: Seen, code: int) -> None:
    """Its code is the task's; what is stopped or failed goes on as job 12."""
    assert seen.code == code, seen.said
    again = [*seen.told("scontrol"), *seen.told("sbatch")]
    assert bool(again) == bool(code)
    if code:
        assert "12" in again or "--dependency=afterany:12" in again
        assert bool(seen.told("after")) == (code != EXIT_STOPPED)
