"""Room: every benchmark that this machine can run, one after another, and a word about each that it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path

import measure

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Benchmark:
    """A script of this folder and what it needs.

    Attributes:
        script: its file.
        gpus: CUDA devices that its targets are meant for.
    """

    script: str
    gpus: int = 0


ALL = (
    Benchmark("commands.py"),
    Benchmark("launch.py"),
    Benchmark("order.py"),
    Benchmark("overhead.py"),
    Benchmark("restart.py"),
    Benchmark("step.py", gpus=2),
    Benchmark("save.py", gpus=2),
    Benchmark("lora.py", gpus=1),
    Benchmark("weak_scaling.py", gpus=2),
    Benchmark("llm_save.py", gpus=1),
    Benchmark("plan.py", gpus=1),
    Benchmark("curve.py", gpus=1),
    Benchmark("engines.py", gpus=2),
    Benchmark("llm.py", gpus=2),
)


def devices() -> int:
    """CUDA devices here, asked in another process: this one starts others and needs none itself."""
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


def refusal(benchmark: Benchmark, gpus: int) -> str | None:
    """Why it cannot run here, or None."""
    if find_spec("torch") is None:
        return "torch is not installed"
    if gpus < benchmark.gpus:
        return (
            f"needs {benchmark.gpus} CUDA devices, {gpus} here (by hand, a trial on CPUs: python {benchmark.script})"
        )
    return None


def measured(script: str) -> tuple[int, list[measure.Comparison]]:
    """Run one; its exit code, and what it compared."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        environ = {**os.environ, measure.RESULTS: str(results)}
        code = subprocess.run([sys.executable, str(HERE / script)], env=environ, check=False).returncode
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    names = [field.name for field in fields(measure.Comparison)]
    return code, [measure.Comparison(**{name: json.loads(line)[name] for name in names}) for line in lines]


def main() -> int:
    """Run them, print the summary; 1 where one failed to run. A missed target is told, and is no failure."""
    gpus = devices() if find_spec("torch") else 0
    refused = {each.script: why for each in ALL if (why := refusal(each, gpus))}
    summary: list[measure.Comparison] = []
    failed = []
    for benchmark in ALL:
        if benchmark.script not in refused:
            print(f"== {benchmark.script}", flush=True)
            code, found = measured(benchmark.script)
            summary += found
            failed += [benchmark.script] * bool(code)
    print("\n== summary")
    for each in summary:
        print(measure.line(each))
    for script, why in refused.items():
        print(f"not run: {script}: {why}")
    for script in failed:
        print(f"FAILED: {script}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
