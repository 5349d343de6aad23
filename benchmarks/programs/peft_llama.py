"""Room: adapters of a Llama trained by transformers and peft, the loop written as their user writes it. Answers with JSON.

peft_llama.py --folder MODEL --settings adapters=fp32,checkpointing=false,compile=false
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KNOWN = {"adapters": "fp32", "checkpointing": "false", "compile": "false", "attention": "sdpa"}
"""Settings and their defaults.

adapters: what they are held in: fp32, under autocast, which is peft's default; or bf16 without autocast.
checkpointing: activation checkpointing of all layers.
compile: the layers, one by one.
attention: of transformers.
"""


def built(folder: Path, asked: argparse.Namespace, settings: dict[str, str]) -> Any:
    """Frozen random weights in bf16, made on the device, with adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    with DEVICE:
        base = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.bfloat16, attn_implementation=settings["attention"]
        )
    base.config.use_cache = False
    if settings["checkpointing"] == "true":
        base.gradient_checkpointing_enable({"use_reentrant": False})
    lora = LoraConfig(
        r=asked.rank, lora_alpha=2 * asked.rank, lora_dropout=0.0, target_modules=asked.targets.split(","),
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = get_peft_model(base, lora, autocast_adapter_dtype=settings["adapters"] == "fp32")
    if settings["compile"] == "true":
        for layer in base.model.layers:
            layer.compile()
    return model.train()


def steps(model: Any, tokens: torch.Tensor, asked: argparse.Namespace, settings: dict[str, str]) -> list[float]:
    """Seconds of each step."""
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-4, (0.9, 0.95), weight_decay=0.1, fused=True)
    mixed = settings["adapters"] == "fp32"
    marks = [time.perf_counter()]
    for number in range(asked.steps):
        part = tokens[number * asked.batch : (number + 1) * asked.batch].to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=mixed):
            loss = model(input_ids=part, labels=part).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        marks.append(time.perf_counter())
    return [end - begin for begin, end in pairwise(marks)]


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--settings", default="", help=str(KNOWN))
    parser.add_argument("--targets", required=True)
    for name in ("length", "batch", "rank", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    asked = parser.parse_args()
    said = dict(pair.split("=") for pair in asked.settings.split(",") if pair)
    if unknown := said.keys() - KNOWN.keys():
        parser.error(f"unknown settings {', '.join(sorted(unknown))}: of {', '.join(KNOWN)}")
    settings = {**KNOWN, **said}
    torch.manual_seed(0)
    words = json.loads((asked.folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    drawn = np.random.default_rng(0).integers(0, words, (asked.steps * asked.batch, asked.length), dtype=np.int64)
    tokens = torch.from_numpy(drawn)
    model = built(asked.folder, asked, settings)
    tokens = tokens.pin_memory() if DEVICE.type == "cuda" else tokens
    seconds = statistics.median(steps(model, tokens, asked, settings)[asked.steps // 2 :])
    found = {"tokens_per_second_per_device": asked.batch * asked.length / seconds}
    if DEVICE.type == "cuda":
        found["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
