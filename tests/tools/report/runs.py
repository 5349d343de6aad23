"""Room: a real training of two ranks that is killed twice and ends well, started by `worldsize run`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
KILLED = (7, 17)
"""The steps in which attempts 0 and 1 are killed: a checkpoint is written after each five."""
TOTAL, RESUMED = 24, (5, 15)

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import torch
import worldsize as ws

run = ws.Run(sys.argv[1], global_batch=8, micro_batch=2, duration="24st", saving=ws.Saving(every="5st"), device="cpu")
model = run.model(lambda: torch.nn.Linear(4, 1))
optimizer = run.optimizer(lambda m: torch.optim.AdamW(m.parameters(), 0.05), model, clip=1.0)
run.schedule(optimizer, lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, run.total_steps))
x = torch.arange(96.0).view(24, 4) / 96
data = torch.utils.data.TensorDataset(x, x.sum(1))
killed = dict(enumerate(map(int, sys.argv[2:]))).get(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
for step in run.steps(data):
    for a, b in step.micro_batches:
        step.backward((model(a).squeeze(1) - b) ** 2)
    time.sleep(0.03 if run.comm.rank == 1 else 0.01)
    step.update()
    if step.index == killed and run.comm.rank == 0:
        while not Path(sys.argv[1], "checkpoints", f"step-{killed // 5 * 5:08d}").is_dir():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if step.ends_epoch:
        run.log(run.evaluate(lambda batch: {"error": (model(batch[0]).squeeze(1) - batch[1]).abs()}, data))
"""


def killed_twice(folder: Path) -> Path:
    """The run folder."""
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    words = ["run", "--nproc-per-node", "2", "--max-restarts", "2", "train.py", "killed", *map(str, KILLED)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "worldsize", *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "killed"
