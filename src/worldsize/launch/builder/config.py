"""Room: the settings of a `slurm_config.yaml`, under the names that users of script builders know. A value.

What the file does not say is left to Slurm, to the site's profile and to the job spec: no site's values are built in.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import model_validator

from worldsize.errors import ConfigError
from worldsize.launch import fields
from worldsize.launch.fields import by
from worldsize.launch.given import Given, refuse

STRATEGIES = ("ddp", "horovod", "deepspeed")
MODES = ("single", "runall", "scaling-test")
Strategy = Literal["ddp", "horovod", "deepspeed"]

_PLACE = re.compile(r"\$?\{([a-z_]+)\}")
_MEANT = 0.8
"""How alike a name in braces must be to a setting's to be taken for a slip: other braces are the program's own."""


def _sizes(value: Any) -> tuple[int, ...]:
    """Numbers of nodes: a list, or text with commas; a list of such texts comes from the command line."""
    items = [part for item in fields.listed(value) for part in str(item).split(",") if part.strip()]
    return tuple(fields.count(item.strip(), 1) for item in items)


def _lower(value: Any, *choices: str) -> str:
    return fields.choice(fields.text(value).lower(), *choices)


Text = Annotated[str | None, by(fields.text)]
Shell = Annotated[str | None, by(fields.bare)]
Positive = Annotated[int | None, by(fields.count, 1)]
Flag = Annotated[bool, by(fields.flag)]


class BuilderConfig(Given):
    """One slurm_config.yaml. Frozen; `sweep.drafts` makes jobs of it."""

    NAME: ClassVar[str] = "slurm config"

    job_name: Annotated[str | None, by(fields.text)] = None
    """The job's name; not given: strategy, nodes and GPUs: ddp-2x4."""
    account: Text = None
    """The account that pays."""
    partition: Text = None
    """The partition."""
    time: Annotated[str | None, by(fields.time)] = None
    """The time limit, as sbatch reads it: 00:30:00."""
    std_out: Text = None
    """The log; without a pattern for it, the job's id is put before its ending."""
    err_out: Text = None
    """The log of errors; not given: in std_out."""
    num_nodes: Annotated[int, by(fields.count, 1)] = 1
    """How many nodes."""
    num_tasks: Positive = None
    """Tasks in all; must agree with the nodes."""
    num_tasks_per_node: Positive = None
    """Tasks on each node, without GPUs the ranks there."""
    gpus_per_node: Annotated[int | None, by(fields.count)] = None
    """GPUs on each node, and so its ranks."""
    cpus_per_task: Positive = None
    """CPUs of each task; where a task is a rank (horovod), its share of them."""
    memory: Annotated[str | None, by(fields.memory)] = None
    """Memory of each node: 64G."""
    exclusive: Flag = False
    """Whether nodes are shared with no other job."""

    pre_exec_command: Shell = None
    """Shell lines that come before the training, and before python_venv."""
    pre_exec_file: Text = None
    """A file with such lines instead."""
    exec_command: Shell = None
    """Shell lines in place of the training: they run once, on the first node, and start their own steps."""
    exec_file: Text = None
    """A file with such lines instead."""
    training_cmd: Shell = None
    """A Python program and its arguments; {name} is the value of another setting."""
    python_venv: Text = None
    """The virtual environment, with worldsize in it, whose Python runs the ranks."""
    container_path: Text = None
    """The image of a container that the ranks run in."""

    distributed_strategy: Annotated[Strategy, by(_lower, *STRATEGIES)] = "ddp"
    """ddp: torchrun a node; deepspeed: its launcher a node; horovod: srun, one task a rank."""
    mode: Annotated[Literal["single", "runall", "scaling-test"], by(_lower, *MODES)] = "single"
    """single: one job; runall: one for each strategy; scaling-test: that for each number in scalability_nodes."""
    scalability_nodes: Annotated[tuple[int, ...], by(_sizes)] = (1, 2, 4, 8)
    """Numbers of nodes of a scaling-test: 1,2,4."""
    py_spy: Flag = False
    """Whether py-spy samples the ranks of each node, into py-spy-output."""
    profiling_sampling_rate: Annotated[int, by(fields.count, 1)] = 10
    """Samples a second of py-spy."""
    use_ray: Flag = False
    """Not here: refused."""

    run_name: Annotated[str, by(fields.text)] = "main-run"
    """A name for training_cmd; where there are several jobs, each has its own."""
    config_name: Annotated[str, by(fields.text)] = "config"
    """For training_cmd."""
    config_path: Annotated[str, by(fields.text)] = "."
    """For training_cmd."""
    pipe_key: Annotated[str, by(fields.text)] = "training_pipeline"
    """For training_cmd."""

    save_script: Flag = True
    """Whether the script is kept, in save_dir."""
    submit_job: Flag = True
    """Whether the job is handed over."""
    save_dir: Annotated[str, by(fields.text)] = "slurm-scripts"
    """The folder for scripts."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for check in (_one_of_each, _something_runs, _tasks_agree, _no_ray, _profiled, _one_python):
            check(self)
        return self

    @property
    def tasks_per_node(self) -> int:
        """Tasks on each node, however they were counted."""
        return self.num_tasks_per_node or (self.num_tasks or 0) // self.num_nodes or 1

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node."""
        return self.gpus_per_node or self.tasks_per_node

    @property
    def identifier(self) -> str:
        """Strategy, nodes and ranks of a node in one word."""
        return f"{self.distributed_strategy}-{self.num_nodes}x{self.ranks_per_node}"

    def filled(self, text: str) -> str:
        """A text with {name} and ${name} replaced by other settings; braces around anything else stay.

        Raises:
            ConfigError: a setting is named that is not set, or one that there is not is nearly named.
        """
        return _PLACE.sub(self._place, text)

    def _place(self, found: re.Match[str]) -> str:
        name, known = found[1], type(self).model_fields
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=_MEANT)
            if near:
                do = f"write {{{near[0]}}}, if that is meant"
                raise ConfigError("slurm config: a setting is named that there is not", found=found[0], do=do)
            return found[0]
        value = getattr(self, name)
        if value is None:
            raise ConfigError(f"slurm config: {found[0]} is named, and {name} is not set", do=f"set {name}")
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _one_of_each(config: BuilderConfig) -> None:
    for first, second in (("pre_exec_command", "pre_exec_file"), ("exec_command", "exec_file")):
        if getattr(config, first) is not None and getattr(config, second) is not None:
            refuse(f"{first} and {second} are both given", do="keep one of them", key=second)


