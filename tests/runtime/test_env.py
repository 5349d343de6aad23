"""The world, told from what launchers leave in the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.errors import WorldError
from worldsize.runtime.env import detect, export, here, in_slurm_step, read
from worldsize.world import World

HERE = Path(__file__).parent
TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run7",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}
STEP = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[1-2]",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One recorded case: the environments of all its tasks, and of the shell that started them."""

    file: str
    name: str
    shells: tuple[dict[str, str], ...]
    tasks: tuple[dict[str, str], ...]

    def __str__(self) -> str:
        return f"{self.file}:{self.name}"


def recorded(folder: str, *skip: str) -> list[Case]:
    """All cases of the recorded files in a folder, but for the files named."""
    cases = []
    for path in sorted((HERE / folder).glob("*.json")):
        for name, seen in json.loads(path.read_text()).items() if path.stem not in skip else ():
            tasks = tuple(environ for who, environ in sorted(seen.items()) if who.startswith("task"))
            shells = tuple(environ for who, environ in sorted(seen.items()) if not who.startswith("task"))
            cases.append(Case(path.stem, name, shells, tasks))
    return cases


SLURM = recorded("slurm_env", "22.05-shells")
SHELLS = {case.name: case.tasks for case in recorded("slurm_env") if case.file == "22.05-shells"}
MPI = {case.name: case.tasks for case in recorded("mpi_env")}


def refused(environ: dict[str, str], *shown: str) -> None:
    """Assert that this environment is an error which shows all of these."""
    with pytest.raises(WorldError) as refusal:
        detect(environ)
    for text in shown:
        assert text in str(refusal.value)


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    """The environment without these names."""
    return {name: value for name, value in environ.items() if name not in names}


def assert_complete(worlds: list[World]) -> None:
    """Assert that these are all ranks of one world, told alike: 0..n-1, and 0..m-1 on each of the nodes."""
    size = len(worlds)
    assert sorted(world.rank for world in worlds) == list(range(size))
    shared = {(w.size, w.nodes, w.launcher, w.master_addr, w.master_port, w.run_id, w.restart) for w in worlds}
    assert len(shared) == 1
    assert {world.size for world in worlds} == {size}
    assert {world.node for world in worlds} == set(range(worlds[0].nodes))
    for node in range(worlds[0].nodes):
        here = [world for world in worlds if world.node == node]
        assert sorted(world.local_rank for world in here) == list(range(len(here)))
        assert {world.local_size for world in here} == {len(here)}


# --- Slurm


def test_every_recorded_file_is_read() -> None:
    """Three clusters and the steps with bound GPUs: no recorded case is lost."""
    assert len(SLURM) == 15 * 3 + 3
    assert sum(len(case.tasks) for case in SLURM) > 100


@pytest.mark.parametrize("case", [case for case in SLURM if len(case.tasks) > 1], ids=str)
def test_tasks_of_a_recorded_step_form_one_complete_world(case: Case) -> None:
    """Every real srun step of several tasks: uneven nodes, arrays, heterogeneous groups, two Slurm versions."""
    worlds = [detect(environ) for environ in case.tasks]
    assert_complete(worlds)
    assert {world.launcher for world in worlds} == {"slurm"}


@pytest.mark.parametrize("case", [case for case in SLURM if len(case.tasks) > 1], ids=str)
def test_each_recorded_task_is_where_slurm_says(case: Case) -> None:
    """Rank by SLURM_GTIDS, which lists a node's ranks in the order of their local ranks; host by SLURMD_NODENAME."""
    for environ in case.tasks:
        world = detect(environ)
        here = [int(rank) for rank in environ["SLURM_GTIDS"].split(",")]
        assert here[world.local_rank] == world.rank
        assert len(here) == world.local_size
        assert environ["SLURMD_NODENAME"] == f"node{world.node + 1}"
        assert world.master_addr == ("node1" if world.nodes > 1 else "127.0.0.1")
        assert world.run_id == environ["SLURM_JOB_ID"]


@pytest.mark.parametrize("case", [case for case in SLURM if len(case.tasks) == 1], ids=str)
def test_a_recorded_step_of_one_task_is_one_process(case: Case) -> None:
    """B009: one task is one process; the job id is kept."""
    (environ,) = case.tasks
    assert detect(environ) == World(run_id=environ["SLURM_JOB_ID"])


