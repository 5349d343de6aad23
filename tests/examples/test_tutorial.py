"""Room: the four jobs of the tutorial, in every way they are started, on CPUs: their lines, their resumes, their refusals."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.examples.programs import PYTHON, ROOT, RUN, TORCHRUN, TUTORIAL, Ended, call, finish, start
from worldsize.launch import ports

if TYPE_CHECKING:
    from pathlib import Path

SHORT = ("--save_every", "1", "--batch_size", "256")
LINE = re.compile(r"\[GPU\d+\] Epoch \d+ \| Batchsize: \d+ \| Steps: \d+")


def epochs(ended: Ended) -> list[str]:
    """The tutorial's lines at the beginning of epochs, of all ranks, sorted.

    torchrun's ranks write a line and its end apart (`python -u`) into one pipe: two may stand in one line.
    """
    return sorted(LINE.findall(ended.text))


def single(folder: Path, total: int, *more: str, ledger: str = "ledger") -> Ended:
    """The job on one process."""
    env = {"WORLDSIZE_LEDGER": str(folder / ledger)}
    return call(*PYTHON, TUTORIAL / "singlegpu.py", "--total_epochs", str(total), *SHORT, *more, cwd=folder, env=env)


def delivered(folder: Path, ledger: str) -> list[tuple[int, list[int]]]:
    """(epoch, sample ids) of every step, in the order they were made."""
    lines = (folder / ledger / "rank-0000.jsonl").read_text(encoding="utf-8").splitlines()
    return [(row["epoch"], row["ids"]) for row in map(json.loads, lines)]


def weights(run: Path) -> dict[str, str]:
    """Digests of the newest checkpoint's tensors."""
    files = json.loads((max((run / "checkpoints").glob("step-*")) / "manifest.json").read_text(encoding="utf-8"))[
        "files"
    ]
    return {name: str(fact) for name, fact in files.items() if name.endswith(".distcp")}


def test_resume_begins_with_the_epoch_after_the_saved_one(tmp_path: Path) -> None:
    """B051: 2 epochs and then 3 are the 3 epochs of an undisturbed run: samples, weights; a finished run makes no step."""
    single(tmp_path, 2, "--run_dir", "parts", ledger="parts-ledger")
    went_on = single(tmp_path, 3, "--run_dir", "parts", ledger="parts-ledger")
    assert "Resuming training from snapshot at epoch 2" in went_on.lines, went_on.text
    assert epochs(went_on) == ["[GPU0] Epoch 2 | Batchsize: 256 | Steps: 8"]
    assert f"Epoch 3 | Training checkpoint saved at parts/checkpoints/step-{24:08d}" in went_on.lines
    single(tmp_path, 3, "--run_dir", "whole", ledger="whole-ledger")
    assert delivered(tmp_path, "parts-ledger") == delivered(tmp_path, "whole-ledger")
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole") != {}
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "parts" / "checkpoints").rglob("*")}
    finished = single(tmp_path, 3, "--run_dir", "parts", ledger="parts-ledger")
    assert finished.code == 0
    assert "nothing to do" in finished.text
    assert epochs(finished) == []
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "parts" / "checkpoints").rglob("*")} == before


def test_stop_inside_an_epoch_goes_on_inside_it(tmp_path: Path) -> None:
    """B053: stopped after 11 of 16 steps, it goes on with the 12th: epochs are whole, nothing is repeated."""
    program = (*PYTHON, TUTORIAL / "singlegpu.py", "--total_epochs", "2", *SHORT)
    env = {"WORLDSIZE_LEDGER": str(tmp_path / "ledger")}
    assert call(*program, cwd=tmp_path, env={**env, "WORLDSIZE_STOP_AFTER": "11"}).code == 75
    went_on = call(*program, cwd=tmp_path, env=env)
    assert "Resuming training from snapshot at epoch 1, step 3 of 8" in went_on.lines, went_on.text
    for epoch in (0, 1):
        seen = [number for made, ids in delivered(tmp_path, "ledger") for number in ids if made == epoch]
        assert sorted(seen) == list(range(2048))


