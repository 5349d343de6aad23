"""The job spec: what is read, what it comes to, and which contradictions are refused before anything is queued."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.errors import ConfigError
from worldsize.launch.given import described
from worldsize.launch.spec import JobSpec, load

if TYPE_CHECKING:
    from pathlib import Path

ARGUMENTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


def spec(**given: Any) -> JobSpec:
    """A spec that runs something."""
    return JobSpec.of({"program": ["train.py"], **given})


def written(path: Path, text: str) -> Path:
    """A YAML file."""
    path.write_text(text)
    return path


def test_the_least_is_a_program() -> None:
    """A script alone is a job: one node, one rank, named after the script."""
    job = spec()
    assert (job.nodes, job.ranks_per_node, job.world_size, job.job_name, job.seconds) == (1, 1, 1, "train", None)


def test_a_module_gives_its_name_too() -> None:
    """Without a name the job is named after what runs."""
    assert spec(program=["-m", "lab.vision.train", "--lr", "1e-4"]).job_name == "train"


def test_ranks_follow_gpus() -> None:
    """Without a number of ranks there is one for each GPU, however the GPUs are asked for."""
    assert spec(nodes=2, gpus_per_node=4).world_size == 8
    assert spec(nodes=2, gres="gpu:a100:4,nvme:1").world_size == 8
    assert spec(gres="gpu:1g.5gb:2").world_size == 2


def test_tasks_are_ranks_under_srun() -> None:
    """Under srun a task is a rank, so that two ranks may share four GPUs."""
    assert spec(launcher="srun", nodes=2, gpus_per_node=4, ntasks_per_node=2).world_size == 4


def test_nodes_may_differ() -> None:
    """Different numbers of GPUs make a heterogeneous job with a rank for each GPU."""
    job = spec(gpus_per_node=[4, 4, 2])
    assert (job.nodes, job.is_het, job.ranks, job.world_size) == (3, True, (4, 4, 2), 10)


def test_equal_nodes_do_not_differ() -> None:
    """A list of equal numbers is one number."""
    job = spec(gpus_per_node="4,4")
    assert (job.nodes, job.is_het, job.gpus_per_node) == (2, False, 4)


def test_named_nodes_are_counted() -> None:
    """Where nodes are named and not counted, there are as many as names."""
    assert spec(nodelist="node[01-04]").nodes == 4


@pytest.mark.parametrize(("given", "kept"), [("2.5GB", "2560M"), ("512m", "512M"), ("all", "all"), (16, "16M")])
def test_memory_is_kept_as_mebibytes(given: str | int, kept: str) -> None:
    """B021: memory is whole MiB; all of the node only in so many words."""
    assert spec(mem=given).mem == kept


@pytest.mark.parametrize("given", [0, "0", "0G", "", None])
def test_no_memory_is_no_option(given: str | int | None) -> None:
    """B021: zero and nothing leave the option out."""
    assert spec(mem=given).memory_option is None


def test_all_memory_is_sbatchs_zero() -> None:
    """B021: `all` is rendered as sbatch's 0."""
    assert spec(mem="all").memory_option == "0"


@pytest.mark.parametrize("name", ["qos", "gres", "nodes", "time", "array", "nodelist", "gpus_per_node", "dependency"])
@pytest.mark.parametrize("empty", [None, ""])
def test_nothing_is_the_default(name: str, empty: str | None) -> None:
    """B022: None and empty text leave a setting as it comes."""
    assert spec(**{name: empty}) == spec()


def test_the_signal_comes_in_a_short_job_too() -> None:
    """Where nobody said when the stop signal is sent, it is no earlier than half the limit."""
    assert (spec(time="1:00:00").signal_lead, spec(time="2:00").signal_lead) == (120, 60)


def test_hyphens_are_underscores() -> None:
    """Names may be written as on a command line."""
    assert spec(**{"gpus-per-node": "4", "mail-type": "end,fail"}).mail_type == "END,FAIL"


@pytest.mark.parametrize(
    "given",
    ["afterok:1:2,afterany:3_4", ["afterok:1:2", "afterany:3_4"], {"afterok": [1, 2], "afterany": "3_4"}],
)
def test_dependencies_are_kinds_with_ids(given: Any) -> None:
    """Sbatch's text, a list and a mapping say the same."""
    assert spec(dependency=given).dependency == (("afterok", ("1", "2")), ("afterany", ("3_4",)))


def test_further_options_may_be_a_mapping() -> None:
    """B022: options that have no field are lines or a mapping; what is empty is left out, and true is a flag."""
    given = {"switches": 1, "overcommit": True, "hint": None, "wckey": "a b"}
    assert spec(extra=given).extra == ("--switches=1", "--overcommit", "--wckey='a b'")


