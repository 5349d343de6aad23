"""The configuration of a submitted function: its fields, what they ask Slurm for, and the command line."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest

import worldsize as ws
from worldsize.errors import ConfigError

FIELDS = (
    "mode job_name partition output_parent_path output_folder node_list node_list_exclude num_of_node tasks_per_node "
    "gpus_per_task cpus_per_task gpus_per_node mem timeout_min stderr_to_stdout setup pack_code use_packed_code "
    "code_root code_file_suffixes exclude_code_folders use_distributed_env distributed_env_task processes_per_task "
    "distributed_launch_command extra_params_kwargs extra_submit_kwargs extra_task_kwargs"
)
"""Those of nntool."""


def asked(**settings: Any) -> dict[str, Any]:
    """What of a job spec is asked for."""
    return ws.SlurmConfig(**settings).spec().model_dump(exclude_defaults=True)


def test_every_field_of_the_seed_is_one() -> None:
    """And none of them is demanded."""
    assert set(FIELDS.split()) <= {field.name for field in dataclasses.fields(ws.SlurmConfig)}
    assert ws.SlurmConfig().mode == "run"


def test_fields_become_what_sbatch_is_asked() -> None:
    """GPUs of tasks are those of nodes; what starts a node's ranks has the CPUs of all of them."""
    found = asked(
        partition="gpu",
        node_list="node[1-2]",
        node_list_exclude="node3",
        num_of_node=2,
        tasks_per_node=4,
        gpus_per_task=1,
        cpus_per_task=8,
        mem="192GB",
        timeout_min=90,
        setup=["module load cuda"],
    )
    wanted = {"partition": "gpu", "nodelist": "node[1-2]", "exclude": "node3", "nodes": 2, "gpus_per_node": 4}
    wanted |= {"cpus_per_task": 32, "mem": "196608M", "time": "01:30:00", "setup": ("module load cuda",)}
    assert wanted.items() <= found.items()
    assert ws.SlurmConfig(tasks_per_node=4).spec().ranks_per_node == 4


def test_no_limit_is_no_limit() -> None:
    """Seeds have sys.maxsize minutes there."""
    assert ws.SlurmConfig(timeout_min=sys.maxsize).spec().time is None


def test_free_settings_are_a_job_specs_or_sbatchs() -> None:
    """In the names of either, or of submitit; later ones win."""
    found = asked(
        extra_params_kwargs={"account": "a", "slurm_qos": "low", "switches": 1},
        extra_submit_kwargs={"qos": "high", "slurm_additional_parameters": {"requeue": False}},
    )
    assert {"account": "a", "qos": "high", "extra": ("--switches=1",), "requeue": False}.items() <= found.items()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mode": "slrum"}, "mode is not known. Found: 'slrum'"),
        ({"extra_params_kwargs": {"acount": "a"}}, "acount is neither .* Do: write account"),
        ({"extra_submit_kwargs": {"switch": 1}}, "Do: write switches"),
        ({"num_of_node": 0}, "SlurmConfig: num_of_node is below 1"),
        ({"mem": "12Q"}, "SlurmConfig: mem .*'12Q' is no amount of memory"),
        ({"use_distributed_env": True}, "give distributed_launch_command"),
        ({"use_distributed_env": True, "distributed_launch_command": "x {num_proceses}"}, "num_processes"),
    ],
)
def test_mistakes_are_told_when_it_is_made(settings: dict[str, Any], said: str) -> None:
    """In its own names, with the nearest of them."""
    with pytest.raises(ConfigError, match=said):
        ws.SlurmConfig(**settings)


def test_it_is_filled_from_a_command_line() -> None:
    """An option for each field, with its prefix or without, - and _ alike."""
    words = ["--slurm.partition", "gpu", "--num_of_node=2", "--setup", "a", "--setup", "b", "--use-packed-code"]
    words += ["--extra-params-kwargs", "qos=low", "--no-stderr-to-stdout"]
    found = ws.SlurmConfig.from_args(words, mode="slurm", num_of_node=4)
    assert (found.mode, found.partition, found.num_of_node, found.setup) == ("slurm", "gpu", 2, ["a", "b"])
    assert (found.use_packed_code, found.stderr_to_stdout) == (True, False)
    assert found.extra_params_kwargs == {"qos": "low"}


def test_other_options_are_refused_or_handed_on() -> None:
    """As the program wants it."""
    with pytest.raises(ConfigError, match="Did you mean '--partition'"):
        ws.SlurmConfig.from_args(["--partion", "gpu"])
    found, rest = ws.SlurmConfig.from_known_args(["--lr", "3", "--slurm.partition", "gpu"])
    assert (found.partition, rest) == ("gpu", ["--lr", "3"])


def test_help_says_what_each_is(capsys: pytest.CaptureFixture[str]) -> None:
    """From the dataclass's own words."""
    with pytest.raises(SystemExit):
        ws.SlurmConfig.from_args(["--help"])
    text = capsys.readouterr().out
    assert "GPUs of each task." in text
    assert all(f"--{name.replace('_', '-')}" in text for name in FIELDS.split())
