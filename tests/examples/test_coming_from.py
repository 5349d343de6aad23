"""Room: docs/coming-from: what others start runs under our launcher as it is, and what stands in its place runs too."""

from __future__ import annotations

import ast
import importlib.util
import json
from typing import TYPE_CHECKING

import pytest

from tests.examples.programs import PYTHON, ROOT, RUN, TORCHRUN, call
from tests.examples.test_docs import BEFORE, blocks

if TYPE_CHECKING:
    from pathlib import Path

PAGES = {page.stem: page for page in (ROOT / "docs" / "coming-from").glob("*.md")}
TRAININGS = ("torchrun", "accelerate", "lightning", "itwinai", "deepspeed")
FUNCTIONS = ("submitit", "nntool")
HERE = [
    page
    for page in ("torchrun", "accelerate", "lightning", "deepspeed")
    if page == "torchrun" or importlib.util.find_spec(page)
]
"""Pages whose peer is installed; what the others say is only compiled."""
DEFAULT = ("torchrun",)
ALIKE = BEFORE.replace("images, labels = ", "torch.manual_seed(0)\nimages, labels = ")
NOT_COMPILED = """
from importlib import import_module
import_module("deepspeed.comm.torch").build_shm_op = lambda: None
"""
"""Without GPU it compiles collectives of its own, for minutes, or waits for ever for the lock of one who was killed at that."""
ONE_AFTER_ANOTHER = """
import json, os, sys
base = os.getcwd()
for page, text in json.load(open("programs.json")).items():
    os.makedirs(os.path.join(base, page), exist_ok=True)
    os.chdir(os.path.join(base, page))
    exec(compile(text, page, "exec"), {"__name__": "__main__"})
"""
ENV = {"ACCELERATE_USE_CPU": "true"}


def program(page: str, name: str) -> str:
    """That block of the page, where the docs' other blocks begin too; on all ranks with the same data."""
    text = dict(blocks(PAGES[page], "python"))[name]
    before = NOT_COMPILED if (page, name) == ("deepspeed", "theirs.py") else ""
    return f"{ALIKE}{before}{text}" if page in TRAININGS else text


def written(folder: Path, page: str, name: str) -> Path:
    """The block as a file in a folder of its own."""
    (folder / page).mkdir(exist_ok=True)
    (folder / page / "train.py").write_text(program(page, name), encoding="utf-8")
    return folder / page


def test_each_of_them_has_its_page() -> None:
    """Eight, and no page without both sides."""
    assert sorted(PAGES) == sorted((*TRAININGS, *FUNCTIONS, "sbatch"))
    for page in (*TRAININGS, *FUNCTIONS):
        assert {"theirs.py", "ours.py"} <= dict(blocks(PAGES[page], "python")).keys()


@pytest.mark.parametrize("page", sorted((*TRAININGS, *FUNCTIONS)))
def test_what_is_written_for_others_is_python(page: str) -> None:
    """Where the peer is not installed, that is all that can be said."""
    assert ast.parse(program(page, "theirs.py")).body


def test_ours_trains(tmp_path: Path) -> None:
    """Every training that stands in another's place runs to its end; in one process, as imports take most of the time."""
    programs = {page: program(page, "ours.py") for page in TRAININGS}
    (tmp_path / "programs.json").write_text(json.dumps(programs), encoding="utf-8")
    (tmp_path / "all.py").write_text(ONE_AFTER_ANOTHER, encoding="utf-8")
    ended = call(*PYTHON, "all.py", "-s", "ddp", cwd=tmp_path)
    assert ended.code == 0, ended.text
    for page in TRAININGS:
        assert list((tmp_path / page / "runs" / "digits" / "checkpoints").iterdir()), ended.text


@pytest.mark.parametrize(
    "page", [page if page in DEFAULT else pytest.param(page, marks=pytest.mark.matrix) for page in HERE]
)
def test_theirs_runs_unchanged(page: str, tmp_path: Path) -> None:
    """Every peer that is installed, on two ranks under our launcher; each leaves what the page says."""
    folder = written(tmp_path, page, "theirs.py")
    ended = call(*RUN, "--nproc-per-node", "2", "train.py", cwd=folder, env=ENV)
    assert ended.code == 0, ended.text
    left = {
        "torchrun": "model.pt",
        "accelerate": "state-1",
        "deepspeed": "checkpoints/epoch-1",
        "lightning": "lightning_logs",
    }
    assert (folder / left[page]).exists(), ended.text