@pytest.mark.parametrize("case", [case for case in SLURM if case.shells], ids=str)
def test_a_recorded_batch_script_or_shell_is_one_process(case: Case) -> None:
    """B009: a batch script has SLURM_PROCID=0 and SLURM_NTASKS=n too, but it is no task."""
    for environ in case.shells:
        assert detect(environ) == World()


@pytest.mark.parametrize("step", ["4294967290", "4294967291", "4294967292", "batch", "interactive"])
def test_steps_that_slurm_counts_from_the_top_are_shells(step: str) -> None:
    """B009: the batch, extern and interactive steps are no tasks, under whichever name."""
    assert detect({**STEP, "SLURM_STEP_ID": step}) == World()


@pytest.mark.parametrize("name", ["bash", "interactive", "train"])
def test_the_job_name_decides_nothing(name: str) -> None:
    """B009: a pty shell is one process and a step of four tasks is four, whatever the job is called."""
    (shell,) = SHELLS["pty_shell"]
    assert detect({**shell, "SLURM_JOB_NAME": name}) == World()
    assert detect({**STEP, "SLURM_JOB_NAME": name}).size == 4


def test_a_pty_step_of_several_tasks_is_refused() -> None:
    """B009: nobody can tell a shell on the first task from all of the tasks."""
    for environ in SHELLS["pty_of_2"]:
        refused(environ, "SLURM_PTY_PORT=", "SLURM_NTASKS=2")


@pytest.mark.parametrize("text", ["2(x3),1", "1,2(x3)", "3,1(x2),2"])
@pytest.mark.parametrize("node", range(4))
def test_local_size_is_that_of_the_own_node(text: str, node: int) -> None:
    """B007: uneven nodes: the local size is indexed by the node, also on the last one."""
    sizes = {"2(x3),1": [2, 2, 2, 1], "1,2(x3)": [1, 2, 2, 2], "3,1(x2),2": [3, 1, 1, 2]}[text]
    environ = STEP | {"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NNODES": "4", "SLURM_STEP_NODELIST": "n[1-4]"}
    environ |= {"SLURM_NTASKS": "7", "SLURM_STEP_NUM_TASKS": "7", "SLURM_NODEID": str(node), "SLURM_LOCALID": "0"}
    assert detect(environ).local_size == sizes[node]


def test_fewer_tasks_than_asked_for_are_refused_with_both_numbers() -> None:
    """B008: two tasks per node asked, one started: refused, as the second would never come."""
    (environ,) = SHELLS["asked_2_started_1"]
    refused(environ, "SLURM_NTASKS=1", "SLURM_NTASKS_PER_NODE=2")


def test_tasks_per_node_is_only_a_bound_where_the_last_node_has_fewer() -> None:
    """B007: -n3 with --ntasks-per-node=2 is 2 and 1, which is what was asked for."""
    environ = {**STEP, "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2,1"}
    environ |= {"SLURM_NTASKS": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}
    assert (detect(environ).local_size, detect(environ).size) == (1, 3)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("alpha,beta", "alpha"),
        ("linux[1,2]", "linux1"),
        ("jean-zay-ia[810-811]", "jean-zay-ia810"),
        ("r[2-3]n[1]", "r2n1"),
    ],
)
def test_rank_0_listens_on_the_first_node(text: str, first: str) -> None:
    """B001, B002, B004, B005: the first name of the list, told without any Slurm command."""
    assert detect({**STEP, "SLURM_STEP_NODELIST": text}).master_addr == first


