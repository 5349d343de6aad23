"""Room: what a submitted function asks of Slurm, under nntool's names: a dataclass, and the job spec that it becomes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from worldsize.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from worldsize.launch.spec import JobSpec

Mode = Literal["run", "debug", "local", "slurm"]
_CODE = (".py", ".sh", ".yaml", ".toml")
_NO_CODE = ("wandb", "outputs", "datasets")


@dataclass
class SlurmConfig:
    """Where and how a function runs. What contradicts itself is refused when it is made.

    Attributes:
        mode: run: in this process; debug: in this process, the debugger where it fails; local: as processes of this
            machine; slurm: as a job.
        job_name: the job's name; not given: the function's.
        partition: the partition; not given: Slurm's default.
        output_parent_path: where output_folder lies.
        output_folder: where every job gets a new folder of its own.
        node_list: nodes that must be among the job's.
        node_list_exclude: nodes that must not.
        num_of_node: how many nodes.
        tasks_per_node: tasks of each node.
        gpus_per_task: GPUs of each task.
        cpus_per_task: CPUs of each task.
        gpus_per_node: GPUs of each node, instead of gpus_per_task.
        mem: memory of each node: 64G.
        timeout_min: the time limit in minutes; not given: the partition's.
        stderr_to_stdout: whether errors are in the job's one log, in order.
        setup: shell commands that run on every node before.
        pack_code: whether the job's folder keeps a copy of the code.
        use_packed_code: whether the job runs that copy.
        code_root: the folder of the code.
        code_file_suffixes: ends of names of files that the copy takes.
        exclude_code_folders: folders below code_root that it leaves out.
        use_distributed_env: whether distributed_launch_command starts the processes.
        distributed_env_task: what the processes are: torch.
        processes_per_task: processes of each task.
        distributed_launch_command: a command line that runs once on every node and starts this script again; in it
            {num_processes}, {num_machines}, {machine_rank}, {main_process_ip}, {main_process_port} are filled in there.
        extra_params_kwargs: further settings: those of a job spec, or options of sbatch.
        extra_submit_kwargs: the same; these win.
        extra_task_kwargs: the same; these win over both.
        launcher: what starts the processes otherwise: worldsize, srun, torchrun, accelerate.
    """

    mode: Mode = "run"
    job_name: str = ""
    partition: str = ""
    output_parent_path: str = "./"
    output_folder: str = "slurm"
    node_list: str = ""
    node_list_exclude: str = ""
    num_of_node: int = 1
    tasks_per_node: int = 1
    gpus_per_task: int = 0
    cpus_per_task: int = 1
    gpus_per_node: int | None = None
    mem: str = ""
    timeout_min: int | None = None
    stderr_to_stdout: bool = True
    setup: list[str] = field(default_factory=list)
    pack_code: bool = False
    use_packed_code: bool = False
    code_root: str = "."
    code_file_suffixes: list[str] = field(default_factory=lambda: list(_CODE))
    exclude_code_folders: list[str] = field(default_factory=lambda: list(_NO_CODE))
    use_distributed_env: bool = False
    distributed_env_task: Literal["torch"] = "torch"
    processes_per_task: int = 1
    distributed_launch_command: str = ""
    extra_params_kwargs: dict[str, Any] = field(default_factory=dict)
    extra_submit_kwargs: dict[str, Any] = field(default_factory=dict)
    extra_task_kwargs: dict[str, Any] = field(default_factory=dict)
    launcher: str = "worldsize"

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(
                "SlurmConfig: mode is not known", found=repr(self.mode), do=f"choose from {', '.join(get_args(Mode))}"
            )
        if self.distributed_env_task != "torch":
            raise ConfigError(
                "SlurmConfig: distributed_env_task is not known",
                found=repr(self.distributed_env_task),
                do="write torch",
            )
        if self.use_distributed_env and not self.distributed_launch_command:
            raise ConfigError(
                "SlurmConfig: use_distributed_env has nothing to start",
                do="give distributed_launch_command: accelerate launch --num_processes {num_processes} ... main.py",
            )
        self.spec()

    @classmethod
    def from_args(cls, argv: Sequence[str] | None = None, **defaults: Any) -> Self:
        """Made from a command line: `--partition gpu` or `--slurm.partition gpu`, an option for each field.

        Args:
            argv: the words; None: this program's.
            **defaults: values of fields that were not given there.

        Raises:
            ConfigError: an option is unknown or wrong.
            SystemExit: --help was asked for, and printed.
        """
        from worldsize.launch.functions import words

        return cls(**{**defaults, **words.read(cls, sys.argv[1:] if argv is None else argv)[0]})

    @classmethod
    def from_known_args(cls, argv: Sequence[str] | None = None, **defaults: Any) -> tuple[Self, list[str]]:
        """As `from_args`, with the words that are no option of it, for the program's own parser."""
        from worldsize.launch.functions import words

        given, rest = words.read(cls, sys.argv[1:] if argv is None else argv, strict=False)
        return cls(**{**defaults, **given}), rest

    def spec(self, **more: Any) -> JobSpec:
        """The job that is asked for.

        Args:
            **more: settings of the job spec that win.

        Raises:
            ConfigError: a setting is wrong, unknown, or contradicts another.
        """
        from worldsize.launch.functions import extras
        from worldsize.launch.given import SettingError
        from worldsize.launch.spec import JobSpec

        further = extras.read(self.extra_params_kwargs, self.extra_submit_kwargs, self.extra_task_kwargs)
        try:
            return JobSpec(**extras.joined(self._settings(), further, more))
        except SettingError as error:
            raise _told(error, further) from None

    @property
    def ranks_per_node(self) -> int:
        """Processes of each node."""
        return self.tasks_per_node * self.processes_per_task

    def _settings(self) -> dict[str, Any]:
        srun = self.launcher == "srun" and not self.use_distributed_env
        gpus = self.gpus_per_task * self.tasks_per_node if self.gpus_per_node is None else self.gpus_per_node
        ranks = "ntasks_per_node" if srun else "nproc_per_node"
        limit = None if self.timeout_min in (None, sys.maxsize) else str(self.timeout_min)
        settings = {
            "job_name": self.job_name,
            "partition": self.partition,
            "nodelist": self.node_list,
            "exclude": self.node_list_exclude,
            "nodes": self.num_of_node,
            "gpus_per_node": gpus or None,
            # What starts a node's processes is one task to Slurm, with the CPUs of all of them.
            "cpus_per_task": self.cpus_per_task * (1 if srun else self.tasks_per_node),
            "mem": self.mem,
            "time": limit,
            "setup": list(self.setup),
            ranks: self.ranks_per_node,
        }
        return settings | self._start()

    def _start(self) -> dict[str, Any]:
        if self.use_distributed_env:
            return {"launcher": "template", "command": self.distributed_launch_command}
        return {"launcher": self.launcher, "program": PROGRAM}


PROGRAM = ("-m", "worldsize.launch.functions.inside")
"""What every rank runs, unless it is the script again."""

_NAMES = {
    "nodelist": "node_list",
    "exclude": "node_list_exclude",
    "nodes": "num_of_node",
    "time": "timeout_min",
    "ntasks_per_node": "tasks_per_node",
    "nproc_per_node": "tasks_per_node",
    "command": "distributed_launch_command",
}


def _told(error: Any, further: Mapping[str, Any]) -> ConfigError:
    """The error in the names that were used."""
    name = str(error.path[0]) if error.path else ""
    own = name if name in further else _NAMES.get(name, name)
    what = error.what.removeprefix("job spec: ")
    if what.startswith(f"{name} "):
        what = f"{own}{what.removeprefix(name)}"
    return ConfigError(f"SlurmConfig: {what}", found=error.found, do=error.do)
