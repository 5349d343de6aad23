"""Room: from a slurm_config.yaml to the jobs it asks for: one, one for each strategy, or that for each number of nodes."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from worldsize.errors import ConfigError
from worldsize.launch.builder import commandline
from worldsize.launch.builder.config import STRATEGIES, BuilderConfig
from worldsize.launch.slurm.submit import Draft, draft
from worldsize.launch.spec import JobSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worldsize.launch.profile import Profile

_LAUNCHERS = {"ddp": "torchrun", "deepspeed": "deepspeed", "horovod": "srun"}
_LOGS = "slurm-job-logs"
_PROFILES = "py-spy-output"
_INTERPRETER = re.compile(r"(.*/)?python[0-9.]*")


def drafts(config: BuilderConfig, profile: Profile) -> list[Draft]:
    """The jobs, rendered. Reads the files that are named; touches nothing.

    Raises:
        ConfigError: a file cannot be read, training_cmd is no Python program, or see `JobSpec`.
    """
    return [_draft(each, profile) for each in variants(_read(config))]


def variants(config: BuilderConfig) -> list[BuilderConfig]:
    """A value for each job; where there are several, each has its own job_name and run_name."""
    if config.mode == "single":
        return [config]
    sizes = config.scalability_nodes if config.mode == "scaling-test" else (config.num_nodes,)
    found = [_variant(config, size, strategy) for size in sizes for strategy in STRATEGIES]
    return list({each.identifier: each for each in found}.values())


def keep(made: Draft, folder: Path) -> Path:
    """Write a script down, so that sbatch takes it as it is, under a name of its own: none is ever replaced."""
    path = folder / f"{made.where.folder.name}.slurm"
    logs = [Path(str(made.spec.chdir), log).parent for log in (made.spec.output, made.spec.error) if log]
    try:
        for place in (folder, *logs):
            place.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(made.text)
    except OSError as error:
        raise ConfigError("the script cannot be kept", found=str(error), do="give another --save-dir") from error
    return path


def _read(config: BuilderConfig) -> BuilderConfig:
    """With the lines of its files in their place."""
    found = {}
    for file, into in (("pre_exec_file", "pre_exec_command"), ("exec_file", "exec_command")):
        path = getattr(config, file)
        if path is None:
            continue
        if "://" in path:
            do = "download it, read it, and name the file"
            raise ConfigError(f"slurm config: {file} is an address, and nothing is run unread", found=path, do=do)
        try:
            found[into] = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"slurm config: {file} cannot be read", found=str(error), do="name a file") from error
    return config.model_copy(update=found)


def _variant(config: BuilderConfig, nodes: int, strategy: str) -> BuilderConfig:
    one = config.model_copy(update={"num_nodes": nodes, "distributed_strategy": strategy, "mode": "single"})
    names = {
        "job_name": f"{config.job_name}-{one.identifier}" if config.job_name else None,
        "run_name": f"{one.identifier}-{config.run_name}",
    }
    return one.model_copy(update=names)


def _draft(config: BuilderConfig, profile: Profile) -> Draft:
    if config.python_venv:
        profile = profile.model_copy(update={"python": str(Path(config.python_venv, "bin", "python").absolute())})
    return draft(spec(config, profile.python or sys.executable), profile)


def spec(config: BuilderConfig, python: str) -> JobSpec:
    """The job spec of one job. `python`: the interpreter of the nodes."""
    given: dict[str, Any] = {
        "job_name": config.filled(config.job_name or config.identifier),
        "account": config.account,
        "partition": config.partition,
        "time": config.time,
        "nodes": config.num_nodes,
        "gpus_per_node": config.gpus_per_node or None,
        "mem": config.memory,
        "exclusive": config.exclusive,
        "setup": tuple(_setup(config)),
        "container": {"image": config.container_path} if config.container_path else None,
        **_logs(config),
        **_tasks(config),
        **_work(config, python),
    }
    return JobSpec.of({name: value for name, value in given.items() if value is not None})


def _logs(config: BuilderConfig) -> dict[str, str | None]:
    output = config.std_out or f"{_LOGS}/%x-%j.out"
    return {
        "output": _own(config.filled(output)),
        "error": _own(config.filled(config.err_out)) if config.err_out else None,
    }


def _own(log: str) -> str:
    """The path of a log that no other job writes: with the job's id."""
    path = PurePath(log)
    if re.search(r"%[0-9]*[ajJA]", path.name.replace("%%", "")):
        return log
    return str(path.with_name(f"{path.stem}-%j{path.suffix}")) if path.name else log


def _tasks(config: BuilderConfig) -> dict[str, int | None]:
    """What sbatch is told of tasks: there, a launcher is one task a node, and a rank of horovod is one."""
    ranks, several, cpus = config.ranks_per_node, config.tasks_per_node > 1, config.cpus_per_task
    if config.distributed_strategy == "horovod" and cpus is not None and not several:
        cpus = max(1, cpus // ranks)
    return {
        "nproc_per_node": ranks,
        "ntasks_per_node": config.tasks_per_node if several else None,
        "cpus_per_task": cpus,
    }


def _setup(config: BuilderConfig) -> Iterator[str]:
    # In this order: modules that are loaded after an environment would hide its commands.
    if config.pre_exec_command is not None:
        yield config.pre_exec_command
    if config.python_venv:
        yield f"source {shlex.quote(str(Path(config.python_venv, 'bin', 'activate').absolute()))} || exit 2"


def _work(config: BuilderConfig, python: str) -> dict[str, Any]:
    if config.exec_command is not None:
        return {"exec_command": config.exec_command}
    if config.py_spy:
        return {"launcher": "template", "command": _profiled(config, python), "program": _program(config)}
    return {"launcher": _LAUNCHERS[config.distributed_strategy], "program": _program(config)}


def _profiled(config: BuilderConfig, python: str) -> str:
    """Torchrun under py-spy, which follows the ranks that it starts."""
    output = f'"{_PROFILES}/{config.distributed_strategy}-$WORLDSIZE_JOB-${{SLURM_RESTART_COUNT:-0}}-node{{machine_rank}}.txt"'
    sampling = f"py-spy record --subprocesses --rate {config.profiling_sampling_rate} --format raw --output {output}"
    meeting = "--master-addr {main_process_ip} --master-port {main_process_port}"
    launcher = (
        f"{shlex.quote(python)} -m torch.distributed.run --nnodes {{num_machines}} --node-rank {{machine_rank}}"
    )
    line = f'mkdir -p {_PROFILES} && exec {sampling} -- {launcher} {meeting} --nproc-per-node {config.ranks_per_node} "$@"'
    return shlex.join(("bash", "-c", line, "py-spy"))


def _program(config: BuilderConfig) -> tuple[str, ...]:
    """The words of training_cmd, filled one by one: no value is split, and other quotes and braces stay."""
    known = "|".join(BuilderConfig.model_fields)
    line = re.sub(rf"\$(\{{(?:{known})\}})", r"\1", config.training_cmd or "")
    try:
        words = [config.filled(word) for word in commandline.words(line)]
    except ConfigError as error:
        raise ConfigError(f"slurm config: training_cmd: {error.what}", found=error.found, do=error.do) from None
    if words and _INTERPRETER.fullmatch(words[0]):
        words = words[2:] if words[1:2] == ["-u"] else words[1:]
    if not words or not (words[0].endswith(".py") or (words[0] == "-m" and len(words) > 1)):
        raise ConfigError(
            "slurm config: training_cmd does not begin with a Python program",
            found=repr(config.training_cmd),
            do="begin with train.py or -m package.train, since launchers come from us; or write an exec_command",
        )
    return tuple(words)