def test_several_nodes_without_a_list_are_refused() -> None:
    """B005: no fallback to this host, on which every node would meet itself."""
    refused(without(STEP, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST unset", "SLURM_NNODES=2", "MASTER_ADDR")


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.1.1", "::1", "[::1]"])
def test_a_loopback_address_for_several_nodes_is_refused(address: str) -> None:
    """B005: each node would wait for itself."""
    refused({**STEP, "MASTER_ADDR": address}, f"MASTER_ADDR={address}", "nodes=2")


def test_the_users_address_and_port_are_kept() -> None:
    """MASTER_ADDR and MASTER_PORT of the user are taken as they are, also without a list of nodes."""
    world = detect({**without(STEP, "SLURM_STEP_NODELIST"), "MASTER_ADDR": "head", "MASTER_PORT": "2222"})
    assert (world.master_addr, world.master_port) == ("head", 2222)


@given(st.integers(1, 10**7), st.integers(1, 14999))
def test_near_job_ids_never_share_a_port(job: int, apart: int) -> None:
    """B044: jobs whose ids differ by less than the range have different ports, always in the same safe range."""
    one, other = (detect({**STEP, "SLURM_JOB_ID": str(number)}).master_port for number in (job, job + apart))
    assert one is not None
    assert other is not None
    assert one != other
    assert 15000 <= min(one, other) <= max(one, other) <= 29999


@pytest.mark.parametrize("other", [{"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}])
def test_another_step_or_start_of_a_job_has_another_port(other: dict[str, str]) -> None:
    """B044: what is left of an earlier step or attempt does not hold the port of this one."""
    assert detect({**STEP, **other}).master_port != detect(STEP).master_port


def test_a_requeued_job_counts_its_starts() -> None:
    """SLURM_RESTART_COUNT is unset in the first start and counts from 1 afterwards."""
    assert (detect(STEP).restart, detect({**STEP, "SLURM_RESTART_COUNT": "1"}).restart) == (0, 1)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"SLURM_PROCID": "4"}, ["SLURM_PROCID=4", "SLURM_NTASKS=4"]),
        ({"SLURM_NTASKS": "3"}, ["SLURM_STEP_NUM_TASKS=4", "SLURM_NTASKS=3"]),
        ({"SLURM_TASKS_PER_NODE": "2,1"}, ["SLURM_TASKS_PER_NODE=2,1", "SLURM_NTASKS=4"]),
        ({"SLURM_TASKS_PER_NODE": "4"}, ["SLURM_TASKS_PER_NODE=4", "SLURM_NNODES=2"]),
        ({"SLURM_LOCALID": "2"}, ["SLURM_LOCALID=2", "SLURM_TASKS_PER_NODE=2(x2)"]),
        ({"SLURM_NODEID": "2"}, ["SLURM_NODEID=2", "SLURM_NNODES=2"]),
        ({"SLURM_STEP_NODELIST": "gpu[1-3]"}, ["gpu[1-3]", "SLURM_NNODES=2"]),
        ({"SLURM_STEP_NODELIST": "gpu[1-"}, ["gpu[1-"]),
        ({"SLURM_PROCID": ""}, ["SLURM_PROCID unset", "SLURM_STEP_ID=0"]),
        ({"SLURM_PROCID": "x"}, ["SLURM_PROCID=x"]),
        ({"WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "3 of 4"]),
        ({"LOCAL_RANK": "0"}, ["LOCAL_RANK=0", "says 1"]),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, ["RANK=0", "SLURM_PROCID=3"]),
    ],
)
def test_a_contradiction_inside_a_step_shows_both_values(change: dict[str, str], shown: list[str]) -> None:
    """Promise 7: nothing is guessed where Slurm's variables, or the user's, speak against each other (B047 too)."""
    refused({**STEP, **change}, *shown)


@pytest.mark.parametrize("launcher", ["torchrun", "local"])
def test_ranks_in_another_order_than_slurms_are_taken_where_they_are_meant(launcher: str) -> None:
    """B047: the refusal's advice works: the switch says that RANK is meant, although the step numbers otherwise."""
    environ = {**STEP, **without(TORCHRUN, "TORCHELASTIC_RUN_ID"), "RANK": "2", "LOCAL_RANK": "0"}
    refused(environ, "RANK=2", "SLURM_PROCID=3")
    assert detect({**environ, "WORLDSIZE_LAUNCHER": launcher}).rank == 2


def test_an_agreeing_leftover_is_no_contradiction() -> None:
    """WORLD_SIZE computed in the batch script is welcome as long as it is right."""
    assert detect({**STEP, "WORLD_SIZE": "4", "LOCAL_RANK": "1"}) == detect(STEP)


def test_only_a_task_of_srun_is_in_a_step() -> None:
    """Whether CPUs are counted by task or by node depends on it."""
    assert [in_slurm_step(environ) for environ in (STEP, without(STEP, "SLURM_STEP_ID"), {})] == [True, False, False]


# --- torchrun's contract


def test_torchrun_is_read_whole() -> None:
    """Rank, local rank, node, address, run id and restarts are what torchrun says."""
    assert detect(TORCHRUN) == World(3, 4, 1, 2, 1, 2, "torchrun", "node1", 29500, "run7", 2)


def test_worldsizes_own_launcher_is_torchruns_contract_under_its_name() -> None:
    """`worldsize run` sets the same variables, and WORLDSIZE_LAUNCHER=worldsize."""
    assert detect({**TORCHRUN, "WORLDSIZE_LAUNCHER": "worldsize"}) == World(
        3, 4, 1, 2, 1, 2, "worldsize", "node1", 29500, "run7", 2
    )


def test_torchrun_inside_a_step_is_nearer() -> None:
    """B011: one Slurm task per node runs torchrun; its workers are the ranks, the tasks are not."""
    environ = {**STEP, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert detect({**environ, **TORCHRUN}) == detect(TORCHRUN)


def test_a_real_torchrun_inside_a_step_has_one_rank_0(tmp_path: Path) -> None:
    """B011: two workers of a real torchrun with a Slurm task's variables around it are ranks 0 and 1."""
    script = tmp_path / "who.py"
    script.write_text(
        "from worldsize.runtime.env import detect, read\n"
        "from pathlib import Path\n"
        "w = detect(read())\n"
        f"(Path({str(tmp_path)!r}) / f'rank{{w.rank}}').write_text(f'{{w.size}} {{w.launcher}}')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environ = os.environ | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1"}
    subprocess.run(command, env=environ, check=True, capture_output=True, timeout=120)
    assert {path.name: path.read_text() for path in tmp_path.glob("rank*")} == {
        "rank0": "2 torchrun",
        "rank1": "2 torchrun",
    }


def test_two_agents_may_meet_on_loopback() -> None:
    """Torchrun's agents have met at that address already; a world described by hand has not."""
    environ = {**TORCHRUN, "MASTER_ADDR": "127.0.0.1"}
    assert detect(environ).nodes == 2
    refused(without(environ, "TORCHELASTIC_RUN_ID"), "MASTER_ADDR=127.0.0.1", "nodes=2")


def test_by_hand_on_loopback_is_one_node() -> None:
    """RANK and WORLD_SIZE with a loopback address: all ranks are on this host."""
    assert detect(BY_HAND) == World(1, 2, 1, 2, 0, 1, "env", "127.0.0.1", 29501)


def test_by_hand_with_equal_nodes_the_rest_follows() -> None:
    """Local rank and node follow from rank and local size; the local size from the number of nodes."""
    environ = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}
    expected = World(5, 8, 1, 4, 1, 2, "env", "a", 1234)
    assert detect({**environ, "LOCAL_WORLD_SIZE": "4"}) == expected
    assert detect({**environ, "NNODES": "2"}) == expected
    assert detect({**environ, "LOCAL_SIZE": "4", "LOCAL_RANK": "1", "CROSS_RANK": "1", "CROSS_SIZE": "2"}) == expected


def test_uneven_nodes_are_taken_where_they_are_told_in_full() -> None:
    """Ranks 0-2 on one node and 3 on another: with node and nodes given, nothing has to be derived."""
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"}
    environ |= {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}
    assert detect(environ) == World(3, 4, 0, 1, 1, 2, "env", "a", 1234)


def test_a_single_rank_needs_no_address() -> None:
    """RANK=0 of WORLD_SIZE=1 talks to nobody."""
    assert detect({"RANK": "0", "WORLD_SIZE": "1"}) == World(launcher="env")


def test_an_ipv6_address_loses_its_brackets() -> None:
    """MASTER_ADDR=[fd00::1] is the address fd00::1."""
    assert detect({**TORCHRUN, "MASTER_ADDR": "[fd00::1]"}).master_addr == "fd00::1"


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({"RANK": "1"}, ["RANK=1", "WORLD_SIZE unset"]),
        ({"WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "RANK unset"]),
        ({**BY_HAND, "RANK": "2"}, ["RANK=2", "WORLD_SIZE=2"]),
        ({**BY_HAND, "RANK": "-1"}, ["RANK=-1"]),
        ({**BY_HAND, "RANK": "1.0"}, ["RANK=1.0"]),
        ({**BY_HAND, "WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
        ({**BY_HAND, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
        ({**BY_HAND, "LOCAL_WORLD_SIZE": "4"}, ["LOCAL_WORLD_SIZE=4", "WORLD_SIZE=2"]),
        ({**BY_HAND, "LOCAL_WORLD_SIZE": "0"}, ["LOCAL_WORLD_SIZE=0"]),
        ({**BY_HAND, "LOCAL_RANK": "0"}, ["LOCAL_RANK=0", "RANK=1"]),
        ({**BY_HAND, "MASTER_ADDR": "a"}, ["LOCAL_WORLD_SIZE unset", "MASTER_ADDR=a"]),
        ({**without(BY_HAND, "MASTER_ADDR"), "LOCAL_WORLD_SIZE": "1"}, ["MASTER_ADDR unset"]),
        ({**BY_HAND, "MASTER_ADDR": "", "LOCAL_WORLD_SIZE": "1"}, ["MASTER_ADDR unset"]),
        (without(BY_HAND, "MASTER_PORT"), ["MASTER_PORT unset"]),
        ({**BY_HAND, "MASTER_PORT": "70000"}, ["MASTER_PORT=70000"]),
        ({**TORCHRUN, "GROUP_WORLD_SIZE": "1"}, ["GROUP_WORLD_SIZE=1", "LOCAL_WORLD_SIZE=2", "WORLD_SIZE=4"]),
        ({**TORCHRUN, "GROUP_RANK": "2"}, ["GROUP_RANK=2", "GROUP_WORLD_SIZE=2"]),
    ],
)
def test_a_partial_or_impossible_world_shows_its_values(environ: dict[str, str], shown: list[str]) -> None:
    """Promise 7: RANK without WORLD_SIZE, indices beyond their counts, missing addresses: errors with the values."""
    refused(environ, *shown)


@given(st.integers(1, 6), st.integers(1, 6))
def test_worlds_of_equal_nodes_come_back_from_rank_and_local_size(nodes: int, local_size: int) -> None:
    """For any equal nodes: the ranks form one complete world from RANK, WORLD_SIZE and LOCAL_WORLD_SIZE alone."""
    size = nodes * local_size
    common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(local_size), "MASTER_ADDR": "a", "MASTER_PORT": "1234"}
    assert_complete([detect({**common, "RANK": str(rank)}) for rank in range(size)])


@given(st.lists(st.integers(0, 2), min_size=2, max_size=6))
def test_a_wrong_layout_is_never_taken_for_a_right_one(hosts: list[int]) -> None:
    """However ranks lie on nodes: what is derived is right, or a rank refuses, or ranks count different nodes."""
    used = sorted(set(hosts), key=hosts.index)
    worlds = []
    for rank, host in enumerate(hosts):
        environ = {"RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": "a", "MASTER_PORT": "1234"}
        environ |= {"LOCAL_RANK": str(hosts[:rank].count(host)), "LOCAL_WORLD_SIZE": str(hosts.count(host))}
        try:
            worlds.append(detect(environ))
        except WorldError:
            return
    if len({world.nodes for world in worlds}) == 1:
        assert [world.node for world in worlds] == [used.index(host) for host in hosts]


# --- MPI


def test_open_mpi_is_one_world_on_one_node() -> None:
    """Two real ranks of mpirun: loopback, and a port that follows from the name of this mpirun."""
    worlds = [detect(environ) for environ in MPI["openmpi"]]
    assert_complete(worlds)
    assert {(world.launcher, world.master_addr, world.size) for world in worlds} == {("openmpi", "127.0.0.1", 2)}


def test_open_mpi_on_several_nodes_needs_the_first_ones_name() -> None:
    """Mpirun does not tell its ranks where rank 0 is; with MASTER_ADDR the rest follows."""
    environ = {**MPI["openmpi"][1], "OMPI_COMM_WORLD_SIZE": "4"}
    refused(environ, "MASTER_ADDR unset", "openmpi")
    world = detect({**environ, "MASTER_ADDR": "node1"})
    assert (world.nodes, world.node, world.local_size, world.master_addr) == (2, 0, 2, "node1")


def test_hydra_needs_a_port_that_all_its_ranks_know() -> None:
    """Mpiexec gives its ranks nothing from which one port could follow."""
    for environ in MPI["hydra"]:
        refused(environ, "MASTER_PORT unset", "pmi")
    worlds = [detect({**environ, "MASTER_PORT": "1234"}) for environ in MPI["hydra"]]
    assert_complete(worlds)
    assert worlds[0].launcher == "pmi"


def test_hydra_over_slurm_proxies_is_one_world_on_uneven_nodes() -> None:
    """Four real ranks dealt in turn over three Slurm nodes: node and address come from the proxies' step."""
    worlds = [detect(environ) for environ in MPI["hydra_in_slurm"]]
    assert_complete(worlds)
    assert [world.node for world in worlds] == [0, 1, 2, 0]
    assert {(world.launcher, world.master_addr) for world in worlds} == {("pmi", "node1")}


@pytest.mark.parametrize("environ", [*MPI["hydra_port"], {"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"}])
def test_an_mpi_rank_without_a_size_is_refused(environ: dict[str, str]) -> None:
    """A rank that cannot know how many there are must not train as if it were alone."""
    refused(environ, "PMI_SIZE unset", "WORLDSIZE_LAUNCHER=none")


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({"PMI_RANK": "1"}, ["PMI_RANK=1", "PMI_SIZE unset"]),
        ({"PMI_RANK": "1", "PMI_SIZE": "1"}, ["PMI_RANK=1", "PMI_SIZE=1"]),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ["PMI_SIZE=2", "MPI_LOCALNRANKS unset"]),
        ({"OMPI_COMM_WORLD_RANK": "1"}, ["OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE unset"]),
    ],
)
def test_a_partial_mpi_world_shows_its_values(environ: dict[str, str], shown: list[str]) -> None:
    """Promise 7: a rank without a size, or beyond it, is an error with both."""
    refused(environ, *shown)


# --- the switch


def test_an_empty_environment_is_one_process() -> None:
    """A plain process is rank 0 of 1."""
    assert detect({}) == World()
    assert detect({"RANK": "", "WORLD_SIZE": "", "SLURM_STEP_ID": ""}) == World()


@pytest.mark.parametrize("environ", [STEP, TORCHRUN, MPI["openmpi"][1], MPI["hydra"][1], {"RANK": "1"}])
def test_none_reads_nothing(environ: dict[str, str]) -> None:
    """WORLDSIZE_LAUNCHER=none is one process, whatever else is set."""
    assert detect({**environ, "WORLDSIZE_LAUNCHER": "none"}) == World()


@pytest.mark.parametrize("environ", [STEP, MPI["openmpi"][1], MPI["hydra"][1], MPI["hydra_port"][1]])
def test_local_turns_scheduler_detection_off(environ: dict[str, str]) -> None:
    """WORLDSIZE_LAUNCHER=local sees no scheduler and no MPI, but still torchrun's contract."""
    assert detect({**environ, "WORLDSIZE_LAUNCHER": "local"}) == World()
    assert detect({**environ, **TORCHRUN, "WORLDSIZE_LAUNCHER": "local"}) == detect(TORCHRUN)


def test_a_forced_launcher_wins_over_a_nearer_one() -> None:
    """WORLDSIZE_LAUNCHER=slurm takes the step although torchrun's variables are there."""
    world = detect({**STEP, **TORCHRUN, "RANK": "0", "WORLDSIZE_LAUNCHER": "slurm"})
    assert (world.launcher, world.rank, world.run_id) == ("slurm", 3, "42")


def test_forced_slurm_accepts_fewer_tasks_than_asked_for() -> None:
    """B008: with WORLDSIZE_LAUNCHER=slurm the tasks of the step are meant as they are."""
    (environ,) = SHELLS["asked_2_started_1"]
    world = detect({**environ, "WORLDSIZE_LAUNCHER": "slurm"})
    assert (world.launcher, world.size) == ("slurm", 1)


@pytest.mark.parametrize("launcher", ["torchrun", "worldsize", "slurm", "openmpi", "pmi"])
def test_a_forced_launcher_that_did_not_start_this_is_an_error(launcher: str) -> None:
    """The switch names a launcher whose variables are missing: refused, and the missing ones are shown."""
    refused({"WORLDSIZE_LAUNCHER": launcher}, "unset")


def test_an_unknown_launcher_is_refused_with_the_known_ones() -> None:
    """WORLDSIZE_LAUNCHER=srun is a slip."""
    refused({"WORLDSIZE_LAUNCHER": "srun"}, "WORLDSIZE_LAUNCHER=srun", "slurm", "none")


# --- this process


def test_what_is_exported_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`export` sets variables of this process, `read` is a copy of them all."""
    monkeypatch.setenv("WORLDSIZE_TEST_EXPORT", "old")
    export({"WORLDSIZE_TEST_EXPORT": "new"})
    seen = read()
    monkeypatch.delenv("WORLDSIZE_TEST_EXPORT")
    assert seen["WORLDSIZE_TEST_EXPORT"] == "new"


def test_a_process_knows_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """`here` is what `detect` makes of this process's own environment."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert here() == detect(TORCHRUN | dict(read()))
    assert (here().rank, here().size) == (3, 4)
