"""Room: what a job may not ask for at once. Each contradiction is told with both values before anything is queued."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from worldsize.launch.given import refuse
from worldsize.launch.template import PLACES
from worldsize.runtime.hostlist import expand

if TYPE_CHECKING:
    from worldsize.launch.spec import JobSpec

TEMPLATED = ("template", "accelerate")

_ALSO = {"no_requeue": "requeue", "signal": "signal_lead", "ntasks": "nodes and ntasks_per_node"}
_OURS = {
    "open-mode": "logs are always appended to",
    "wrap": "say what runs with program",
    "export": "use env and pass_env",
    "export-file": "use env and pass_env",
    "parsable": "it is given where sbatch is called",
    "test-only": "it is given where sbatch is called",
    "wait": "follow the job with `worldsize logs -f`",
}
_NO_ABBREVIATION = {"gpus"}
"""An option of its own that begins like another."""


def check(spec: JobSpec) -> None:
    """Refuse the first contradiction."""
    for one in _CHECKS:
        one(spec)


def _one_way_to_gpus(spec: JobSpec) -> None:
    if spec.gpus_per_node is not None and spec.gpus_of_gres is not None:
        _both(
            spec,
            "gpus_per_node",
            "gres",
            "GPUs are asked for twice",
            "keep one: the profile's gpus_form renders either",
        )


def _one_way_to_memory(spec: JobSpec) -> None:
    given = [name for name in ("mem", "mem_per_cpu", "mem_per_gpu") if getattr(spec, name) is not None]
    if len(given) > 1:
        _both(spec, given[0], given[1], "memory is asked for twice", "keep one of them")


def _a_number_for_each_node(spec: JobSpec) -> None:
    gpus = spec.gpus_per_node
    if isinstance(gpus, tuple) and len(gpus) != spec.nodes:
        do = f"write {spec.nodes} numbers, or nodes={len(gpus)}"
        _both(spec, "gpus_per_node", "nodes", f"there are {len(gpus)} numbers of GPUs for {spec.nodes} nodes", do)


def _ranks_follow_gpus(spec: JobSpec) -> None:
    """Where nodes differ, one number for all of them can only be wrong; and Slurm has no arrays of such jobs."""
    if not spec.is_het:
        return
    for name in ("nproc_per_node", "ntasks_per_node"):
        if getattr(spec, name) is not None:
            _both(
                spec, name, "gpus_per_node", "the nodes differ", f"leave {name} out: a node has a rank for each GPU"
            )
    if spec.array is not None:
        _both(
            spec,
            "array",
            "gpus_per_node",
            "a job whose nodes differ can be no array",
            "submit the members one by one",
        )


def _tasks_are_ranks(spec: JobSpec) -> None:
    if spec.ntasks_per_node is None or spec.is_het or spec.exec_command is not None:
        return
    if spec.launcher == "srun":
        if spec.nproc_per_node not in (None, spec.ntasks_per_node):
            do = "under srun a rank is a task: give one of them, or both alike"
            _both(spec, "ntasks_per_node", "nproc_per_node", "tasks and ranks of a node differ", do)
    elif spec.ntasks_per_node not in (1, spec.ranks_per_node):
        refuse(
            f"{spec.launcher} starts once a node, and then its ranks",
            found=f"ntasks_per_node={spec.ntasks_per_node}, ranks on a node: {spec.ranks_per_node}",
            do="leave ntasks_per_node out and give nproc_per_node",
            key="ntasks_per_node",
        )


def _nodes_named(spec: JobSpec) -> None:
    named = _hosts(spec.nodelist)
    if len(named) > spec.nodes:
        do = "give nodes as many as there are names; Slurm would leave names out"
        _both(spec, "nodelist", "nodes", f"nodelist has {len(named)} names", do)
    shared = sorted(named & _hosts(spec.exclude))
    if shared:
        _both(spec, "nodelist", "exclude", f"{shared[0]} is wanted and excluded", "take it out of one of them")


def _preflight_leaves_out(spec: JobSpec) -> None:
    if spec.spare_nodes and not spec.preflight:
        refuse(
            "spare_nodes without preflight", do="give preflight too: nothing else finds bad nodes", key="spare_nodes"
        )
    if spec.spare_nodes and (spec.exec_command is not None or spec.launcher == "horovodrun"):
        do = "leave spare_nodes out: a job with bad nodes comes again without them"
        refuse("spare_nodes are only left out of a step that worldsize writes", do=do, key="spare_nodes")
    if spec.preflight and spec.is_het:
        _both(
            spec,
            "preflight",
            "gpus_per_node",
            "the nodes differ",
            "leave preflight out: none can stand in for another",
        )
    if spec.preflight and not spec.exclude_bad_nodes:
        _both(spec, "preflight", "exclude_bad_nodes", "bad nodes are to be found and kept", "leave one of them out")


def _logs_of_an_array(spec: JobSpec) -> None:
    for name in ("output", "error"):
        log = getattr(spec, name)
        if spec.array and log and not re.search(r"%[0-9]*[ajJ]", log.replace("%%", "")):
            _both(spec, name, "array", "all members would write one file", "put %a or %j into the file's name")


def _time_for_the_signal(spec: JobSpec) -> None:
    if spec.seconds is not None and spec.signal_lead >= spec.seconds:
        _both(
            spec,
            "signal_lead",
            "time",
            "the stop signal would come before the start",
            "give fewer seconds than the limit",
        )


def _something_runs(spec: JobSpec) -> None:
    if spec.launcher == "template" and spec.command is None:
        refuse("launcher=template has no command", do=f"give command, with {_braced()}", key="launcher")
    if spec.command is not None and spec.launcher not in TEMPLATED:
        do = f"choose launcher {' or '.join(TEMPLATED)}, or leave command out"
        _both(spec, "command", "launcher", "this launcher has no use for a command", do)
    if spec.exec_command is not None:
        if spec.program:
            _both(spec, "program", "exec_command", "two things are to run", "keep one of them")
        return
    if not spec.program and spec.launcher != "template":
        refuse("program is not set", do="name what runs: [train.py, --lr, 1e-4]", key="program")


def _places_of_the_command(spec: JobSpec) -> None:
    """Braces are also the shell's and JSON's: refused is only what looks like a place with its name misspelt."""
    if spec.command is None:
        return
    import difflib

    for word in re.findall(r"(?<![$\w])\{([a-z_]+)\}", spec.command):
        near = difflib.get_close_matches(word, PLACES, n=1)
        if near and word not in PLACES:
            do = f"write {{{near[0]}}}, if that is meant"
            refuse("command names a place that there is not", found=f"{{{word}}}", do=do, key="command")
    try:
        shlex.split(spec.command)
    except ValueError as error:
        refuse("command is no command line", found=f"{error}: {spec.command!r}", do="close its quotes", key="command")


def _one_python(spec: JobSpec) -> None:
    if spec.venv and spec.conda:
        _both(spec, "venv", "conda", "two environments are asked for", "keep one")


def _a_variable_comes_from_one_place(spec: JobSpec) -> None:
    places = {"env": set(spec.env), "pass_env": set(spec.pass_env), "secrets": set(spec.secrets)}
    for first, second in (("env", "pass_env"), ("env", "secrets"), ("pass_env", "secrets")):
        twice = sorted(places[first] & places[second])
        if twice:
            do = "keep it in secrets alone" if second == "secrets" else "keep one"
            refuse(f"{twice[0]} is in {first} and in {second}", do=do, key=first)


def _extra_is_further(spec: JobSpec) -> None:
    """Sbatch takes the beginning of a long option for the option, so that those repeat a field too."""
    fields = {name.replace("_", "-"): name for name in type(spec).model_fields}
    fields |= {name.replace("_", "-"): field for name, field in _ALSO.items()}
    for line in spec.extra:
        option = re.split("[= ]", line.removeprefix("--"))[0]
        if option in _OURS:
            refuse(f"extra may not have --{option}", found=line, do=_OURS[option], key="extra")
        begun = [long for long in fields if long.startswith(option)] if option not in _NO_ABBREVIATION else []
        field = fields.get(option) or (fields[begun[0]] if begun else None)
        if field:
            refuse(f"extra repeats a field, {field}", found=line, do=f"give {field} instead", key="extra")


_CHECKS = (
    _one_way_to_gpus, _one_way_to_memory, _a_number_for_each_node, _ranks_follow_gpus, _tasks_are_ranks, _nodes_named,
    _preflight_leaves_out, _logs_of_an_array, _time_for_the_signal, _something_runs, _places_of_the_command, _one_python,
    _a_variable_comes_from_one_place, _extra_is_further,
)  # fmt: skip


def _both(spec: JobSpec, first: str, second: str, what: str, do: str) -> None:
    refuse(what, found=f"{first}={getattr(spec, first)}, {second}={getattr(spec, second)}", do=do, key=first)


def _hosts(text: str | None) -> set[str]:
    return set(expand(text)) if text else set()


def _braced() -> str:
    return ", ".join(f"{{{place}}}" for place in PLACES)
