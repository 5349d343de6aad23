"""From a builder's slurm_config.yaml to job specs and scripts."""

from __future__ import annotations

import os
import shlex
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldsize.errors import ConfigError
from worldsize.launch import shell
from worldsize.launch.builder import sweep
from worldsize.launch.builder.config import STRATEGIES, BuilderConfig
from worldsize.launch.profile import Profile

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.launch.slurm.submit import Draft
    from worldsize.launch.spec import JobSpec

BASH = shutil.which("bash") or "bash"
WORD = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
TRAIN = {"training_cmd": "train.py"}


def config(**given: Any) -> BuilderConfig:
    """A small config."""
    return BuilderConfig.of({**TRAIN, **given})


def drafts(**given: Any) -> list[Draft]:
    """The jobs of a small config."""
    return sweep.drafts(config(**given), Profile())


def spec(**given: Any) -> JobSpec:
    """The spec of its one job."""
    (made,) = drafts(**given)
    return made.spec


def directives(**given: Any) -> list[str]:
    """The #SBATCH lines of its one job, without the word."""
    (made,) = drafts(**given)
    return [line.removeprefix("#SBATCH ") for line in made.text.splitlines() if line.startswith("#SBATCH ")]


def program(line: str, **given: Any) -> list[str]:
    """The words of a training_cmd after its script."""
    return list(spec(training_cmd=line, **given).program[1:])


def test_each_name_is_sbatchs() -> None:
    """Under the names that builders' users know."""
    given = {
        "job_name": "a job", "account": "acc", "partition": "p", "time": "00:30:00", "num_nodes": 2, "gpus_per_node": 4,
        "cpus_per_task": 16, "memory": "16G", "exclusive": True, "std_out": "logs/%x-%j.out", "err_out": "logs/%j.err",
    }  # fmt: skip
    found = directives(**given)
    assert {
        "--job-name='a job'", "--account=acc", "--partition=p", "--time=00:30:00", "--nodes=2", "--gpus-per-node=4",
        "--cpus-per-task=16", "--mem=16384M", "--exclusive", "--output=logs/%x-%j.out", "--error=logs/%j.err",
        "--ntasks-per-node=1",
    } <= set(found)  # fmt: skip
    assert len({line.partition("=")[0] for line in found}) == len(found), "a directive comes twice"
    assert not any(line.startswith("--gres") for line in found)


@pytest.mark.parametrize(
    ("std_out", "log"),
    [(None, "slurm-job-logs/%x-%j.out"), ("logs/ddp.out", "logs/ddp-%j.out"), ("run", "run-%j"), ("%A.o", "%A.o")],
)
def test_every_log_has_the_jobs_id_in_its_name(std_out: str | None, log: str) -> None:
    """Otherwise the next job writes over it."""
    assert spec(std_out=std_out).output == log


def test_training_cmd_names_other_settings() -> None:
    """In braces, and what has other braces is the program's own."""
    line = (
        """python -u train.py -s {distributed_strategy} --n=${num_nodes} --name '{run_name}' '{"a": {"b": 1}}' {x}"""
    )
    found = program(line, run_name="it's {num_nodes}")
    assert found == ["-s", "ddp", "--n=1", "--name", "it's {num_nodes}", '{"a": {"b": 1}}', "{x}"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("train.py {distributed_strategi}", "write {distributed_strategy}"),
        ("train.py {python_venv}", "set python_venv"),
        ("$(which itwinai) exec-pipeline", "would need a shell"),
        ("torchrun train.py", "begin with train.py"),
        ("train.py 'a", "not closed"),
    ],
)
def test_a_training_cmd_that_cannot_be_meant_is_refused(line: str, told: str) -> None:
    """In one line that says what to write."""
    with pytest.raises(ConfigError) as caught:
        drafts(training_cmd=line)
    assert told in str(caught.value)


def test_a_module_is_a_program() -> None:
    """As python -m."""
    assert spec(training_cmd=".venv/bin/python3.11 -m pkg.train --x").program == ("-m", "pkg.train", "--x")


def test_strategies_have_their_launchers() -> None:
    """Torchrun and DeepSpeed once a node; Horovod a task a rank, each with its share of the node's CPUs."""
    found = [spec(distributed_strategy=name, gpus_per_node=4, cpus_per_task=16) for name in STRATEGIES]
    assert [(each.launcher, each.ranks_per_node, each.cpus_per_task) for each in found] == [
        ("torchrun", 4, 16),
        ("srun", 4, 4),
        ("deepspeed", 4, 16),
    ]


def test_runall_is_a_job_for_each_strategy() -> None:
    """Each with names of its own."""
    found = sweep.variants(config(mode="runall", num_nodes=2, gpus_per_node=4))
    assert [(each.distributed_strategy, each.identifier, each.run_name) for each in found] == [
        ("ddp", "ddp-2x4", "ddp-2x4-main-run"),
        ("horovod", "horovod-2x4", "horovod-2x4-main-run"),
        ("deepspeed", "deepspeed-2x4", "deepspeed-2x4-main-run"),
    ]