@given(st.lists(ARGUMENTS, max_size=5))
def test_arguments_stay_as_they_are(arguments: list[str]) -> None:
    """B025: any argument but one with a NUL is kept to the letter, an empty one too."""
    assert spec(program=["train.py", *arguments]).program == ("train.py", *arguments)


def test_a_spec_comes_back() -> None:
    """What was made into JSON, as in a job's folder, is read as the same spec."""
    given = {"gpus_per_node": [4, 2], "time": "2-0", "mem": "all", "dependency": "singleton", "env": {"A": "1"}}
    job = spec(**given, extra=["--switches=1"], exclusive="user", exclude="n[1-2]", requeue=False)
    assert JobSpec.model_validate_json(job.model_dump_json()) == job
    assert JobSpec.of(job.model_dump(mode="json")) == job
    assert pickle.loads(pickle.dumps(job)) == job


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"gres": "gpu:4", "gpus_per_node": 2}, ["gres=gpu:4", "gpus_per_node=2"]),
        ({"mem": "1G", "mem_per_cpu": "2G"}, ["mem=1024M", "mem_per_cpu=2048M"]),
        ({"mem_per_cpu": "1G", "mem_per_gpu": "2G"}, ["mem_per_cpu=1024M", "mem_per_gpu=2048M"]),
        ({"launcher": "srun", "ntasks_per_node": 2, "nproc_per_node": 4}, ["ntasks_per_node=2", "nproc_per_node=4"]),
        ({"launcher": "torchrun", "ntasks_per_node": 2, "gpus_per_node": 4}, ["ntasks_per_node=2", "4"]),
        ({"nodes": 2, "gpus_per_node": [4, 4, 2]}, ["nodes=2", "gpus_per_node=(4, 4, 2)"]),
        ({"gpus_per_node": [4, 2], "nproc_per_node": 4}, ["nproc_per_node=4", "(4, 2)"]),
        ({"gpus_per_node": [4, 2], "array": "0-3"}, ["array=0-3", "(4, 2)"]),
        ({"nodes": 2, "nodelist": "a[1-3]"}, ["nodes=2", "nodelist=a[1-3]"]),
        ({"nodelist": "a[1-3]", "exclude": "a2,b1"}, ["a2", "exclude=a2,b1"]),
        ({"array": "0-3", "output": "logs/%x.out"}, ["array=0-3", "output=logs/%x.out"]),
        ({"time": "2:00", "signal_lead": 120}, ["time=00:02:00", "signal_lead=120"]),
        ({"launcher": "template"}, ["{main_process_ip}"]),
        ({"launcher": "srun", "command": "run {num_processes}"}, ["launcher=srun", "command=run"]),
        ({"venv": "a", "conda": "b"}, ["venv=a", "conda=b"]),
        ({"env": {"KEY": "x"}, "secrets": ["KEY"]}, ["KEY is in env and in secrets"]),
        ({"program": None}, ["program is not set"]),
    ],
)
def test_contradictions_are_told_with_both_values(given: dict[str, Any], told: list[str]) -> None:
    """What cannot both be meant is refused when the spec is made, with what was found and what to do."""
    with pytest.raises(ConfigError) as caught:
        spec(**given)
    assert [part for part in told if part not in str(caught.value)] == []
    assert caught.value.do


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"nodes": "2-4"}, "nodes is no whole number. Found: '2-4'"),
        ({"nodes": 0}, "nodes is below 1. Found: 0"),
        ({"nodes": True}, "nodes is no whole number. Found: True"),
        ({"gpus_per_node": -1}, "gpus_per_node is below 0. Found: -1"),
        ({"gpus_per_node": "a100:4"}, "write gres: gpu:a100:4"),
        ({"max_restarts": -1}, "max_restarts is below 0"),
        ({"signal_lead": 65536}, "signal_lead is above 65535"),
        ({"time": "4m"}, "time is refused: '4m'"),
        ({"mem": "abc"}, "mem is refused: 'abc'"),
        ({"mem_per_cpu": "all"}, "write mem: all"),
        ({"array": "5-1"}, "array is refused: '5-1'"),
        ({"nodelist": "a[1-2"}, "nodelist is refused: 'a[1-2'"),
        ({"nodelist": "node[1-3]-ib0"}, "nodelist is refused"),
        ({"exclude": "./bad-nodes"}, "sbatch would read it as the name of a file"),
        ({"output": "logs-%j/out"}, "output has a % pattern in a folder"),
        ({"error": "%Y.err"}, "error has a pattern that Slurm does not fill. Found: %Y"),
        ({"output": "logs/"}, "output names a folder"),
        ({"job_name": "a/b"}, "job_name has a /"),
        ({"comment": "a\n#SBATCH --uid=0"}, "comment holds a line break"),
        ({"dependency": "afterok:1?afterok:2"}, "dependency has a ?"),
        ({"dependency": "afterdone:1"}, "Found: 'afterdone'"),
        ({"dependency": "afterok"}, "no job ids"),
        ({"mail_type": "END,FIAL"}, "Found: FIAL. Do: write FAIL"),
        ({"launcher": "torchrn"}, "Found: 'torchrn'. Do: write torchrun"),
        ({"exclusive": "maybe"}, "exclusive is neither true nor false"),
        ({"program": "train.py --lr 1"}, "program is one text"),
        ({"program": ["--lr"]}, "does not begin with a script"),
        ({"program": ["-m"]}, "no module after -m"),
        ({"program": ["a", "\0"]}, "NUL"),
        ({"env": {"A-B": "1"}}, "Found: 'A-B'"),
        ({"env": {"A": True}}, "true, false and the like in quotes"),
        ({"modules": "CUDA Python"}, "one module each"),
        ({"extra": ["-p x"]}, "holds what is no long option"),
        ({"extra": ["--partition=x"]}, "give partition instead"),
        ({"extra": ["--part=x"]}, "give partition instead"),
        ({"extra": ["--no-requeue"]}, "give requeue instead"),
        ({"extra": ["--signal=USR2@9"]}, "give signal_lead instead"),
        ({"extra": ["--open-mode=truncate"]}, "always appended"),
        ({"launcher": "template", "command": "run {num_procesess}"}, "write {num_processes}"),
        ({"launcher": "template", "command": "run 'a"}, "close its quotes"),
    ],
)
def test_what_slurm_or_the_shell_would_mangle_is_refused(given: dict[str, Any], told: str) -> None:
    """A wrong value is told with its name, the value and what to do."""
    with pytest.raises(ConfigError) as caught:
        spec(**given)
    assert told in str(caught.value)


