"""What Slurm and its neighbours are told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from worldsize.testing.slurm import config
from worldsize.testing.slurm.config import Host, Site

NODES = tuple(Host(f"node{number}", f"node{number}", f"10.1.1.{number}", 6818) for number in (1, 2))
APART = Site(
    folder=Path("/lab"), user="root", controller=Host("ctl", "ctl", "10.1.1.253", 6817), nodes=NODES, subnet="10.1.1"
)
SHARED = replace(
    APART,
    controller=Host("ctl", "laptop", "127.0.1.1", 5000),
    nodes=(Host("node1", "laptop", "127.0.1.1", 5001), Host("node2", "laptop", "127.0.1.1", 5002)),
    subnet=None,
    own_address=True,
)


@pytest.mark.parametrize(
    ("site", "line"),
    [
        (APART, "SlurmctldHost=ctl(10.1.1.253)"),
        (APART, "AuthInfo=socket=/lab/run/munge.sock,cred_expire=5"),
        (APART, "JobRequeue=1"),
        (APART, "MinJobAge=3600"),
        (APART, "KillWait=5"),
        (APART, "SlurmctldParameters=preempt_send_user_signal"),
        (APART, "PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=20 PreemptMode=OFF State=UP"),
        (APART, "PartitionName=short Nodes=ALL MaxTime=1 DefaultTime=1 PriorityTier=10 State=UP"),
        (SHARED, "SlurmctldHost=laptop(127.0.1.1)"),
        (SHARED, "SlurmctldPort=5000"),
        (SHARED, "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny"),
        (replace(APART, gpus=4), "GresTypes=gpu"),
        (replace(APART, accounting_port=6819), "AccountingStoragePort=6819"),
        (replace(APART, accounting_port=6819), "AccountingStoragePass=/lab/run/munge.sock"),
        (replace(APART, accounting_port=6819, gpus=1), "AccountingStorageTRES=gres/gpu"),
        (replace(APART, user="mia"), "SlurmdUser=mia"),
    ],
)
def test_slurm_conf_says(site: Site, line: str) -> None:
    """Each setting stands on a line of its own."""
    assert line in config.slurm_conf(site).splitlines()


@pytest.mark.parametrize("word", ["GresTypes", "Gres=", "AccountingStorage", "CommunicationParameters"])
def test_slurm_conf_is_silent_about_what_there_is_not(word: str) -> None:
    """Without GPUs, accounting and a shared loopback none of them is mentioned."""
    assert word not in config.slurm_conf(APART)


def test_nodes_have_their_addresses_and_ports() -> None:
    """One line a node, with what `hostname` says there."""
    lines = [line for line in config.slurm_conf(replace(SHARED, gpus=2)).splitlines() if line.startswith("NodeName")]
    assert [line.partition(" CPUs")[0] for line in lines] == [
        "NodeName=node1 NodeHostname=laptop NodeAddr=127.0.1.1 Port=5001",
        "NodeName=node2 NodeHostname=laptop NodeAddr=127.0.1.1 Port=5002",
    ]
    assert all(line.endswith("RealMemory=16000 Gres=gpu:2 State=UNKNOWN") for line in lines)


def test_gpus_are_devices_of_the_folder() -> None:
    """Every node is told the same devices."""
    assert config.gres_conf(replace(APART, gpus=4)) == (
        "NodeName=node1 Name=gpu File=/lab/dev/nvidia[0-3]\nNodeName=node2 Name=gpu File=/lab/dev/nvidia[0-3]\n"
    )


def test_hosts_names_every_machine() -> None:
    """/etc/hosts of a node: the controller, the nodes, this host; of a shared loopback nothing but itself."""
    assert config.hosts(APART).splitlines()[1:] == [
        "10.1.1.253 ctl",
        "10.1.1.1 node1",
        "10.1.1.2 node2",
        "10.1.1.254 login",
    ]
    assert config.hosts(SHARED) == "127.0.0.1 localhost\n"


def test_cgroups_are_refused_where_the_word_is_known() -> None:
    """Versions before 24.05 use none unasked, and do not know the word."""
    assert [config.cgroup_conf(replace(APART, version=one)) for one in ((22, 5), (24, 11))] == [
        "",
        "CgroupPlugin=disabled\n",
    ]


@pytest.mark.parametrize(
    ("site", "names"),
    [
        (APART, set()),
        (replace(APART, gpus=1), {"gres.conf"}),
        (replace(APART, accounting_port=1), {"slurmdbd.conf"}),
        (replace(APART, ssh=True), {"sshd_config", "ssh_config"}),
    ],
)
def test_only_what_is_needed_is_written(site: Site, names: set[str]) -> None:
    """Three files always, the others with what they are for."""
    assert set(config.files(site)) == {"slurm.conf", "cgroup.conf", "hosts"} | names


def test_ssh_finds_nodes_by_name() -> None:
    """From this host too, whose own /etc/hosts does not know them."""
    text = config.ssh_config(replace(APART, ssh=True))
    assert "Host node1 node2 10.1.1.*\n  IdentityFile /lab/etc/id\n" in text
    assert text.endswith("Host node2\n  HostName 10.1.1.2\n")


@pytest.mark.parametrize("site", [APART, SHARED, replace(APART, gpus=2, accounting_port=6819, ssh=True)])
def test_a_site_survives_json(site: Site) -> None:
    """What is written at the start is what a later command reads."""
    assert Site.of(json.loads(json.dumps(site.plain()))) == site
