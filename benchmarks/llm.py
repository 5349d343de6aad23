"""Room: tokens a second of `worldsize llm train` on all GPUs, beside torchtitan's, each at the best setting that was found."""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import measure

if TYPE_CHECKING:
    from collections.abc import Callable

TARGET = 1 / 1.12
"""Ratio of times: at least 1.12 times as many tokens."""
LENGTH = 8192
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "max_position_embeddings": LENGTH, "rope_theta": 500000.0, "hidden_act": "silu",
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "8B": {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "3B": {**LLAMA, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24},
    "1B": {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "tiny": {**LLAMA, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 8, "max_position_embeddings": 64},
}  # fmt: skip
OURS = ["compile=true,micro_batch=2", "compile=true"]
"""The first where the memory allows it."""
PEER = "--compile.enable --activation_checkpoint.mode none"
FLAVORS = "worldsize_shapes"
_SPEED = re.compile(r"tps: ([\d,]+)")


def ours(shape: str, asked: argparse.Namespace, settings: str) -> dict[str, float]:
    """Median tokens a second and device of our recipe, and its peak of memory."""
    import recipe

    wanted = {"micro_batch": 1, "precision": "bf16", "lr": "3e-4", "warmup_steps": 200, **recipe.given(settings)}
    wanted.setdefault("global_batch", asked.ranks * int(wanted["micro_batch"]))
    return recipe.speed(shape, wanted, asked, asked.ranks, str(wanted.pop("strategy", "fsdp")))


def prepare(place: Path, shape: dict[str, Any], length: int) -> None:
    """A folder with the shape alone, and random tokens."""
    import numpy as np

    for name in ("model", "tokens"):
        (place / name).mkdir()
    (place / "model" / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    draw = np.random.default_rng(0)
    np.save(place / "tokens" / "tokens.npy", draw.integers(0, shape["vocab_size"], 4096 * length, dtype=np.uint32))


def torchtitan(shape: str, asked: argparse.Namespace, flags: str) -> dict[str, float]:
    """Median tokens a second and device of torchtitan's own trainer."""
    with tempfile.TemporaryDirectory() as folder:
        assets = Path(folder) / "tests" / "assets"
        texts(assets)
        words = [
            "--model.hf_assets_path", "tests/assets/tokenizer", "--training.dataset", "c4_test",
            "--training.local_batch_size", "1", "--optimizer.lr", "3e-4", "--lr_scheduler.warmup_steps", "200", *flags.split(),
        ]  # fmt: skip
        text = peer(Path(folder), shape, asked, words)
    seen = [float(found.replace(",", "")) for found in _SPEED.findall(text)][asked.steps // 2 :]
    return {"tokens_per_second_per_device": statistics.median(seen)}


def peer(home: Path, shape: str, asked: argparse.Namespace, words: list[str], more: str = "") -> str:
    """What torchtitan's trainer prints, a line each step.

    Args:
        home: the folder that it runs in.
        shape: of `SHAPES`.
        asked: for how many ranks, steps, tokens in a row, seconds.
        words: more flags.
        more: Python that it imports, after our shapes.
    """
    (home / f"{FLAVORS}.py").write_text(flavors() + more, encoding="utf-8")
    common = [
        "--model.name", "llama3", "--model.flavor", shape, "--training.seq_len", str(asked.length),
        "--training.steps", str(asked.steps), "--training.max_norm", "1.0", "--metrics.log_freq", "1",
        "--experimental.custom_import", FLAVORS,
    ]  # fmt: skip
    launch = measure.torchrun("--standalone", "--nproc-per-node", str(asked.ranks), "--local-ranks-filter", "0")
    return run([*launch, "-m", "torchtitan.train", *common, *words], asked.timeout, cwd=str(home))


def flavors() -> str:
    """A module that makes shapes known to torchtitan which it does not have. Its MLP is 8/3 of `dim`, times a factor."""
    lines = ["from torchtitan.models.llama3 import TransformerModelArgs, llama3_args"]
    for name, shape in SHAPES.items():
        dim, mlp = shape["hidden_size"], shape["intermediate_size"]
        sizes = {
            "dim": dim, "n_layers": shape["num_hidden_layers"], "n_heads": shape["num_attention_heads"],
            "n_kv_heads": shape["num_key_value_heads"], "vocab_size": shape["vocab_size"], "rope_theta": shape["rope_theta"],
            "multiple_of": math.gcd(mlp, 1024), "ffn_dim_multiplier": (mlp - 1) / int(8 * dim / 3),
        }  # fmt: skip
        lines.append(f"llama3_args.setdefault({name!r}, TransformerModelArgs(**{sizes!r}))")
    return "\n".join(lines) + "\n"


def texts(assets: Path) -> None:
    """Text and a small tokenizer where torchtitan's tests have theirs."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    lines = [json.dumps({"text": path.read_text(encoding="utf-8", errors="ignore")}) for path in sources]
    for name in ("c4_test", "tokenizer"):
        (assets / name).mkdir(parents=True)
    (assets / "c4_test" / "data.json").write_text("\n".join(lines * 4) + "\n", encoding="utf-8")
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = ["<|begin_of_text|>", "<|end_of_text|>"]
    bare.train([str(path) for path in sources[:20]], trainers.BpeTrainer(vocab_size=2048, special_tokens=words))
    bare.save(str(assets / "tokenizer" / "tokenizer.json"))
    said = {"bos_token": words[0], "eos_token": words[1], "tokenizer_class": "PreTrainedTokenizerFast"}
    (assets / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(said), encoding="utf-8")


def run(command: list[str], timeout: float, cwd: str | None = None) -> str:
    """Run to the end; what it printed. Raises RuntimeError with its end where it failed."""
    more = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        command, timeout=timeout, cwd=cwd, env=measure.environment(**more), text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout


def fastest(name: str, tried: list[str], measured: Callable[[str], dict[str, float]]) -> float:
    """The most tokens a second of several settings. Those that fail are told, and left out."""
    speeds = []
    for settings in tried:
        try:
            found = measured(settings)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"  {name} {settings} left out: {str(error)[-2000:]}", file=sys.stderr, flush=True)
        else:
            print(f"  {name} {settings}: {found}", file=sys.stderr, flush=True)
            speeds.append(found["tokens_per_second_per_device"])
    if not speeds:
        raise RuntimeError(f"no setting of {name} works")
    return max(speeds)


def main() -> None:
    """Measure and print."""
    import torch

    count = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8B" if count else "tiny", choices=list(SHAPES))
    parser.add_argument("--ranks", type=int, default=count or 2)
    parser.add_argument("--length", type=int, default=LENGTH if count else 64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument(
        "--ours", action="append", help="Settings of ours, as name=value,...; several times to try several."
    )
    parser.add_argument(
        "--peer", action="append", help="Flags of torchtitan; several times to try several; none: ''."
    )
    asked = parser.parse_args()
    tried = asked.ours or (OURS if count else ["precision=fp32,strategy=ddp"])
    best: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(asked.rounds):
        best["ours"].append(fastest("ours", tried, partial(ours, asked.shape, asked)))
        if find_spec("torchtitan") is not None and count:
            best["peer"].append(fastest("torchtitan", asked.peer or [PEER], partial(torchtitan, asked.shape, asked)))
    times = {which: [1e6 / speed for speed in speeds] for which, speeds in best.items()}
    what = f"a million tokens on a device, llama {asked.shape}, {asked.ranks} ranks, length {asked.length}"
    if times["peer"]:
        found = measure.compare(what, times["ours"], times["peer"], unit="s", against="torchtitan", target=TARGET)
    else:
        print("not measured: torchtitan: not installed, or no GPU", flush=True)
        found = measure.Comparison(what, statistics.median(times["ours"]), None, "s", "nobody")
    measure.report([found])


if __name__ == "__main__":
    main()