def test_braces_of_others_stay_in_a_command() -> None:
    """The shell's and JSON's braces in a command are none of ours."""
    command = """run {num_processes} ${HOME} '{"a": {}}' {print} --ip {main_process_ip}"""
    assert spec(launcher="accelerate", command=command).command == command


def test_a_command_may_have_several_lines() -> None:
    """A command folded over lines, as a YAML block is, stays one."""
    command = "accelerate launch \\\n  --num_machines {num_machines}\n"
    assert spec(launcher="template", command=command).command == command


def test_an_unknown_setting_is_told_with_the_nearest() -> None:
    """B022: a misspelt setting is refused with the one that is near."""
    with pytest.raises(ConfigError, match=r"partiton is no setting.*write partition") as caught:
        spec(partiton="gpu")
    assert "gpu" not in str(caught.value)


def test_one_setting_said_twice_is_refused() -> None:
    """Two spellings of one setting are one too many."""
    with pytest.raises(ConfigError, match="mem_per_cpu is said twice"):
        spec(**{"mem-per-cpu": "1G", "mem_per_cpu": "2G"})


def test_several_wrong_settings_are_named_at_once() -> None:
    """One error names every setting that is wrong."""
    with pytest.raises(ConfigError, match=r"nodes is below 1.*wrong as well: mem, time"):
        JobSpec.of({"nodes": 0, "time": "4m", "mem": "x"})


@pytest.mark.parametrize("given", [{"KEY": "hush"}, ["KEY=hush"], "KEY=hush", [["hush"]]])
def test_a_secrets_value_is_not_repeated(given: Any) -> None:
    """Who writes a value where a name belongs does not find it in the error."""
    with pytest.raises(ConfigError, match="secrets") as caught:
        spec(secrets=given)
    assert "hush" not in str(caught.value)


def test_made_directly_it_gives_the_same_error() -> None:
    """Also without `of` no error of pydantic's reaches anybody."""
    with pytest.raises(ConfigError, match="nodes is below 1"):
        JobSpec(nodes=0, program=("train.py",))


def test_it_is_frozen() -> None:
    """A spec is a value."""
    with pytest.raises(Exception, match="frozen"):
        spec().nodes = 2


