"""The doctor on a real Slurm cluster: healthy, and with three nodes that are each ill in another way."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration import slurmjob
from tests.testing.slurm import looking
from worldsize.launch import shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from worldsize.testing.slurm import Cluster

pytestmark = pytest.mark.slurm

DIGITS = slurmjob.HERE.parents[1] / "examples" / "digits" / "train.py"
WORDS = ("--duration", "2ep", "--precision", "fp64")
WHERE = """
import os, socket
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", socket.gethostname(), flush=True)
"""
Findings = list[dict[str, Any]]


@contextmanager
def slow(cluster: Cluster, node: str) -> Iterator[None]:
    """A node that sends 50 Mbit/s at most."""
    limit = ("tbf", "rate", "50mbit", "burst", "32kbit", "latency", "400ms")
    done = cluster.exec(node, ("tc", "qdisc", "add", "dev", "eth0", "root", *limit))
    assert done.code == 0, done.err
    try:
        yield
    finally:
        cluster.exec(node, ("tc", "qdisc", "del", "dev", "eth0", "root"))


@contextmanager
def mounted(cluster: Cluster, node: str, place: Path | str, *words: str) -> Iterator[None]:
    """Something else in a place, on one node alone."""
    done = cluster.exec(node, ("mount", *words, str(place)))
    assert done.code == 0, done.err
    try:
        yield
    finally:
        cluster.exec(node, ("umount", str(place)))


@contextmanager
def full(cluster: Cluster, node: str, place: Path) -> Iterator[None]:
    """A disk without room."""
    with mounted(cluster, node, place, "-t", "tmpfs", "-o", "size=4m", "none"):
        cluster.exec(node, ("sh", "-c", f"head -c 8000000 /dev/zero >'{place}/full'"))
        yield


def misled(cluster: Cluster, folder: Path) -> Path:
    """A table in which node3 has an address of nobody."""
    told = (cluster.folder / "etc" / "hosts").read_text(encoding="utf-8").splitlines()
    table = folder / "hosts"
    wrong = [line.rpartition(".")[0] + ".99 node3" if line.endswith(" node3") else line for line in told]
    table.write_text("\n".join([*wrong, ""]), encoding="utf-8")
    return table


def doctor(cluster: Cluster, folder: Path, *words: str) -> Findings:
    """What it finds. Its step has given the nodes back."""
    argv = [sys.executable, "-m", "worldsize", "doctor", "--json", "--run-dir", str(folder), *words]
    done = shell.call(argv, {**cluster.env, "PATH": "/usr/bin:/bin", "TMPDIR": str(folder / "tmp")}, timeout=200)
    assert done.out, done.err
    findings: Findings = json.loads(done.out)["findings"]
    assert done.code == int(any(each["level"] == "problem" for each in findings))
    assert cluster.run(["squeue", "-h", "-t", "PD,R"]).out == ""
    return findings


def problems(findings: Findings) -> set[tuple[str, str]]:
    """What was looked at, and which host has a problem there."""
    return {(each["check"], *each["where"]) for each in findings if each["level"] == "problem"}


@pytest.fixture(scope="module")
def ward(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Findings]:
    """The same cluster, well and ill: node2 knows a wrong address, node3 sends slowly, node4 has a full disk."""
    cluster: Cluster = request.getfixturevalue("_slurm_session")
    folder = tmp_path_factory.mktemp("ward")
    (folder / "tmp").mkdir()
    cluster.restore()
    found = {"well": doctor(cluster, folder, "--quick", "--nodes", "4")}
    with ExitStack() as ills:
        ills.enter_context(mounted(cluster, "node2", "/etc/hosts", "--bind", str(misled(cluster, folder))))
        ills.enter_context(slow(cluster, "node3"))
        ills.enter_context(full(cluster, "node4", folder / "tmp"))
        found["ill"] = doctor(cluster, folder, "--quick", "--nodes", "4")
    return found


def test_a_healthy_cluster_has_no_problem(ward: dict[str, Findings]) -> None:
    """Everything that does not need torch was looked at."""
    assert problems(ward["well"]) == set()
    checks = {each["check"] for each in ward["well"]}
    assert checks >= {"hosts", "versions", "limits", "clocks", "names", "ports", "disk", "shared", "network"}


@pytest.mark.parametrize(
    ("problem", "cure"),
    [
        (("names", "node2"), "/etc/hosts"),
        (("network", "node3"), "--exclude=node3"),
        (("disk", "node4"), "make room in"),
    ],
)
def test_each_ill_node_is_named_with_its_cure(ward: dict[str, Findings], problem: tuple[str, str], cure: str) -> None:
    """The node whose own fault it is."""
    check, node = problem
    (found,) = [each for each in ward["ill"] if each["check"] == check and each["level"] == "problem"]
    assert (found["where"], found["own"]) == ([node], True)
    assert cure in found["do"]


def test_no_other_node_is_blamed(ward: dict[str, Findings]) -> None:
    """Three ills, three problems."""
    assert problems(ward["ill"]) == {("names", "node2"), ("network", "node3"), ("disk", "node4")}


def submitted(
    cluster: Cluster, folder: Path, program: Path, *options: str, words: tuple[str, ...] = ()
) -> slurmjob.Job:
    """A job with a preflight."""
    return slurmjob.submit(cluster, folder, program, ("--preflight", *options), words)


def test_a_job_with_a_spare_node_goes_on_without_the_slow_one(slurm: Cluster, tmp_path: Path) -> None:
    """In the same attempt, though its script runs on that node."""
    program = tmp_path / "where.py"
    program.write_text(WHERE, encoding="utf-8")
    with slow(slurm, "node1"):
        job = submitted(slurm, tmp_path, program, "--nodes", "2", "--spare-nodes", "1")
        assert job.ends() == "COMPLETED", job.log
    assert "going on without node1 (network: slow host" in job.log
    assert {line.split()[-1] for line in job.log.splitlines() if " of 2 on " in line} == {"node2", "node3"}
    assert "attempt 1" not in job.log


@pytest.mark.matrix
@pytest.mark.parametrize("requeue", ["--requeue", "--no-requeue"])
def test_a_job_without_a_spare_node_comes_again_without_the_slow_one(
    slurm: Cluster, tmp_path: Path, requeue: str
) -> None:
    """And trains as one process does."""
    with slow(slurm, "node2"):
        job = submitted(slurm, tmp_path, DIGITS, "--nodes", "3", requeue, words=WORDS)
        state = job.ends()
        if requeue == "--no-requeue":
            assert state == "FAILED", job.log
            follower = (job.folder / f"next-{job.id}").read_text(encoding="utf-8").strip()
            job = slurmjob.Job(slurm, follower, job.folder, job.run)
            state = job.ends()
    assert state == "COMPLETED", job.log
    assert "again without node2" in job.log
    assert "nodes: node[1,3-4]" in job.log
    slurmjob.same(job.losses(), slurmjob.alone(DIGITS, *WORDS))


@pytest.mark.matrix
def test_a_training_with_a_spare_node_ends_right(slurm: Cluster, tmp_path: Path) -> None:
    """Every loss is that of one process, on the two good nodes."""
    with slow(slurm, "node2"):
        job = submitted(slurm, tmp_path, DIGITS, "--nodes", "2", "--spare-nodes", "1", words=WORDS)
        assert job.ends() == "COMPLETED", job.log
    assert "going on without node2" in job.log
    slurmjob.same(job.losses(), slurmjob.alone(DIGITS, *WORDS))


@pytest.mark.matrix
def test_collectives_between_nodes_name_the_slow_one(slurm: Cluster, tmp_path: Path) -> None:
    """Measured by gloo ranks that our launcher starts, though a name leads nowhere."""
    with slow(slurm, "node3"), mounted(slurm, "node2", "/etc/hosts", "--bind", str(misled(slurm, tmp_path))):
        found = doctor(slurm, tmp_path, "--quick", "--torch", "--nodes", "4")
    assert problems(found) == {("names", "node2"), ("network", "node3"), ("collectives", "node3")}


@pytest.mark.matrix
def test_a_node_with_another_folder_and_one_that_knows_too_few_names(slurm: Cluster, tmp_path: Path) -> None:
    """Each is named once, with what it does not see or know."""
    table = tmp_path / "few"
    told = (slurm.folder / "etc" / "hosts").read_text(encoding="utf-8").splitlines()
    table.write_text("\n".join([*(line for line in told if not line.endswith("node4")), ""]), encoding="utf-8")
    (tmp_path / "runs").mkdir()
    with (
        mounted(slurm, "node2", tmp_path / "runs", "-t", "tmpfs", "none"),
        mounted(slurm, "node3", "/etc/hosts", "--bind", str(table)),
    ):
        found = doctor(slurm, tmp_path / "runs", "--quick", "--nodes", "4")
    assert problems(found) == {("shared", "node2"), ("names", "node3")}


@pytest.mark.matrix
def test_inside_a_job_all_its_nodes_are_looked_at(slurm: Cluster, tmp_path: Path) -> None:
    """By one call in its script, without a number of nodes."""
    log = tmp_path / "log"
    line = f"cd {tmp_path} && {sys.executable} -m worldsize doctor --quick >{log}; echo code $? >>{log}"
    looking.wait(slurm, looking.submit(slurm, "-N3", script=line), lambda state, _: state == "COMPLETED")
    said = log.read_text(encoding="utf-8")
    assert "3 answered: node1, node2, node3" in said
    assert said.endswith("code 0\n")


@pytest.mark.matrix
def test_who_is_stopped_gives_the_nodes_back(slurm: Cluster, tmp_path: Path) -> None:
    """Slurm's allocation does not outlive the doctor."""
    argv = [sys.executable, "-m", "worldsize", "doctor", "--no-torch", "--nodes", "4"]
    group = shell.Group()
    child = group.start(argv, {**slurm.env, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)})
    _until(child, b"looks at")
    child.send(signal.SIGTERM)
    assert select.select((child.ended,), (), (), 60)[0]
    assert child.code == 128 + signal.SIGTERM
    group.close()
    child.close()
    assert slurm.run(["squeue", "-h", "-t", "PD,R"]).out == ""


