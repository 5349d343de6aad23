"""Room: the site profile: what is special at one cluster, so that job specs need not say it. A value from a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from worldsize.launch import fields
from worldsize.launch.fields import by
from worldsize.launch.given import Given

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

VARIABLE = "WORLDSIZE_PROFILE"
CONTAINERS = ("apptainer", "singularity", "pyxis", "enroot", "podman", "docker", "charliecloud")
Container = Literal["apptainer", "singularity", "pyxis", "enroot", "podman", "docker", "charliecloud"]

Text = Annotated[str | None, by(fields.text)]


class Profile(Given):
    """One site. Without a file everything is as Slurm comes."""

    NAME: ClassVar[str] = "site profile"

    address_suffix: Annotated[str, by(fields.text)] = ""
    """Added to a node's name for its address on the fast network: i makes node1i of node1."""
    interface: Text = None
    """The network interface whose address a node gives to the others: ib0."""
    skip: Annotated[tuple[str, ...], by(fields.skipped)] = ()
    """Options of sbatch that are never rendered: exclusive, mem."""
    add: Annotated[tuple[str, ...], by(fields.options)] = ()
    """Options of sbatch that every job gets, each as on an #SBATCH line: --hint=nomultithread."""
    gpus_form: Annotated[Literal["gpus_per_node", "gres"], by(fields.choice, "gpus_per_node", "gres")] = (
        "gpus_per_node"
    )
    """The option that asks for GPUs: gpus_per_node or gres."""
    gres_name: Annotated[str, by(fields.text)] = "gpu"
    """What GPUs are called under gres: gpu, or gpu:a100."""
    container: Annotated[Container | None, by(fields.choice, *CONTAINERS)] = None
    """The container runtime of the nodes."""
    modules: Annotated[tuple[str, ...], by(fields.modules)] = ()
    """Environment modules that every job loads, before its own."""
    mpi: Annotated[Literal["none", "pmix", "pmi2"] | None, by(fields.choice, "none", "pmix", "pmi2")] = None
    """The kind of MPI that srun starts; not given: Slurm's default."""
    env: Annotated[dict[str, str], by(fields.variables)] = Field(default_factory=dict)
    """Environment variables of every job, such as NCCL's and UCX's; a job's own win."""
    pass_env: Annotated[tuple[str, ...], by(fields.names)] = ()
    """Names of variables that every job takes from the submitter's environment, where they are set: SCRATCH."""
    max_array_size: Annotated[int | None, by(fields.count, 1)] = None
    """MaxArraySize of the cluster: indices stay below it; not given: unknown here."""
    requeue: Annotated[bool, by(fields.flag)] = True
    """Whether jobs may go back into the queue; otherwise a job that follows goes on."""
    python: Text = None
    """The interpreter of the nodes, with worldsize in it; not given: the submitter's."""
    threads: Annotated[int | None, by(fields.count, 1)] = None
    """OMP_NUM_THREADS of each rank; not given: its share of the CPUs."""


def find(environ: Mapping[str, str], path: str | os.PathLike[str] | None = None) -> Profile:
    """The profile of this site: `path`, or what WORLDSIZE_PROFILE names, or ~/.config/worldsize/profile.yaml, or none.

    Raises:
        ConfigError: a file that was named is not there, or a profile is wrong.
    """
    named = path or environ.get(VARIABLE)
    if named:
        return Profile.read(named)
    base = environ.get("XDG_CONFIG_HOME") or (f"{home}/.config" if (home := environ.get("HOME")) else "")
    usual = Path(base, "worldsize", "profile.yaml")
    return Profile.read(usual) if base and usual.is_file() else Profile()