def test_yaml_means_what_it_looks_like(tmp_path: Path) -> None:
    """B029: 1e-4 is a number, `no` and 4:00 are text, and 012 is what it says."""
    read = load(written(tmp_path / "a.yaml", "lr: 1e-4\nprecision: no\ntime: 4:00\nlong: 1:00:00\njob_id: 012\n"))
    assert read == {"lr": 1e-4, "precision": "no", "time": "4:00", "long": "1:00:00", "job_id": 12}
    assert isinstance(read["lr"], float)


@pytest.mark.parametrize("head", ["", "%YAML 1.1\n---\n"])
def test_four_minutes_are_four_minutes(head: str, tmp_path: Path) -> None:
    """B029: an unquoted time in YAML is read as Slurm reads it, whichever YAML the file says it is."""
    path = written(tmp_path / "a.yaml", f"{head}program: [train.py]\ntime: 4:00\nrequeue: no\n")
    job = JobSpec.read(path)
    assert (job.seconds, job.requeue) == (240, False)


def test_numbers_are_kept_as_written_where_text_is_wanted(tmp_path: Path) -> None:
    """B029: 3.10 is no 3.1 where a text is wanted, and dates stay as they are."""
    text = "program: [train.py, --lr, 1e-4, 1_000]\njob_name: 012\nenv: {V: 3.10}\nbegin: 2027-01-31T08:00:00\n"
    job = JobSpec.read(written(tmp_path / "a.yaml", text))
    assert job.program == ("train.py", "--lr", "1e-4", "1_000")
    assert (job.job_name, job.env, job.begin) == ("012", {"V": "3.10"}, "2027-01-31T08:00:00")


def test_an_unknown_key_is_told_with_its_line(tmp_path: Path) -> None:
    """B029: a typo in a file is refused with line and nearest name."""
    path = written(tmp_path / "job.yaml", "program: [train.py]\n\ngpus-pernode: 4\n")
    with pytest.raises(ConfigError, match=r"job\.yaml, line 3: .*gpus_pernode is no setting.*write gpus_per_node"):
        JobSpec.read(path)


def test_a_contradiction_is_told_with_a_line(tmp_path: Path) -> None:
    """Where two lines of a file disagree, one of them is named."""
    path = written(tmp_path / "job.yaml", "program: [train.py]\nmem: 1G\nmem-per-cpu: 2G\n")
    with pytest.raises(ConfigError, match=r"job\.yaml, line 2: .*mem=1024M, mem_per_cpu=2048M"):
        JobSpec.read(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nodes: 1\nmem: 1G\nnodes: 2\n", r"line 3 says nodes again.*line 1"),
        ("env:\n  A: 1\n  A: 2\n", r"line 3 says A again.*line 2"),
        ("- a\n", "line 1 is no mapping"),
        ("a: [1\nb: 2\n", "line 2 is no YAML"),
        ("a: !!python/name:os.system x\n", "line 1 has the tag"),
        ("a: &x [*x]\n", "line 1 holds itself"),
        ("<<: {a: 1}\n", "line 1 has a key"),
        ("a: 1\n---\nb: 1\n", "is no YAML"),
    ],
)
def test_other_yaml_is_refused_with_its_line(text: str, told: str, tmp_path: Path) -> None:
    """Keys that are said twice and files that are no plain settings are refused with the line."""
    with pytest.raises(ConfigError, match=told):
        load(written(tmp_path / "job.yaml", text))


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """A missing file and one that is no text are told, not thrown."""
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name in ("none", "bytes"):
        with pytest.raises(ConfigError, match="cannot be read"):
            load(tmp_path / name)


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    """A file of comments holds no settings."""
    assert load(written(tmp_path / "job.yaml", "# later\n")) == {}


def test_a_large_list_of_nodes_is_quick() -> None:
    """Sixteen thousand nodes are counted, not walked through for each setting."""
    assert spec(nodes=16384, gpus_per_node=4).world_size == 65536


def test_every_setting_is_described() -> None:
    """Each field has its docstring: the command line's help is made of them."""
    assert [name for name in JobSpec.model_fields if not described(JobSpec).get(name)] == []


def test_the_spec_needs_neither_torch_nor_yaml() -> None:
    """Making a spec loads no torch, and ruamel.yaml only for a file."""
    code = "import sys, worldsize.launch.spec as s; s.JobSpec(program=('a',)); print({'torch', 'ruamel.yaml'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("name", ["IFS", "UID", "RANDOM"])
def test_a_variable_that_bash_sets_itself_is_refused(name: str) -> None:
    """It would arrive changed."""
    with pytest.raises(ConfigError, match=f"{name}, which bash sets itself"):
        JobSpec.of({"program": ["train.py"], "env": {name: "x"}})
