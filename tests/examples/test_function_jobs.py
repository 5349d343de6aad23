"""The seed's distributed function on a real Slurm of two nodes: accelerate launch, with its own configurations."""

from __future__ import annotations

import ast
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.examples.programs import PYTHON, ROOT, call

if TYPE_CHECKING:
    from pathlib import Path

    from worldsize.testing.slurm.cluster import Cluster

pytestmark = pytest.mark.slurm
EXAMPLE = ROOT / "examples" / "function_jobs"
LOSSES: dict[str, Any] = {}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.matrix)])
def test_accelerate_starts_one_world_on_two_nodes(slurm: Cluster, tmp_path: Path, kind: str) -> None:
    """With only the import changed; the result of rank 0 comes back, sharded or not with the same losses."""
    folder = tmp_path / "example"
    shutil.copytree(EXAMPLE, folder)
    program = folder / "main.py"
    program.write_text(program.read_text(encoding="utf-8").replace("ddp.yaml", f"{kind}.yaml"), encoding="utf-8")
    words = ("--processes-per-task", "1", "--setup", "export ACCELERATE_USE_CPU=true OMP_NUM_THREADS=1")
    done = call(*PYTHON, "main.py", *words, cwd=folder, env={**slurm.env, "HOME": str(tmp_path)})
    logs = "".join(log.read_text(encoding="utf-8") for log in folder.glob("slurm/*/slurm-*.out"))
    assert done.code == 0, done.text + logs
    found = ast.literal_eval(done.lines[-1])
    assert (found["ranks"], found["parameter"]) == (2, "DTensor" if kind == "fsdp2" else "Parameter"), logs
    assert found["losses"][-1] < found["losses"][0] / 4
    assert LOSSES.setdefault("losses", found["losses"]) == pytest.approx(found["losses"], rel=1e-5)
