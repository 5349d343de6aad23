"""What one task of a step executes, for each way of starting ranks."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import pytest

from worldsize.errors import ConfigError
from worldsize.launch.slurm.ways import Place, Work, command

WORK = Work(program=("train.py", "--lr", "1e-3"), python="/py")
SECOND = Place(node=1, sizes=(4, 4), address="fd00::1", port=4242, run_id="12-0-0", hosts=("a", "b"))


def words(way: str, work: Work = WORK) -> str:
    """The command of the second node, in one text."""
    return " ".join(command(way, work, SECOND))


def test_srun_starts_the_program_itself() -> None:
    """The rank's place is in its environment."""
    assert words("srun") == "/py -u train.py --lr 1e-3"


def test_torchrun_is_told_this_nodes_number() -> None:
    """Not that of the batch host (B047)."""
    found = words("torchrun")
    assert "--nnodes 2 --node-rank 1 --master-addr fd00::1 --master-port 4242 --nproc-per-node 4" in found


def test_our_supervisors_meet_at_an_endpoint_with_brackets() -> None:
    """An IPv6 address and a port would be one number otherwise."""
    assert "--node-rank 1 --rdzv-endpoint [fd00::1]:4242" in words("worldsize")


def test_a_template_is_filled_on_every_node_and_keeps_other_braces() -> None:
    """Only known places are ours; the program's words follow."""
    template = "run --n {num_processes} --of {num_machines} --me {machine_rank} --to {main_process_ip} '{json: {}}'"
    found = command("template", Work(program=("a b",), python="/py", template=template), SECOND)
    assert found == ("run", "--n", "8", "--of", "2", "--me", "1", "--to", "fd00::1", "{json: {}}", "a b")


def test_deepspeed_is_told_all_nodes_and_this_ones_devices() -> None:
    """Devices as Slurm gave them: a list that begins at 0 would take those of another job."""
    found = command("deepspeed", WORK, replace(SECOND, devices=("4", "5", "6", "7")))
    world = json.loads(base64.urlsafe_b64decode(found[4].removeprefix("--world_info=")))
    assert world == {"node0": [0, 1, 2, 3], "node1": ["4", "5", "6", "7"]}
    assert found[-4:] == ("--no_local_rank", *WORK.program)
    assert found[:4] == (
        "/py",
        "-u",
        "-m",
        "deepspeed.launcher.launch",
    )  # no runner with its pdsh: Slurm is there (B086)


def test_horovodrun_is_told_every_node() -> None:
    """It reaches them itself."""
    assert words("horovodrun") == "/py -m horovod.runner.launch -np 8 -H a:4,b:4 /py -u train.py --lr 1e-3"


def test_an_unknown_way_is_refused() -> None:
    """With those that there are."""
    with pytest.raises(ConfigError, match=r"mpirun.*srun"):
        words("mpirun")
