"""A real cluster: its nodes are machines, fail like machines, and leave nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.testing.slurm.looking import fresh, left, links, submit, wait
from worldsize.errors import ConfigError, NotStartedError
from worldsize.testing.slurm import Cluster, needs
from worldsize.testing.slurm.daemons import until

if TYPE_CHECKING:
    from collections.abc import Iterator

OWNER = """
import sys, time
from worldsize.testing.slurm import Cluster
with Cluster(nodes=1, folder=sys.argv[1]):
    print("up", flush=True)
    time.sleep(100)
"""


def written(path: Path) -> bool:
    """Whether something stands in the file: a shell makes it before it writes."""
    return path.exists() and path.stat().st_size > 0


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that does not exist yet."""
    path = fresh()
    yield path
    shutil.rmtree(path.parent)


@pytest.mark.slurm
def test_nodes_are_machines(slurm: Cluster) -> None:
    """Each has its own name, address, processes and /dev/shm, and knows its neighbours by name."""
    tell = (
        "hostname; hostname -i; touch /dev/shm/$(hostname); ls /dev/shm; ls -d /proc/[0-9]* | wc -l; getent hosts ctl"
    )
    done = slurm.run(["srun", "-N2", "-l", "sh", "-c", tell])
    assert done.code == 0, done.err
    told = [[line[3:] for line in done.out.splitlines() if line.startswith(f"{task}: ")] for task in (0, 1)]
    for number, (name, address, shm, processes, controller) in enumerate(told, start=1):
        assert (name, shm) == (f"node{number}", f"node{number}")
        assert address == slurm.site.nodes[number - 1].address
        assert int(processes) < 15
        assert controller.split() == [slurm.site.controller.address, "ctl"]


