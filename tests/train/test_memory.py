"""Out of memory: the one line says what was done, batch, length, layout, and what to lower; under each launcher."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NoReturn

import pytest
import torch
from torch import nn

import worldsize as ws
from tests.launch.commands import run as command
from tests.launch.commands import script
from tests.pools import pool
from worldsize.launch import endings, failure, held
from worldsize.launch.endings import Ending
from worldsize.runtime import failure as runtime

if TYPE_CHECKING:
    from pathlib import Path

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.10 GiB is free. "
    "Of the allocated memory 70.00 GiB is allocated by PyTorch, and {unused} GiB is reserved by PyTorch but unallocated."
)
BATCH = "micro_batch 2 of global_batch 8; length 6; tensors 2x6"


def raises(how: str) -> NoReturn:
    """What torch and Python say."""
    if how == "host":
        raise AssertionError(torch.empty(1 << 60))
    if how == "python":
        raise MemoryError
    if how == "worker":
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
    if how == "bug":
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    raise torch.OutOfMemoryError(CUDA.format(unused="7.00" if how == "pieces" else "0.10"))


def train(folder: Path, how: str, where: str) -> None:
    """A training on tokens whose second step has no memory."""
    data = torch.utils.data.TensorDataset(torch.zeros(16, 6, dtype=torch.long))
    run = ws.Run(folder, global_batch=8, micro_batch=2, duration="3st", device="cpu")
    model = run.model(lambda: nn.Embedding(4, 1))
    opt = run.optimizer(lambda m: torch.optim.SGD(m.parameters(), 0.1), model)
    if where == "start":
        raises(how)
    for step in run.steps(data):
        for (x,) in step.micro_batches:
            if where == "forward" and step.index == 1:
                raises(how)
            step.backward(model(x).mean((1, 2)))
        if where == "optimizer" and step.index == 1:
            opt.register_step_pre_hook(lambda *_: raises(how))
        step.update()
        if where == "evaluation" and step.index == 1:
            run.evaluate(lambda _: raises(how), data)


def explained(folder: Path, how: str, where: str) -> str:
    """What is told in place of the exception."""
    try:
        train(folder, how, where)
    except (RuntimeError, MemoryError) as error:
        return str(runtime.explained(error))
    return "it ended well"


def said(folder: Path, how: str, where: str = "forward") -> str:
    """The same, of a rank."""
    (line,) = pool(1).run(explained, folder / "run", how, where)
    return str(line)


def test_a_gpu_without_memory_names_batch_length_and_layout(tmp_path: Path) -> None:
    """And what was asked for and left, and what to lower: the micro-batch first."""
    line = said(tmp_path, "gpu")
    assert "out of GPU memory in the forward or backward pass of step 1 (OutOfMemoryError)" in line
    assert f"{BATCH}; single on 1 rank(s) in fp32; asked for 2.00 GiB; 1.10 GiB of 79.11 GiB free" in line
    assert "Do: lower micro_batch (a run that goes on: accept=('micro_batch',)); or the length; or recompute" in line
    assert "expandable" not in line
    assert len(line.splitlines()) == 1
    assert endings.from_text(line) is Ending.GPU_MEMORY


@pytest.mark.parametrize(
    ("where", "doing", "do"),
    [
        ("start", "before the first step", "Do: spread the model"),
        ("optimizer", "in the optimizer of step 1", "Do: spread the model"),
        ("evaluation", "in an evaluation of step 1", "Do: evaluate with a DataLoader of a smaller batch_size"),
    ],
)
def test_what_to_lower_depends_on_what_was_done(tmp_path: Path, where: str, doing: str, do: str) -> None:
    """A smaller batch does not help where parameters alone are too many."""
    line = said(tmp_path, "gpu", where)
    assert f"out of GPU memory {doing} " in line
    assert do in line


def test_memory_in_pieces_is_told_apart(tmp_path: Path) -> None:
    """Where much is reserved and unused, the allocator's setting comes first."""
    assert "Do: set PYTORCH_ALLOC_CONF=expandable_segments:True; or lower micro_batch" in said(tmp_path, "pieces")


@pytest.mark.parametrize(
    ("how", "kind"), [("host", "RuntimeError"), ("python", "MemoryError"), ("worker", "RuntimeError")]
)
def test_a_host_without_memory_says_the_same(tmp_path: Path, how: str, kind: str) -> None:
    """Torch's allocator on the CPU, Python's own, a data worker that the kernel killed."""
    line = said(tmp_path, how)
    assert f"out of host memory in the forward or backward pass of step 1 ({kind}). Found: {BATCH}" in line
    assert "ask for more memory (--mem)" in line
    assert endings.from_text(line) is Ending.HOST_MEMORY


def test_who_asks_for_the_result_gets_it_too(tmp_path: Path) -> None:
    """The exception comes as it was raised, with the line as a note."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        pool(1).run(train, tmp_path / "run", "gpu", "forward")
    (note,) = [note for note in caught.value.__notes__ if note.startswith("worldsize: ")]
    assert BATCH in note


def test_another_exception_stays_what_it_is(tmp_path: Path) -> None:
    """Nothing is told in its place."""
    assert said(tmp_path, "bug") == "None"


def test_the_launcher_ends_with_the_line(tmp_path: Path) -> None:
    """Two ranks: no traceback, one line at the end with rank, place and cure, and its class among the run's events."""
    program = script(
        tmp_path, "import sys; from tests.train.test_memory import train; train('run', 'gpu', 'forward')"
    )
    ended = command("-n", "2", program, cwd=tmp_path, env={"PYTHONPATH": _here()}, timeout=200)
    assert ended.code == 1
    assert "Traceback" not in ended.err
    assert re.search(
        rf"^worldsize: rank \d of 2 on \S+ failed: out of GPU memory .*{BATCH}; ddp on 2 rank\(s\) in fp32; .* "
        r"Do: lower micro_batch .*spread the model over more ranks \(fsdp, --tp, --pp\).*; log: \S+$",
        ended.err,
        re.MULTILINE,
    ), ended.err
    events = [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert events[-1]["ending"] == Ending.GPU_MEMORY
    assert "micro_batch 2 of global_batch 8, samples (int64[6]), ddp on 2 rank(s)" in (
        held.by(tmp_path / "run") or ""
    )


def test_of_a_killed_rank_the_launcher_tells_what_it_held(tmp_path: Path) -> None:
    """Exit code 137 can say nothing itself: what the run's folder says of batch, samples and layout stands in its line."""
    (tmp_path / "run").mkdir()
    body = {"config": {"micro_batch": 2, "global_batch": 8}, "data": {"types": "(int64[6])"}}
    (tmp_path / "run" / "run.json").write_text(json.dumps(body), encoding="utf-8")
    began = {"event": "start", "layout": {"strategy": "ddp", "ranks": 2}}
    (tmp_path / "run" / "events.jsonl").write_text(json.dumps(began) + "\n", encoding="utf-8")
    program = script(
        tmp_path,
        """
        from worldsize.runtime import report
        from pathlib import Path
        report.began(Path("run"))
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    ended = command(program, cwd=tmp_path)
    assert ended.code == failure.SIGNALLED + 9
    assert "killed by SIGKILL" in ended.err
    assert (
        "it held micro_batch 2 of global_batch 8, samples (int64[6]), ddp on 2 rank(s): lower the micro-batch"
        in ended.err
    )


def _here() -> str:
    from tests.examples.programs import ROOT

    return str(ROOT)
