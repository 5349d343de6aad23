"""The command line of `worldsize run`: which words are ours."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from worldsize.cli.main import commands
from worldsize.launch import local

if TYPE_CHECKING:
    from worldsize.launch.plan import Plan

SCRIPT = __file__


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that would be run."""
    found: list[Plan] = []
    monkeypatch.setattr(local, "run", found.append)
    return found


def invoke(line: str | list[str]) -> Result:
    """The command with a line of arguments."""
    words = shlex.split(line) if isinstance(line, str) else line
    return CliRunner().invoke(commands, ["run", *(SCRIPT if word == "S" else word for word in words)])


@pytest.mark.parametrize(
    ("line", "nproc", "own"),
    [
        ("-n 2 S --lr 1", 2, ["--lr", "1"]),
        ("--nproc_per_node=2 S --lr 1", 2, ["--lr", "1"]),
        ("S --nproc-per-node 2 -- --lr 1", 2, ["--lr", "1"]),
        ("--strategy ddp S -n 2 --", 2, []),
        ("S --nproc-per-node 2", 1, ["--nproc-per-node", "2"]),
        ("-n 2 -- S a -- b", 2, ["a", "--", "b"]),
        ("-- S -n 3", 1, ["-n", "3"]),
        ("S -n 2 -- -- a", 2, ["--", "a"]),
        ("S --help", 1, ["--help"]),
    ],
)
def test_whose_words_are_whose(line: str, nproc: int, own: list[str], plans: list[Plan]) -> None:
    """After the script all is the program's; between the script and a `--`, all is ours."""
    assert invoke(line).exit_code == 0
    assert plans[0].nproc == nproc
    assert list(plans[0].argv[3:]) == own


def test_a_program_argument_before_a_double_dash_is_refused_with_the_way_out() -> None:
    """Nothing is guessed: the message says how to pass a `--` on."""
    result = invoke("S --lr 1 -- x")
    assert result.exit_code == 2
    assert "not '--lr'" in result.output
    assert "-- " + SCRIPT in result.output


@given(st.lists(st.text(max_size=8).filter(lambda word: word != "S"), max_size=6))
def test_any_arguments_after_a_double_dash_are_the_programs(own: list[str]) -> None:
    """Whatever they look like."""
    found: list[Plan] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "run", found.append)
        assert invoke(["--", "S", *own]).exit_code == 0
    assert list(found[0].argv[3:]) == own


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--standalone -n 2 S", {"nproc": 2, "nodes": 1}),
        ("--max_restarts=3 --monitor-interval 5 -r 3 -t 3 S", {"max_restarts": 3}),
        ("--nnodes=1:1 --rdzv-backend c10d --rdzv-endpoint localhost:0 S", {"nodes": 1, "endpoint": None}),
        ("--nnodes 2 --node_rank 1 --rdzv_endpoint [fd00::1]:29603 S", {"node": 1, "endpoint": ("fd00::1", 29603)}),
        ("--nnodes 2 --node-rank 1 --master-addr a --master-port 5 S", {"endpoint": ("a", 5), "master_port": None}),
        ("--nnodes 2 --master-addr fd00::1 S", {"endpoint": ("fd00::1", 29500)}),
        ("--master-port 5 S", {"master_port": 5}),
        ("--max-restarts 2 S", {"spare": True}),
        ("--max-restarts 2 --no-spare S", {"spare": False}),
        ("--grace 10m --peer-grace 2s --restart-delay 1.5 S", {"grace": 600, "peer_grace": 2, "restart_delay": 1.5}),
        ("--rdzv-timeout 5s --rdzv-id 456 S", {"rdzv_timeout": 5, "run_id": "456"}),
        ("--log-dir l S", {"log_dir": Path("l")}),
        ("--role trainer S", {"role": "trainer"}),
        (
            "--strategy fsdp --precision bf16 --device cpu S",
            {"options": {"WORLDSIZE_STRATEGY": "fsdp", "WORLDSIZE_PRECISION": "bf16", "WORLDSIZE_DEVICE": "cpu"}},
        ),
    ],
)
def test_options_become_a_plan(line: str, expected: dict[str, Any], plans: list[Plan]) -> None:
    """Torchrun's names and ours."""
    result = invoke(line)
    assert result.exit_code == 0, result.output
    assert {name: getattr(plans[0], name) for name in expected} == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--nnodes 1:4 S", "need an endpoint"),
        ("--nnodes 4:1 S", "not a number of machines"),
        ("--nnodes 0:1 S", "not a number of machines"),
        ("-n 3:2 S", "no number of ranks up to N"),
        ("-n 0:2 S", "no number of ranks up to N"),
        ("--nnodes x S", "not a number of machines"),
        ("--nnodes 2 S", "need an endpoint"),
        ("--nnodes 2 --node-rank 2 --rdzv-endpoint a:1 S", "--node-rank 2 of 2 nodes"),
        ("--nnodes 2 --rdzv-endpoint fd00::1:5 S", "is not an endpoint"),
        ("-n 0 S", "no ranks"),
        ("--module --no-python S", "contradict"),
    ],
)
def test_what_cannot_be_is_refused(line: str, words: str, plans: list[Plan]) -> None:
    """Before anything is started, with code 2."""
    result = invoke(line)
    assert words in str(result.exception)
    assert getattr(result.exception, "exit_code", None) == 2
    assert plans == []


def test_grace_that_is_no_time_is_refused() -> None:
    """The message shows what can be written."""
    result = invoke("--grace soon S")
    assert (result.exit_code, "write 30s" in result.output) == (2, True)


def test_the_launch_half_loads_no_torch() -> None:
    """`worldsize run` loads neither torch nor what makes a start slow."""
    heavy = "{'torch', 'numpy', 'pydantic', 'rich', 'psutil', 'asyncio'}"
    code = f"import sys, worldsize.cli.main, worldsize.cli.run; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("slip", ["--nproc-per-node 2", "--nproc_per_node=2", "--hosts a,b"])
def test_our_option_behind_the_script_is_said(plans: list[Plan], slip: str) -> None:
    """One rank instead of eight would be noticed late. The word is the program's all the same."""
    assert "stands behind the script" in invoke(f"S {slip}").stderr
    assert plans[0].argv[-len(slip.split()) :] == tuple(slip.split())


def test_our_option_behind_the_script_is_not_said_where_it_is_meant() -> None:
    """A `--` before the script says so."""
    assert "behind the script" not in invoke("-- S --hosts a,b").stderr