def test_a_scaling_test_is_that_for_each_number_of_nodes() -> None:
    """Text with commas is a list, as on a command line."""
    found = sweep.variants(config(mode="scaling-test", scalability_nodes="1,2", gpus_per_node=4, job_name="s"))
    assert [each.job_name for each in found] == [
        f"s-{strategy}-{nodes}x4" for nodes in (1, 2) for strategy in ("ddp", "horovod", "deepspeed")
    ]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"use_ray": True}, "nothing is started by Ray"),
        ({"py_spy": True, "distributed_strategy": "horovod"}, "profile ddp or deepspeed"),
        ({"training_cmd": None}, "training_cmd is not set"),
        ({"exec_command": "a", "exec_file": "b"}, "keep one"),
        ({"num_nodes": 2, "num_tasks": 3}, "num_tasks=3, num_nodes=2"),
        ({"mode": "scaling-test", "num_tasks": 3}, "give num_tasks_per_node"),
        ({"num_node": 2}, "write num_nodes"),
        ({"distributed_strategy": "ddpp"}, "write ddp"),
        ({"pre_exec_file": "https://example.org/a.sh"}, "download it"),
        ({"pre_exec_file": "nowhere.sh"}, "cannot be read"),
        ({"memory": "much"}, "memory"),
        ({"python_venv": ".venv", "container_path": "a.sif"}, "keep one"),
        ({"container_path": "a.sif"}, "which runtime is not said"),
    ],
)
def test_what_contradicts_itself_is_refused(given: dict[str, Any], told: str) -> None:
    """Before anything is kept or handed over, with what to do."""
    with pytest.raises(ConfigError) as caught:
        drafts(**given)
    assert told in str(caught.value)


def test_container_path_is_the_image_of_the_sites_runtime() -> None:
    """What runs it stands in the profile."""
    (made,) = sweep.drafts(config(container_path="a.sif"), Profile.of({"container": "apptainer"}))
    assert " a.sif env " in made.text
    assert "apptainer exec" in made.text


@pytest.fixture
def ran(tmp_path: Path) -> Any:
    """Run a config's script with a false srun and py-spy; what they were given."""
    for name in ("srun", "py-spy"):
        tool = tmp_path / name
        tool.write_text(f"#!{BASH}\nprintf '%s\\0' \"$@\" > '{tmp_path}/{name}.log'\n", encoding="utf-8")
        tool.chmod(0o755)

    def run(**given: Any) -> dict[str, list[str]]:
        (made,) = drafts(python_venv=None, **given)
        text = made.text.replace(f"folder={made.where.folder}", f"folder='{tmp_path}/job'")
        env = {
            "PATH": f"{tmp_path}:{os.defpath}",
            "SLURM_JOB_ID": "1",
            "SLURM_JOB_NUM_NODES": "1",
            "GIVEN": "2 words",
        }
        done = shell.call([BASH], {**env, "SLURM_JOB_NODELIST": "n1"}, text=text, timeout=60, cwd=tmp_path)
        assert done.code == 0, done.err
        return {path.stem: path.read_text().split("\0")[:-1] for path in tmp_path.glob("*.log")}

    return run


@settings(max_examples=20)
@given(
    st.lists(WORD, max_size=4),
    st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), min_size=1).filter(str.strip),
)
def test_any_words_are_a_script_that_bash_accepts(words: list[str], run_name: str) -> None:
    """Whatever stands in the training's arguments and in a setting that they name."""
    (made,) = drafts(training_cmd=f"train.py {shlex.join(words)} '{{run_name}}'", run_name=run_name)
    assert made.spec.program[1:] == (*words, run_name)
    done = shell.call([BASH, "-n"], {}, text=made.text, timeout=20)
    assert (done.code, done.err) == (0, "")


def test_arguments_reach_the_step_byte_for_byte(ran: Any) -> None:
    """Quotes, braces, blanks, dollars: no shell on the way reads them."""
    words = ["it's", '{"a": 1}', "{x}", "$HOME", "`x`", "*", "é漢", "", " ", '"', "\\", "a\nb"]
    seen = ran(training_cmd=f"train.py {shlex.join(words)}")["srun"]
    assert seen[seen.index("--") + 1 :] == ["train.py", *words]


def test_an_exec_command_takes_the_trainings_place(ran: Any) -> None:
    """It is the shell's to read, once, after what comes before."""
    seen = ran(
        exec_command="srun echo \"$GIVEN\" '{}' $MORE", pre_exec_command="export MORE='a b'", training_cmd=None
    )
    assert seen == {"srun": ["echo", "2 words", "{}", "a", "b"]}


def test_a_stop_signal_reaches_the_step_of_an_exec_command(ran: Any, tmp_path: Path) -> None:
    """The last command of the lines is what the batch script passes the signal on to."""
    (tmp_path / "mine").write_text(
        f"#!{BASH}\ntrap 'srun got it; exit 0' USR1\nkill -s USR1 $PPID\nfor at in {{1..200}}; do sleep 0.05; done\n",
        encoding="utf-8",
    )
    (tmp_path / "mine").chmod(0o755)
    assert ran(exec_command="export A=1\nexec mine", training_cmd=None) == {"srun": ["got", "it"]}


def test_py_spy_goes_around_the_launcher_of_a_node(ran: Any, tmp_path: Path) -> None:
    """Its file has the job, the attempt and the node in its name; the program's words stay as they are."""
    seen = ran(py_spy=True, profiling_sampling_rate=7, gpus_per_node=2, training_cmd="train.py 'a b'")["srun"]
    given = next(word for word in seen if word.startswith("--template=")).removeprefix("--template=")
    filled = given.replace("{machine_rank}", "0")
    env = {"PATH": f"{tmp_path}:{os.defpath}", "WORLDSIZE_JOB": "12"}
    assert shell.call([BASH, "-c", f"{filled} train.py 'a b'"], env, timeout=20, cwd=tmp_path).code == 0
    words = (tmp_path / "py-spy.log").read_text().split("\0")
    assert words[words.index("--output") + 1] == "py-spy-output/ddp-12-0-node0.txt"
    assert words[words.index("--rate") + 1] == "7"
    assert words[-4:-1] == ["2", "train.py", "a b"]
    assert (tmp_path / "py-spy-output").is_dir()