@pytest.mark.matrix
def test_over_ssh_a_host_that_is_not_there_is_one_finding(slurm: Cluster, tmp_path: Path) -> None:
    """With ssh's own reason; the others are looked at."""
    found = doctor(slurm, tmp_path, "--quick", "--hosts", "node1,node2,nope", "--ssh-args", f"-F {slurm.ssh_config}")
    assert problems(found) == {("hosts", "nope")}
    (lost,) = [each for each in found if each["check"] == "hosts" and each["level"] == "problem"]
    assert "its name is not known" in lost["measured"]


@pytest.mark.matrix
def test_a_node_that_dies_meanwhile_is_named(slurm: Cluster, tmp_path: Path) -> None:
    """The others are looked at to the end."""
    argv = [sys.executable, "-m", "worldsize", "doctor", "--no-torch", "--json", "--nodes", "4"]
    group = shell.Group()
    child = group.start(argv, {**slurm.env, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)})
    said = _until(child, b"looks at")
    slurm.cut("node3")
    said += _until(child, b'"problems"')
    group.close()
    child.close()
    found = json.loads(said[said.index(b'{"findings"') :])["findings"]
    assert ("hosts", "node3") in problems(found)
    assert not {node for _, *nodes in problems(found) for node in nodes} - {"node3"}


def _until(child: shell.Child, word: bytes) -> bytes:
    said = b""
    while word not in said:
        ready, _, _ = select.select((child.stdout, child.stderr), (), (), 200)
        assert ready, said
        parts = [os.read(pipe, 1 << 16) for pipe in ready]
        assert any(parts), said
        said += b"".join(parts)
    return said