@pytest.mark.parametrize("page", FUNCTIONS)
def test_functions_give_what_the_page_says(page: str, tmp_path: Path) -> None:
    """As processes of this machine."""
    folder = written(tmp_path, page, "ours.py")
    ended = call(*PYTHON, "train.py", cwd=folder)
    assert ended.code == 0, ended.text


def test_a_launch_command_is_taken_word_for_word(tmp_path: Path) -> None:
    """The configuration of a distributed training under nntool's names, its own command in it."""
    text = dict(blocks(PAGES["nntool"], "python"))["job.py"]
    (tmp_path / "job.py").write_text(f"{text}\nprint(config.distributed_launch_command)", encoding="utf-8")
    ended = call(*PYTHON, "job.py", cwd=tmp_path)
    assert ended.code == 0, ended.text
    assert "--machine_rank {machine_rank}" in ended.text


def test_the_job_of_a_script_by_hand_is_shown(tmp_path: Path) -> None:
    """Without a cluster: the options and the file say the same, and bash reads both scripts."""
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(dict(blocks(PAGES["sbatch"], "yaml"))["job.yaml"], encoding="utf-8")
    shell = dict(blocks(PAGES["sbatch"], "sh"))
    options = next(line for line in shell[""].splitlines() if "--preview" in line)
    ended = [call("bash", "-c", line, cwd=tmp_path) for line in (options, "worldsize submit -c job.yaml --preview")]
    assert [each.code for each in ended] == [0, 0], ended
    for each in ended:
        for wanted in ("#SBATCH --nodes=2", "#SBATCH --cpus-per-task=28", "#SBATCH --mem=204800M", "--epochs 20"):
            assert wanted in each.text, each.text
    (tmp_path / "theirs.sh").write_text(shell["theirs.sh"], encoding="utf-8")
    (tmp_path / "ours.sh").write_text(ended[0].text, encoding="utf-8")
    assert call("bash", "-n", "theirs.sh", cwd=tmp_path).code == call("bash", "-n", "ours.sh", cwd=tmp_path).code == 0


@pytest.mark.matrix
def test_the_same_weights_under_torchrun_and_under_ours(tmp_path: Path) -> None:
    """A program that knows nothing of us learns the same, bit for bit."""
    found = []
    for command in (TORCHRUN, RUN):
        folder = written(tmp_path, "torchrun", "theirs.py")
        ended = call(*command, "--nproc-per-node", "2", "train.py", cwd=folder)
        assert ended.code == 0, ended.text
        found.append((folder / "model.pt").read_bytes())
        (folder / "model.pt").unlink()
    assert found[0] == found[1]


@pytest.mark.matrix
@pytest.mark.parametrize("launcher", [RUN, TORCHRUN], ids=["ours", "torchrun"])
@pytest.mark.parametrize("page", TRAININGS)
def test_ours_on_two_ranks(page: str, launcher: tuple[str, ...], tmp_path: Path) -> None:
    """Under our launcher and under torchrun."""
    folder = written(tmp_path, page, "ours.py")
    ended = call(*launcher, "--nproc-per-node", "2", "train.py", "-s", "ddp", cwd=folder)
    assert ended.code == 0, ended.text


@pytest.mark.matrix
def test_weights_of_a_deepspeed_checkpoint_come_over(tmp_path: Path) -> None:
    """What theirs saved is a warm start of ours."""
    folder = written(tmp_path, "deepspeed", "theirs.py")
    assert call(*RUN, "--nproc-per-node", "2", "train.py", cwd=folder).code == 0
    text = program("deepspeed", "ours.py").replace(
        "run.optimizer", 'run.warm_start(model, "checkpoints/epoch-1", trust=True)\nrun.optimizer', 1
    )
    (folder / "train.py").write_text(text, encoding="utf-8")
    ended = call(*RUN, "--nproc-per-node", "2", "--strategy", "zero1", "train.py", cwd=folder)
    assert ended.code == 0, ended.text