def _something_runs(config: BuilderConfig) -> None:
    given = [name for name in ("training_cmd", "exec_command", "exec_file") if getattr(config, name) is not None]
    if not given:
        refuse("training_cmd is not set", do="name what runs: train.py --strategy {distributed_strategy}")
    if config.py_spy and given[-1] != "training_cmd":
        refuse(
            f"py_spy goes around training_cmd, and {given[-1]} comes in its place", do="leave one out", key="py_spy"
        )


def _tasks_agree(config: BuilderConfig) -> None:
    if config.num_tasks is None:
        return
    if config.mode == "scaling-test":
        refuse("num_tasks is one number, for several numbers of nodes", do="give num_tasks_per_node", key="num_tasks")
    if config.num_tasks != config.num_nodes * config.tasks_per_node:
        found = f"num_tasks={config.num_tasks}, num_nodes={config.num_nodes}, num_tasks_per_node={config.num_tasks_per_node}"
        refuse("the numbers of tasks disagree", found=found, do="leave num_tasks out", key="num_tasks")


def _no_ray(config: BuilderConfig) -> None:
    if config.use_ray:
        do = "leave it out: each strategy has its own launcher; Ray's own are started by an exec_command"
        refuse("use_ray: nothing is started by Ray here", do=do, key="use_ray")


def _profiled(config: BuilderConfig) -> None:
    if config.py_spy and (config.distributed_strategy == "horovod" or config.mode != "single"):
        refuse(
            "py_spy watches one launcher a node, and horovod has a task a rank",
            found=f"distributed_strategy={config.distributed_strategy}, mode={config.mode}",
            do="profile ddp or deepspeed, in mode single",
            key="py_spy",
        )


def _one_python(config: BuilderConfig) -> None:
    if config.python_venv and config.container_path:
        do = "keep one: the image's python3, with worldsize, runs the ranks"
        refuse("python_venv is the host's, and the ranks are to run in container_path", do=do, key="python_venv")
