"""Room: the loss of each step of `worldsize llm train` beside torchtitan's: the same weights at first, the same tokens.

How far bf16 carries two runs of one trainer apart is seen from a second run of each, compiled where the first is not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import llm
import numpy as np
import recipe

SCALING: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Of the rotary embedding: torchtitan has no Llama without it."""
LR, BETAS = 3e-4, (0.9, 0.95)
BOUND = 1.5
"""Between the trainers, of what lies between two runs of one: the mean over steps of the distance of two losses."""
_LOSS = re.compile(r"step:\s+(\d+).*?loss:\s+([\d.]+)")
ROWS = '''
import numpy
import torch
import torchtitan.models.llama3 as llama3
from torchtitan.components.dataloader import BaseDataLoader


class Rows(BaseDataLoader):
    """Rows of tokens in the order of a file, each rank its share of a step."""

    def __init__(self, *, dp_world_size, dp_rank, tokenizer, job_config):
        rows = torch.from_numpy(numpy.load("rows.npy").astype("int64"))
        size = job_config.training.local_batch_size
        self.batches = rows.unflatten(0, (-1, dp_world_size, size))[:, dp_rank]

    def __iter__(self):
        for batch in self.batches:
            yield {"input": batch[:, :-1]}, batch[:, 1:]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


made = llama3.get_train_spec


def spec():
    found = made()
    found.build_dataloader_fn, found.build_tokenizer_fn = Rows, None
    return found


llama3.get_train_spec = spec
'''
"""What torchtitan is given beside the shapes: our rows in place of its data."""


def folder(place: Path, shape: dict[str, Any]) -> None:
    """A Hugging Face folder with weights, drawn as transformers does."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    known = {name: value for name, value in shape.items() if name not in ("rope_theta", "architectures")}
    rope = {"rope_type": "llama3", "rope_theta": shape["rope_theta"], **SCALING}
    known |= {"max_position_embeddings": 2 * SCALING["original_max_position_embeddings"]}
    config = AutoConfig.for_model(**known, rope_parameters=rope, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).save_pretrained(place)


def text(place: Path, rows: int, length: int) -> np.ndarray[Any, Any]:
    """The bytes of Python's standard library as tokens, in a folder for ours; as rows of length + 1 for whoever asks."""
    place.mkdir()
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    whole = b"\n".join(path.read_bytes() for path in sources)[: rows * length + 1]
    tokens = np.frombuffer(whole, np.uint8).astype(np.uint32)
    np.save(place / "tokens.npy", tokens)
    starts = range(0, len(tokens) - length, length)
    return np.stack([tokens[start : start + length + 1] for start in starts])


def ours(asked: argparse.Namespace, place: Path, name: str, settings: str) -> dict[int, float]:
    """The loss by step, from 1."""
    words = {
        "max_seq_len": asked.length, "micro_batch": asked.batch, "global_batch": asked.batch * asked.ranks, "lr": LR,
        "weight_decay": 0.0, "beta1": BETAS[0], "beta2": BETAS[1], "clip": 1.0, "precision": asked.precision,
        "strategy": "fsdp" if asked.ranks > 1 else "single", **recipe.given(settings),
    }  # fmt: skip
    os.environ["WORLDSIZE_LEDGER"] = str(place / f"{name}-ledger")
    run = recipe.until(
        place,
        words,
        ranks=asked.ranks,
        enough=lambda run: len(losses(run)) >= asked.steps,
        timeout=asked.timeout,
        name=name,
    )
    return dict(enumerate(losses(run)[: asked.steps], start=1))


def losses(run: Path) -> list[float]:
    """Of each step, in order."""
    return [row["loss"] for row in recipe.rows(run / "metrics.jsonl") if "loss" in row]


