"""Room: the free settings of a submitted function: names of a job spec, of submitit, or of sbatch's options. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from worldsize.errors import ConfigError
from worldsize.launch.given import nearest
from worldsize.launch.spec import JobSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_NOT_HERE = frozenset({"program", "array", "command", "exec_command", "extra"})
"""Settings that follow from the call."""
_ALSO = {"name": "job_name", "timeout_min": "time", "signal_delay_s": "signal_lead", "mem_gb": "mem"}
"""Names of submitit that are another one's here."""
PARALLELISM = "array_parallelism"
"""How many members of an array run at once."""
_SBATCH = (
    "acctg_freq", "batch", "bb", "bbf", "cluster_constraint", "clusters", "container", "contiguous", "core_spec",
    "cores_per_socket", "cpu_freq", "cpus_per_gpu", "deadline", "delay_boot", "distribution", "extra_node_info",
    "get_user_env", "gid", "gpu_freq", "gpus", "gpus_per_socket", "gpus_per_task", "gres_flags", "hint", "hold",
    "ignore_pbs", "input",
    "mcs_label", "mem_bind", "mincpus", "network", "no_kill", "ntasks_per_core", "ntasks_per_gpu",
    "ntasks_per_socket", "overcommit", "oversubscribe", "power", "prefer", "priority", "profile", "propagate",
    "reboot", "sockets_per_node", "spread_job", "switches", "thread_spec", "threads_per_core", "time_min", "tmp",
    "uid", "use_min_nodes", "wait_all_nodes", "wckey",
)  # fmt: skip


def read(*given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a job spec (and `PARALLELISM`); later ones win; options of sbatch are in `extra`.

    Raises:
        ConfigError: a name is neither a setting nor an option of sbatch.
    """
    found: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, value in _flat(given):
        (options if name in _SBATCH else found)[name] = value
    return found | ({"extra": options} if options else {})


def joined(settings: dict[str, Any], further: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """One set of settings: each wins over those before; lists of commands and dependencies are joined."""
    whole = settings | {name: value for name, value in further.items() if name != PARALLELISM} | more
    for name in ("setup", "dependency"):
        parts = [item for each in (settings, further, more) for item in _list(each.get(name))]
        whole |= {name: parts} if parts else {}
    whole |= {"env": {**further.get("env", {}), **more["env"]}} if "env" in more else {}
    if "nproc_per_node" in further and "ntasks_per_node" not in further:
        whole.pop("ntasks_per_node", None)
    return whole


def _flat(given: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, Any]]:
    for key, value in ((key, value) for each in given for key, value in each.items()):
        name = str(key).replace("-", "_").removeprefix("slurm_")
        if name == "additional_parameters":
            yield from _flat([value])
        else:
            own = _ALSO.get(name, name)
            _known(str(key), own)
            yield own, f"{value}G" if name == "mem_gb" else str(value) if own == "time" else value


def _known(key: str, name: str) -> None:
    names = [*(set(JobSpec.model_fields) - _NOT_HERE), *_SBATCH, PARALLELISM]
    if name not in names:
        raise ConfigError(
            f"SlurmConfig: {key} is neither a setting nor an option of sbatch", do=nearest(name, sorted(names))
        )


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value.split(",") if isinstance(value, str) else value)
