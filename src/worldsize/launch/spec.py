"""Room: the job spec: what one job asks of Slurm, and what it runs. A value; `slurm.script` makes text of it.

Names are sbatch's own where it has the concept. `JobSpec.of(mapping)` and `JobSpec.read(file)` take what a person wrote.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from worldsize.launch import contradictions, fields, units
from worldsize.launch.container import spec as containers
from worldsize.launch.fields import Dependency, by
from worldsize.launch.given import Given
from worldsize.launch.yamlfile import load
from worldsize.runtime.hostlist import expand

__all__ = ["JobSpec", "load"]

Launcher = Literal["worldsize", "srun", "torchrun", "accelerate", "deepspeed", "horovodrun", "template"]
_LAUNCHERS = ("worldsize", "srun", "torchrun", "accelerate", "deepspeed", "horovodrun", "template")
_MAX_LEAD = 65535

Text = Annotated[str | None, by(fields.text)]
Words = Annotated[tuple[str, ...], by(fields.words)]
Hosts = Annotated[str | None, by(fields.hosts)]
Part = Annotated[str | None, by(fields.memory_part)]
Log = Annotated[str | None, by(fields.log)]
Names = Annotated[tuple[str, ...], by(fields.names)]
Flag = Annotated[bool, by(fields.flag)]
Positive = Annotated[int | None, by(fields.count, 1)]


class JobSpec(Given):
    """One job. Frozen; whatever contradicts itself is refused when it is made, with both values."""

    NAME: ClassVar[str] = "job spec"
    HIDDEN: ClassVar[frozenset[str]] = frozenset({"secrets"})

    job_name: Annotated[str, by(fields.name)] = ""
    """The job's name; not given: that of the script or module."""
    partition: Text = None
    """The partition, or several with commas."""
    account: Text = None
    """The account that pays."""
    qos: Text = None
    """The quality of service."""
    constraint: Text = None
    """Features that the nodes must have."""
    reservation: Text = None
    """A reservation to run in."""
    nodes: Annotated[int, by(fields.count, 1)] = 1
    """How many nodes. Not given: as many as gpus_per_node has numbers or nodelist names."""
    ntasks_per_node: Positive = None
    """Tasks on each node, as Slurm counts them; not given: follows from the launcher."""
    gpus_per_node: Annotated[int | tuple[int, ...] | None, by(fields.gpus)] = None
    """GPUs on each node; one number for each node where they differ (4,4,2), which makes a heterogeneous job."""
    gres: Text = None
    """Generic resources of each node, where a kind of GPU or another resource is wanted: gpu:a100:4."""
    cpus_per_task: Positive = None
    """CPUs of each task."""
    cpu_bind: Text = None
    """How srun binds tasks to CPUs: none, cores, sockets; not given: as the site does."""
    gpu_bind: Text = None
    """How srun binds tasks to GPUs: none, closest, single:1; not given: as the site does."""
    mem: Annotated[str | None, by(fields.memory)] = None
    """Memory of each node: 64G; all: all that the node has (sbatch's 0). Kept as MiB (65536M), or all."""
    mem_per_cpu: Part = None
    """Memory for each CPU instead."""
    mem_per_gpu: Part = None
    """Memory for each GPU instead."""
    time: Annotated[str | None, by(fields.time)] = None
    """The time limit: minutes, minutes:seconds, hours:minutes:seconds, days-hours. Kept as days-hours:minutes:seconds."""
    array: Annotated[str | None, by(fields.array)] = None
    """Indices of a job array, and after % how many run at once: 0-19%4."""
    dependency: Annotated[tuple[Dependency, ...], by(fields.dependency)] = ()
    """What must have happened before: kinds with job ids, all of them: afterok:123:124,afterany:125."""
    exclusive: Annotated[bool | Literal["user", "mcs"], by(fields.exclusive)] = False
    """Whether nodes are shared with no other job; user or mcs: with others of the same only."""
    nodelist: Hosts = None
    """Nodes that must be among the job's: node[01-04,7]."""
    exclude: Hosts = None
    """Nodes that must not."""
    signal_lead: Annotated[int, by(fields.count, 1, _MAX_LEAD)] = 120
    """Seconds before the time limit at which the stop signal is sent; not given: half the limit at most."""
    comment: Text = None
    """A comment that Slurm keeps with the job."""
    begin: Text = None
    """The earliest start: 18:00, now+1hour, 2027-01-31T08:00."""
    nice: Annotated[int | None, by(fields.count, -2147483645, 2147483645)] = None
    """How much the job's priority is lowered."""
    output: Log = None
    """The log of the batch script, with Slurm's patterns in the file's name alone; not given: in the job's folder."""
    error: Log = None
    """The log of its errors; not given: in output."""
    chdir: Text = None
    """The working folder; not given: where the job is submitted."""
    requeue: Annotated[bool | None, by(fields.flag)] = None
    """Whether the job may go back into the queue; not given: the site's profile decides."""
    mail_type: Annotated[str | None, by(fields.mails)] = None
    """When Slurm writes a mail: END,FAIL."""
    mail_user: Text = None
    """To whom."""
    licenses: Text = None
    """Licences, with counts: matlab:1."""
    extra: Annotated[tuple[str, ...], by(fields.options)] = ()
    """Further options of sbatch, each as on an #SBATCH line: --switches=1."""

    program: Annotated[tuple[str, ...], by(fields.program)] = ()
    """The argv of the training: a script, or -m and a module, and its arguments."""
    launcher: Annotated[Launcher, by(fields.choice, *_LAUNCHERS)] = "worldsize"
    """What starts the ranks."""
    command: Annotated[str | None, by(fields.bare)] = None
    """A command line that runs on every node before the program's words (launcher template or accelerate); in it
    {num_processes}, {num_machines}, {machine_rank}, {main_process_ip} and {main_process_port} are filled in there."""
    exec_command: Annotated[str | None, by(fields.bare)] = None
    """Shell lines in place of launcher and program: they run once, on the first node, and start their own steps."""
    nproc_per_node: Positive = None
    """Ranks on each node; not given: one for each GPU, or one."""
    run_dir: Text = None
    """The training's run folder; not given: the program's own."""
    max_restarts: Annotated[int, by(fields.count)] = 0
    """How often ranks that failed are started again."""
    env: Annotated[dict[str, str], by(fields.variables)] = Field(default_factory=dict)
    """Environment variables of the ranks, with their values."""
    pass_env: Names = ()
    """Names of variables that are taken from the submitter's environment."""
    secrets: Names = ()
    """Names of variables whose values reach the ranks but no script, preview or log."""
    modules: Annotated[tuple[str, ...], by(fields.modules)] = ()
    """Environment modules that are loaded."""
    venv: Text = None
    """The folder of a virtual environment that is activated, or an archive of one (.tar.gz), unpacked on each node."""
    conda: Text = None
    """The name of a conda environment that is activated instead."""
    container: Annotated[containers.Container | None, by(containers.read)] = None
    """The image that the ranks run in, or a mapping with image, binds, env, workdir, gpus, home, python, runtime."""
    setup: Annotated[tuple[str, ...], by(fields.commands)] = ()
    """Shell commands that run on every node before the program; under launcher srun before each rank."""
    stage: Words = ()
    """Files and folders that are copied to each node's own disk before the program: to $WORLDSIZE_STAGE, {stage}."""
    snapshot: Flag = False
    """Whether the job runs a copy of the code as it is when it is submitted."""
    code_root: Text = None
    """The folder that the copy is of; not given: the git repository around the script, or the script's folder."""
    code_file_suffixes: Words = ()
    """Ends of names of files that the copy takes: .py; not given: all that git does not ignore."""
    exclude_code_folders: Words = ()
    """Folders below it that the copy leaves out."""
    code_limit: Annotated[str | None, by(fields.memory)] = "100M"
    """How large the copy may be; all: of any size."""
    strict_env: Flag = False
    """Whether a job whose Python environment is not the one at submit ends; otherwise it says what differs."""
    exclude_bad_nodes: Flag = True
    """Whether nodes whose hardware failed a rank are left out of the next attempt."""
    preflight: Flag = False
    """Whether each attempt begins with `worldsize doctor`: bad nodes are left out, or the job comes again without them."""
    spare_nodes: Annotated[int, by(fields.count)] = 0
    """Nodes that the job is given beyond nodes, so that it goes on where preflight finds bad ones."""

    @model_validator(mode="before")
    @classmethod
    def _nodes_follow(cls, given: Any) -> Any:
        """Where nodes are not counted, they are listed: by their GPUs, or by name."""
        if isinstance(given, dict) and given.get("nodes") in (None, ""):
            listed = given.get("gpus_per_node")
            numbers = listed.split(",") if isinstance(listed, str) else listed
            if isinstance(numbers, list | tuple) and len(numbers) > 1:
                return {**given, "nodes": len(numbers)}
        return given

    @model_validator(mode="after")
    def _whole(self) -> Self:
        self._settle()
        contradictions.check(self)
        return self

    def _settle(self) -> None:
        """What was not given and follows from the rest."""
        gpus = self.gpus_per_node
        if isinstance(gpus, tuple) and len(set(gpus)) == 1 and len(gpus) == self.nodes:
            object.__setattr__(self, "gpus_per_node", gpus[0])
        if "nodes" not in self.model_fields_set and self.nodelist:
            object.__setattr__(self, "nodes", len(set(expand(self.nodelist))))
        if "signal_lead" not in self.model_fields_set and self.seconds is not None:
            object.__setattr__(self, "signal_lead", max(1, min(self.signal_lead, self.seconds // 2)))
        if not self.job_name:
            object.__setattr__(self, "job_name", self._program_name() or "worldsize")

    def _program_name(self) -> str:
        if self.program[:1] == ("-m",):
            return self.program[1].rpartition(".")[2]
        return re.sub(r"[\x00-\x1f\x7f]", "_", PurePath(self.program[0]).stem) if self.program else ""

    @property
    def seconds(self) -> int | None:
        """The time limit; None: unlimited, or the partition's."""
        return None if self.time is None else units.seconds(self.time)

    @property
    def is_het(self) -> bool:
        """Whether nodes have different numbers of GPUs."""
        return isinstance(self.gpus_per_node, tuple)

    @property
    def gpus_of_gres(self) -> int | None:
        """GPUs that gres asks for; None where it names none."""
        asked = [re.split("[:=]", re.sub("^gres[:/]", "", item)) for item in (self.gres or "").split(",")]
        found = [int(words[-1]) if words[-1].isdecimal() else 1 for words in asked if words[0] == "gpu"]
        return sum(found) if found else None

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node. Not for a job whose nodes differ: see `ranks`."""
        assert not isinstance(self.gpus_per_node, tuple), self.gpus_per_node
        tasks = (self.ntasks_per_node,)
        gpus = (self.gpus_per_node, self.gpus_of_gres)
        order = (
            (self.nproc_per_node, *tasks, *gpus) if self.launcher == "srun" else (self.nproc_per_node, *gpus, *tasks)
        )
        return next((number for number in order if number), 1)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks on each node, a number a node."""
        gpus = self.gpus_per_node
        return gpus if isinstance(gpus, tuple) else (self.ranks_per_node,) * self.nodes

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return sum(self.ranks)

    @property
    def memory_option(self) -> str | None:
        """The value of --mem: what `mem` says, in sbatch's words."""
        return "0" if self.mem == "all" else self.mem