@pytest.mark.slurm
def test_gpus_are_dealt_out(slurm: Cluster) -> None:
    """Two tasks with two GPUs each see different ones."""
    tell = ["srun", "-N1", "-n2", "--gpus-per-task=2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    assert sorted(slurm.run(tell).out.split()) == ["0,1", "2,3"]


@pytest.mark.slurm
def test_ssh_leads_to_nodes(slurm: Cluster) -> None:
    """By name, from here and from a node to another one."""
    assert slurm.run(["ssh", "-F", str(slurm.ssh_config), "node1", "hostname"]).out == "node1\n"
    assert slurm.exec("node1", ["ssh", "node3", "hostname"]).out == "node3\n"


@pytest.mark.slurm
def test_a_power_cut_ends_all_at_once(slurm: Cluster) -> None:
    """Daemons and jobs of the node are gone; started again with the same network card, it takes jobs."""
    card = ["ip", "-br", "-o", "link", "show", "eth0"]
    before = slurm.exec("node2", card).out.split()[2]
    number = submit(slurm, "-w", "node2", script="sleep 1234")
    wait(slurm, number, lambda state, _: state == "RUNNING")
    assert until(lambda: "sleep 1234" in slurm.exec("node2", ["ps", "ax"]).out, 10.0)
    slurm.kill("node2")
    assert not slurm.alive("node2")
    with pytest.raises(ConfigError, match="node2 is not running"):
        slurm.exec("node2", ["true"])
    slurm.start("node2")
    assert slurm.exec("node2", card).out.split()[2] == before
    assert "sleep 1234" not in slurm.exec("node2", ["ps", "ax"]).out
    slurm.restore()
    assert slurm.run(["srun", "-w", "node2", "hostname"]).out == "node2\n"


@pytest.mark.slurm
def test_lost_nodes_and_their_jobs(slurm: Cluster, tmp_path: Path) -> None:
    """One node dies, one is cut off: both go down, both jobs start again elsewhere; the job that was cut off writes on."""
    write = 'while :; do echo "$SLURM_RESTART_COUNT" >>"$0/$(hostname)"; sleep 0.2; done'
    script = f"exec sh -c '{write}' {tmp_path}"
    slurm.run(["scontrol", "update", "nodename=node3,node4", "state=drain", "reason=later"])
    jobs = [submit(slurm, "--exclusive", script=script) for _ in (1, 2)]
    first = [wait(slurm, number, lambda state, _: state == "RUNNING")[1] for number in jobs]
    assert sorted(first) == ["node1", "node2"]
    assert until(lambda: all((tmp_path / name).exists() for name in first), 20.0)
    slurm.kill("node1")
    slurm.cut("node2")
    slurm.run(["scontrol", "update", "nodename=node3,node4", "state=resume"])
    for number in jobs:
        wait(slurm, number, lambda state, nodes: state == "RUNNING" and nodes in ("node3", "node4"))
    assert {name: slurm.states()[name] for name in ("node1", "node2")} == {"node1": "down*", "node2": "down*"}
    assert until(lambda: all(written(tmp_path / name) for name in ("node3", "node4")), 20.0)
    assert set((tmp_path / "node3").read_text().split()) == {"1"}
    size = (tmp_path / "node2").stat().st_size
    assert until(lambda: (tmp_path / "node2").stat().st_size > size, 5.0)
    size = (tmp_path / "node1").stat().st_size
    time.sleep(0.5)
    assert (tmp_path / "node1").stat().st_size == size


@pytest.mark.slurm
def test_high_jobs_send_others_back(slurm: Cluster) -> None:
    """A job of `high` takes the nodes at once; the job that had them waits to start again."""
    low = submit(slurm, "-N4", script="sleep 100")
    wait(slurm, low, lambda state, _: state == "RUNNING")
    high = submit(slurm, "-N4", "--exclusive", "-p", "high", script="sleep 100")
    wait(slurm, high, lambda state, _: state == "RUNNING", timeout=20.0)
    assert wait(slurm, low, lambda state, _: state != "COMPLETING")[0] == "PENDING"
    assert "Restarts=1" in slurm.run(["scontrol", "show", "job", low]).out


@pytest.mark.slurm
def test_the_controller_may_die_too(slurm: Cluster) -> None:
    """Slurm's commands fail until it is back, and then it remembers its jobs."""
    number = submit(slurm, script="sleep 100")
    wait(slurm, number, lambda state, _: state == "RUNNING")
    # What is saved now may have been gathered before: only the comment tells that it knows the job as running.
    slurm.run(["scontrol", "update", f"jobid={number}", "comment=known-as-running"])
    saved = slurm.folder / "state" / "job_state"
    assert until(lambda: saved.exists() and b"known-as-running" in saved.read_bytes(), 20.0)
    slurm.kill("ctl")
    slurm.start("ctl")
    assert wait(slurm, number, lambda state, _: bool(state))[0] == "RUNNING"


@pytest.mark.slurm(accounting=True)
def test_accounting_remembers(slurm_accounted: Cluster) -> None:
    """Sacct knows a job's end and its GPUs."""
    number = submit(slurm_accounted, "--gpus-per-node=2", script="exit 3")
    ask = ["sacct", "-X", "-n", "-P", "-j", number, "-o", "state,exitcode,alloctres"]
    assert until(lambda: "FAILED|3:0|" in slurm_accounted.run(ask).out, 20.0, 0.2)
    assert "gres/gpu=2" in slurm_accounted.run(ask).out


@pytest.mark.slurm
def test_nothing_is_left_whatever_died(folder: Path) -> None:
    """Up again over the ruins of a cluster whose daemons were killed, then down: no process, mount, socket or link."""
    before = links()
    cluster = Cluster(nodes=2, gpus=1, folder=folder, outlive=True)
    cluster.up()
    cluster.exec("ctl", ["pkill", "-KILL", "slurmctld"])
    for name in ("munged", "node1"):
        cluster._daemons.running()[name].send(signal.SIGKILL)
    again = Cluster(nodes=2, folder=folder, outlive=True)
    again.up()
    assert again.run(["srun", "-N2", "hostname"]).code == 0
    assert len(links() - before) == 1
    submit(again, "-N2", script="srun sleep 100")
    Cluster.at(folder).down()
    assert left(folder) == []
    assert links() <= before


@pytest.mark.slurm
def test_a_cluster_ends_with_its_owner(folder: Path) -> None:
    """SIGKILL to the process that holds it: the kernel takes nodes, mounts and cables away."""
    before = links()
    with subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        assert links() > before
        owner.kill()
    assert until(lambda: left(folder) == [str(folder)] and links() <= before, 20.0)


@pytest.mark.slurm
def test_on_loopback_nodes_share_this_machine(folder: Path) -> None:
    """Jobs run; a killed node takes its jobs along; nothing is left."""
    with Cluster(nodes=2, loopback=True, folder=folder) as cluster:
        assert cluster.run(["srun", "-N2", "sh", "-c", "echo $SLURMD_NODENAME"]).code == 0
        number = submit(cluster, "-w", "node1", script=f"sh -c 'sleep 100; :' {folder}")
        wait(cluster, number, lambda state, _: state == "RUNNING")
        cluster.kill("node1")
        assert not cluster.alive("node1")
        with pytest.raises(ConfigError, match="share this machine's loopback"):
            cluster.cut("node2")
        cluster.restore()
    assert left(folder) == []


def test_what_cannot_be_is_refused(folder: Path) -> None:
    """Before anything is made or started."""
    with pytest.raises(ConfigError, match="nodes is not a number from 1 to 200"):
        Cluster(nodes=0).up()
    with pytest.raises(ConfigError, match="gpus is negative"):
        Cluster(gpus=-1).up()
    with pytest.raises(ConfigError, match="ssh into nodes"):
        Cluster(ssh=True, loopback=True).up()
    with pytest.raises(ConfigError, match=r"no cluster was started in .* Do: start one"):
        Cluster.at(folder)


@pytest.mark.slurm
def test_folders_that_are_refused(folder: Path) -> None:
    """One that is not ours, one that is another on every node, one too long for sockets."""
    folder.mkdir()
    for path, words in (
        (folder, "not a cluster's"),
        (Path("/proc/x"), "every node"),
        (folder / ("x" * 60), "too long"),
    ):
        with pytest.raises(ConfigError, match=words):
            Cluster(folder=path).up()
    assert list(folder.iterdir()) == []


def test_what_is_missing_is_named_with_the_command() -> None:
    """One line: the programs, and what installs them."""
    missing = needs.packages({"PATH": "/nowhere"}, accounting=True)
    with pytest.raises(
        NotStartedError, match=r"no .*munged.* Do: `apt-get install .* munge slurm-client slurmctld"
    ) as told:
        needs.check(missing)
    assert "\n" not in str(told.value)


def test_a_job_around_us_is_not_heard() -> None:
    """Commands of a cluster find nothing of a Slurm job that we may run in."""
    assert needs.environment({"SLURM_JOB_ID": "1", "HOME": "/", "PATH": "/bin"}) == {
        "HOME": "/",
        "PATH": f"/bin:{needs._SBIN}",
    }
    assert "SLURM_CONF" not in os.environ