def order(ledger: Path, steps: int) -> list[int]:
    """Which rows each step had, one after another."""
    ids: dict[int, list[int]] = {}
    for path in sorted(ledger.glob("rank-*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            ids.setdefault(row["step"], []).extend(row["ids"])
    return [each for step in sorted(ids)[:steps] for each in ids[step]]


def torchtitan(asked: argparse.Namespace, place: Path, name: str, flags: str) -> dict[int, float]:
    """The loss by step, from 1."""
    home = place / name
    home.mkdir()
    (home / "rows.npy").symlink_to(place / "rows.npy")
    words = [
        "--model.hf_assets_path", str(place / "model"), "--training.local_batch_size", str(asked.batch),
        "--optimizer.lr", str(LR), "--optimizer.beta1", str(BETAS[0]), "--optimizer.beta2", str(BETAS[1]),
        "--optimizer.weight_decay", "0.0", "--lr_scheduler.warmup_steps", "0", "--lr_scheduler.decay_ratio", "0.0",
        "--checkpoint.enable", "--checkpoint.load_only", "--checkpoint.initial_load_path", str(place / "model"),
        "--checkpoint.initial_load_in_hf", "--activation_checkpoint.mode", "none", *flags.split(), *asked.peer.split(),
    ]  # fmt: skip
    said = llm.peer(home, asked.shape, asked, words, more=ROWS)
    return {int(step): float(loss) for step, loss in _LOSS.findall(re.sub(r"\x1b\[\d+m", "", said))}


def apart(one: dict[int, float], other: dict[int, float]) -> float:
    """The mean over steps of the distance of two losses."""
    assert set(one) == set(other), (sorted(one), sorted(other))
    return float(np.mean([abs(one[step] - other[step]) for step in one]))


def main() -> None:
    """Train, and print the curves one below the other."""
    import torch

    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1B" if cuda else "tiny", choices=list(llm.SHAPES))
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 1)
    parser.add_argument("--length", type=int, default=2048 if cuda else 64)
    parser.add_argument("--batch", type=int, default=4, help="rows of a step on each rank")
    parser.add_argument("--steps", type=int, default=60 if cuda else 12)
    parser.add_argument("--precision", default="bf16" if cuda else "fp32")
    parser.add_argument("--peer", default="", help="more flags of torchtitan")
    parser.add_argument("--timeout", type=float, default=300.0)
    asked = parser.parse_args()
    if find_spec("torchtitan") is None:
        print("not measured: torchtitan: not installed", flush=True)
        return
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        folder(place / "model", llm.SHAPES[asked.shape])
        rows = text(place / "tokens", asked.steps * asked.batch * asked.ranks, asked.length)
        curves = {"ours": ours(asked, place, "ours", "compile=false")}
        np.save(place / "rows.npy", rows[order(place / "ours-ledger", asked.steps)])
        curves["torchtitan"] = torchtitan(asked, place, "peer", "")
        if cuda:
            curves["ours, compiled"] = ours(asked, place, "compiled", "compile=true")
            curves["torchtitan, compiled"] = torchtitan(asked, place, "peer-compiled", "--compile.enable")
    report(curves, f"llama {asked.shape}, {asked.ranks} ranks, {asked.precision}")


def report(curves: dict[str, dict[int, float]], what: str) -> None:
    """Every curve, and how far they are apart."""
    steps = sorted(curves["ours"])
    for number in sorted({*steps[:: max(1, len(steps) // 12)], steps[-1]}):
        losses = ", ".join(f"{name} {curve[number]:.4f}" for name, curve in curves.items())
        print(f"  step {number}: {losses}", flush=True)
    between = apart(curves["ours"], curves["torchtitan"])
    print(f"mean distance of losses, {what}: ours to torchtitan {between:.2e}", flush=True)
    if "ours, compiled" in curves:
        own = apart(curves["ours"], curves["ours, compiled"])
        theirs = apart(curves["torchtitan"], curves["torchtitan, compiled"])
        noise = max(own, theirs)
        print(f"  ours to ours compiled {own:.2e}, torchtitan to torchtitan compiled {theirs:.2e}", flush=True)
        print(f"  {between / noise:.2f} times that, limit {BOUND}  {'met' if between <= BOUND * noise else 'MISSED'}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