def test_spawned_processes_print_the_tutorials_lines(tmp_path: Path) -> None:
    """`python multigpu.py` starts its processes itself; each tells its epochs, one tells of checkpoints."""
    program = (*PYTHON, TUTORIAL / "multigpu.py", "--nproc", "2", "--total_epochs", "2", *SHORT)
    ended = call(*program, cwd=tmp_path)
    assert ended.code == 0, ended.text
    assert epochs(ended) == [
        f"[GPU{rank}] Epoch {epoch} | Batchsize: 256 | Steps: 4" for rank in (0, 1) for epoch in (0, 1)
    ]
    assert [line for line in ended.lines if "saved" in line] == [
        f"Epoch {epoch} | Training checkpoint saved at runs/multigpu/checkpoints/step-{4 * epoch:08d}"
        for epoch in (1, 2)
    ]


def test_torchrun_and_our_launcher_share_a_run(tmp_path: Path) -> None:
    """B054: what torchrun x 2 began, one rank refuses with the numbers, and continues with the batch size it was told."""
    program = TUTORIAL / "multigpu_torchrun.py"
    began = call(
        *TORCHRUN, "--standalone", "--nproc_per_node=2", program, "--total_epochs", "1", *SHORT, cwd=tmp_path
    )
    assert began.code == 0, began.text
    assert epochs(began) == [f"[GPU{rank}] Epoch 0 | Batchsize: 256 | Steps: 4" for rank in (0, 1)]
    refused = call(*RUN, program, "--total_epochs", "2", *SHORT, cwd=tmp_path)
    assert refused.code == 2
    assert "this run is one of 256 on 2 rank(s): 512 samples a step" in refused.text
    assert "global_batch: began with 512, now 256. Do: give --batch_size 512;" in refused.text
    went_on = call(*RUN, program, "--total_epochs", "2", "--save_every", "1", "--batch_size", "512", cwd=tmp_path)
    assert went_on.code == 0, went_on.text
    assert epochs(went_on) == ["[GPU0] Epoch 1 | Batchsize: 512 | Steps: 4"]


def test_refusal_names_the_rank_counts_that_fit(tmp_path: Path) -> None:
    """Where no batch size on three ranks makes the run's step, the numbers of ranks that can are named."""
    program = TUTORIAL / "multigpu_torchrun.py"
    assert call(*RUN, program, "--total_epochs", "1", *SHORT, cwd=tmp_path).code == 0
    refused = call(*RUN, "--nproc-per-node", "3", program, "--total_epochs", "2", *SHORT, cwd=tmp_path)
    assert refused.code == 2
    assert "Do: start a number of ranks that divides 256: 1, 2, 4, 8, 16, 32, 64, 128, 256" in refused.text


@pytest.mark.parametrize("launcher", [RUN, TORCHRUN])
def test_two_terminals_meet_at_an_ipv6_endpoint(launcher: tuple[str, ...], tmp_path: Path) -> None:
    """The two-node form of the tutorial: one world of two ranks, and one process of both nodes tells of checkpoints."""
    with ports.reserve() as reserved:
        port = reserved.getsockname()[1]
    nodes = [
        start(
            *launcher, "--nproc_per_node=1", "--nnodes=2", f"--node-rank={node}", "--rdzv-id=456", "--rdzv-backend=c10d",
            f"--rdzv-endpoint=[::1]:{port}", TUTORIAL / "multinode.py", "--total_epochs", "1", *SHORT, cwd=tmp_path,
        )
        for node in (0, 1)
    ]  # fmt: skip
    ended = [finish(node) for node in nodes]
    assert [each.code for each in ended] == [0, 0], ended
    assert sorted(line for each in ended for line in epochs(each)) == [
        f"[GPU{rank}] Epoch 0 | Batchsize: 256 | Steps: 4" for rank in (0, 1)
    ]
    assert sum("Training checkpoint saved" in line for each in ended for line in each.lines) == 1


def test_dockerfile_copies_what_is_there() -> None:
    """Everything that the tutorial's image copies from the checkout exists."""
    text = (TUTORIAL.parent / "Dockerfile").read_text(encoding="utf-8")
    sources = [word for line in text.splitlines() if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
