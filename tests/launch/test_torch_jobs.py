"""Real torch programs of others, unchanged, on gloo ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.launch.commands import finish, run, script, start

if TYPE_CHECKING:
    from pathlib import Path

REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
number = torch.tensor([2.0 ** dist.get_rank()])
dist.all_reduce(number)
assert dist.is_torchelastic_launched()
print(number.item())
"""


def test_two_jobs_at_once_on_one_machine(tmp_path: Path) -> None:
    """B044: two starts of two ranks with default settings: both finish, each with its own sum."""
    path = script(tmp_path, REDUCE + "dist.destroy_process_group()")
    ended = [finish(one) for one in [start("-n", "2", path) for _ in range(2)]]
    assert [one.code for one in ended] == [0, 0], ended
    assert all(sorted(one.out.splitlines()) == ["[rank 0] 3.0", "[rank 1] 3.0"] for one in ended)


def test_the_rank_that_failed_is_named_and_not_the_one_that_noticed(tmp_path: Path) -> None:
    """Promise 6, B094: rank 1 raises, rank 0 gets gloo's "connection closed": rank 1 is the answer, with one traceback."""
    text = REDUCE + "if dist.get_rank() == 1: raise ValueError('bad key x')\ndist.all_reduce(number)"
    ended = run("-n", "2", script(tmp_path, text))
    assert ended.code == 1
    assert ended.err.count("Traceback") == 1
    last = ended.err.splitlines()[-1]
    assert last.startswith("worldsize: rank 1 of 2 on ")
    assert "ValueError: bad key x (train.py:9)" in last


def test_a_program_under_torchs_own_record(tmp_path: Path) -> None:
    """Torch's @record writes the error file; it is read, and its exception said once."""
    text = "from torch.distributed.elastic.multiprocessing.errors import record\n"
    text += "@record\ndef main():\n    raise ValueError('bad key ' + os.environ['RANK'])\nmain()"
    ended = run("-n", "2", script(tmp_path, text))
    last = ended.err.splitlines()[-1]
    assert "failed: ValueError: bad key" in last
    assert "(train.py:5 in main)" in last
    assert ended.err.count("Traceback") == 1


def test_a_killed_rank_of_a_training_ends_the_job_with_its_name(tmp_path: Path) -> None:
    """B037: SIGKILL of rank 1 in a collective: named within 10 s, although rank 0 raises as well."""
    text = REDUCE + "print('up', flush=True)\nos.kill(os.getpid(), 9) if dist.get_rank() else dist.all_reduce(number)"
    began = time.monotonic()
    ended = run("-n", "2", script(tmp_path, text))
    assert time.monotonic() - began < 30
    assert ended.code == 137
    assert "rank 1 of 2" in ended.err.splitlines()[-1]
