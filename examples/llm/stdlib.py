"""A small language model from nothing: the source of Python's standard library, which every machine has.

python stdlib.py prepare work           # tokenizer, shape and data from the sources that lie here
worldsize run --nproc-per-node 2 train.py -c work/pretrain.yaml
python stdlib.py score work             # perplexity on files that were kept back, beside that of word counts
worldsize llm export work/runs/pretrain work/pretrained --dtype fp32
worldsize run --nproc-per-node 2 train.py -c work/finetune.yaml
worldsize llm generate work/runs/finetune "def read_text(self, encoding=None):"
"""

from __future__ import annotations

import ast
import json
import math
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCABULARY, LENGTH = 2048, 256
SHAPE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": 128,
    "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "initializer_range": 0.05, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
SETTINGS = {"max_seq_len": LENGTH, "global_batch": 16, "micro_batch": 4, "precision": "fp32", "log_steps": 25}
PRETRAIN = {"from_scratch": True, "train_steps": 300, "eval_steps": 150, "lr": 3e-3, "warmup_steps": 20}
FINETUNE = {"train_steps": 60, "eval_steps": 60, "lr": 1e-3, "warmup_steps": 5}


def prepare(work: Path) -> None:
    """Write tokenizer, shape, data and settings."""
    sources = [path.read_text(encoding="utf-8", errors="ignore") for path in files()]
    back = [text for index, text in enumerate(sources) if index % 20 == 0]
    learnt = [text for index, text in enumerate(sources) if index % 20]
    model = work / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(SHAPE, indent=2), encoding="utf-8")
    _tokenizer(learnt).save_pretrained(model)
    _lines(work / "train.jsonl", ({"text": text} for text in learnt))
    _lines(work / "kept.jsonl", ({"text": text} for text in back))
    _lines(work / "docs.jsonl", (pair for text in learnt for pair in described(text)))
    _lines(work / "kept-docs.jsonl", (pair for text in back for pair in described(text)))
    _settings(work, "pretrain", PRETRAIN, init_ckpt="model", data_path="train.jsonl", eval_data="kept.jsonl")
    _settings(work, "finetune", FINETUNE, init_ckpt="pretrained", data_path="docs.jsonl", eval_data="kept-docs.jsonl")


def files() -> list[Path]:
    """Python's own modules, without its tests and packages that were installed beside them."""
    root = Path(sysconfig.get_path("stdlib"))
    apart = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"}
    return sorted(path for path in root.rglob("*.py") if apart.isdisjoint(path.relative_to(root).parts))


def described(text: str) -> Iterator[dict[str, str]]:
    """Functions with a docstring: the line that begins one, and its first line of text."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (said := ast.get_docstring(node)):
            head = lines[node.lineno - 1].strip()
            if head.endswith(":"):
                yield {"prompt": f"{head}\n", "completion": said.splitlines()[0]}


def score(work: Path) -> tuple[float, float]:
    """Perplexity of the trained model on the files that were kept back, and that of counts of single tokens."""
    rows = [json.loads(line) for line in (work / "runs" / "pretrain" / "metrics.jsonl").read_text().splitlines()]
    trained = next(row["eval_perplexity"] for row in reversed(rows) if "eval_perplexity" in row)
    return trained, unigram(work)


def unigram(work: Path) -> float:
    """Perplexity of the kept files under how often each token is seen in the others (each seen once more than it was)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    counts = Counter(dict.fromkeys(range(VOCABULARY), 1))
    for tokens in _tokens(tokenizer, work / "train.jsonl"):
        counts.update(tokens)
    whole = sum(counts.values())
    kept = [token for tokens in _tokens(tokenizer, work / "kept.jsonl") for token in tokens[1:]]
    return math.exp(-sum(math.log(counts[token] / whole) for token in kept) / len(kept))


def _tokens(tokenizer: Any, path: Path) -> Iterator[list[int]]:
    with path.open(encoding="utf-8") as stream:
        for line in stream:
            yield [*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id]


def _tokenizer(texts: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    bare.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bare, bos_token="<s>", eos_token="</s>")  # noqa: S106 - tokens of another kind


def _lines(path: Path, records: Iterator[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def _settings(work: Path, name: str, own: dict[str, Any], **places: str) -> None:
    paths = {key: str(work.resolve() / value) for key, value in places.items()}
    values = {**SETTINGS, **own, **paths, "output_dir": str(work.resolve() / "runs" / name)}
    # JSON is YAML too.
    text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items())
    (work / f"{name}.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    action, place = sys.argv[1], Path(sys.argv[2])
    if action == "prepare":
        prepare(place)
    else:
        trained, counted = score(place)
        print(f"perplexity {trained:.1f}; by counts of single tokens {counted:.1f}")
