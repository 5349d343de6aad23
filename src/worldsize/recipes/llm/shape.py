"""Room: what a decoder looks like, read from the config.json of a Hugging Face folder. No torch.

One description serves the families that differ by numbers and switches only: grouped-query attention, rotary scalings, biases,
norms of queries and keys, tied embeddings, sliding windows, layers without rotation, multipliers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from worldsize.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "granite", "smollm3")
"""The `model_type`s that the native decoder computes. Others take the generic path."""

ROTARY = ("default", "linear", "llama3", "yarn")
_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "smollm3": {"use_sliding_window": False, "no_rope_layer_interval": 4, "rope_theta": 2_000_000.0, "num_key_value_heads": 4,
                "tie_word_embeddings": True},
}  # fmt: skip
"""What a config.json leaves out where it is the family's own default; see transformers' configuration of each."""
_NOT_BUILT = {"hidden_act": "silu", "attention_dropout": 0.0, "pretraining_tp": 1}


class ForeignError(ConfigError):
    """A model that the native decoder does not compute."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embeddings (Su et al., 2021), and how they are stretched for longer sequences.

    Attributes:
        kind: default; linear (Chen et al., 2023); llama3 (Llama 3.1); yarn (Peng et al., 2023).
        theta: the base of the wavelengths.
        factor: by which lengths grow.
        original: the length before that.
        low, high: llama3: in how many parts of `original` waves are kept or stretched; yarn: beta_slow and beta_fast.
        scale: by which cosines and sines are multiplied; None for what the paper proposes.
        truncate: yarn: whether the range of dimensions is rounded.
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    scale: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's sizes and switches.

    Attributes:
        family: its `model_type`.
        vocabulary, hidden, layers, heads, kv_heads, head_dim, mlp: sizes.
        eps: of the norms.
        rotary: how positions enter.
        positions: the longest sequence that it was made for.
        tied: the head shares the embedding's weight.
        qkv_bias, o_bias, mlp_bias, qk_norm: what layers have.
        windows: for each layer, how many positions back it sees, itself included; None for all.
        rotated: for each layer, whether positions enter.
        embedding_scale, residual_scale, attention_scale, logit_scale: multipliers; attention_scale None for 1/sqrt(head_dim).
        initial: the standard deviation of fresh weights.
        config: the config.json that this was read from.
    """

    family: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    eps: float = 1e-6
    rotary: Rotary = field(default_factory=Rotary)
    positions: int = 2048
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    rotated: tuple[bool, ...] = ()
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float | None = None
    logit_scale: float = 1.0
    initial: float = 0.02
    config: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def parameters(self) -> int:
        """How many numbers it learns."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * queries + 2 * keys)
        biases = (queries + 2 * keys) * self.qkv_bias + self.hidden * self.o_bias
        biases += (2 * self.mlp + self.hidden) * self.mlp_bias
        layer = attention + 3 * self.hidden * self.mlp + biases + 2 * self.hidden + 2 * self.head_dim * self.qk_norm
        ends = self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden
        return self.layers * layer + ends

    @property
    def multiplied(self) -> int:
        """Parameters with which a token's states are multiplied: all but an embedding that is not also the head."""
        return self.parameters - (0 if self.tied else self.vocabulary * self.hidden)

    def flops(self, length: int) -> float:
        """Floating-point operations a token, forward and backward, in sequences of `length`.

        6 for each parameter that is multiplied (the embedding only where it is also the head), and
        12·layers·heads·head_dim·length for attention without regard to causality, as in Chowdhery et al., "PaLM", 2022,
        appendix B, and in torchtitan.
        """
        return 6.0 * self.multiplied + 12.0 * self.layers * self.heads * self.head_dim * length


def read(folder: Path) -> Shape:
    """The shape of the model in a Hugging Face folder.

    Raises:
        ConfigError: there is no config.json, or it is damaged.
        ForeignError: it describes what the native decoder does not compute.
    """
    return of(config(folder))


def config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder. Raises ConfigError where there is none."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        there = ", ".join(sorted(entry.name for entry in folder.iterdir())[:6]) if folder.is_dir() else "no folder"
        raise ConfigError(
            f"{folder} is no folder of a model: it has no config.json",
            found=there,
            do="name one that transformers wrote",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read", found=str(error)) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no description of a model", found=type(found).__name__)
    return found


def of(config: Mapping[str, Any]) -> Shape:
    """The shape that a config.json describes.

    Raises:
        ForeignError: what the native decoder does not compute, with the name and value.
        ConfigError: a size is missing.
    """
    family = config.get("model_type", "")
    if family not in FAMILIES:
        raise _foreign("model_type", family, FAMILIES)
    # What a file sets to null is none, and not the family's default.
    given = {name: value for name, value in {**_DEFAULTS.get(family, {}), **config}.items() if value is not None}
    for name, wanted in _NOT_BUILT.items():
        if given.get(name, wanted) != wanted:
            raise _foreign(name, given[name], (wanted,))
    try:
        return _shape(family, given, config)
    except KeyError as error:
        raise ConfigError(
            "config.json lacks a size of the model", found=str(error), do="see whether it is complete"
        ) from None


def _shape(family: str, given: Mapping[str, Any], config: Mapping[str, Any]) -> Shape:
    heads, hidden, layers = given["num_attention_heads"], given["hidden_size"], given["num_hidden_layers"]
    bias = bool(given.get("attention_bias", False))
    return Shape(
        family, given["vocab_size"], hidden, layers, heads,
        kv_heads=given.get("num_key_value_heads", heads),
        head_dim=given.get("head_dim", hidden // heads),
        mlp=given["intermediate_size"],
        eps=given.get("rms_norm_eps", 1e-6),
        rotary=_rotary(given),
        positions=given.get("max_position_embeddings", 2048),
        tied=bool(given.get("tie_word_embeddings", False)),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias and family != "qwen2",
        mlp_bias=bool(given.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        windows=_windows(family, given, layers),
        rotated=_rotated(family, given, layers),
        embedding_scale=given.get("embedding_multiplier", 1.0),
        residual_scale=given.get("residual_multiplier", 1.0),
        attention_scale=given.get("attention_multiplier"),
        logit_scale=1.0 / given.get("logits_scaling", 1.0),
        initial=given.get("initializer_range", 0.02),
        config=config,
    )  # fmt: skip


def _windows(family: str, given: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = given.get("sliding_window")
    if family == "mistral" and "sliding_window" in given:
        return (window,) * layers
    if not given.get("use_sliding_window", False) or window is None:
        return (None,) * layers
    kinds = given.get("layer_types") or [
        "sliding_attention" if layer >= given.get("max_window_layers", 0) else "full_attention"
        for layer in range(layers)
    ]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rotated(family: str, given: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    if family != "smollm3":
        return (True,) * layers
    every = given["no_rope_layer_interval"]
    return tuple(map(bool, given.get("no_rope_layers") or [(layer + 1) % every for layer in range(layers)]))


def _rotary(given: Mapping[str, Any]) -> Rotary:
    """Older files have rope_theta and rope_scaling, newer ones rope_parameters."""
    said = {**(given.get("rope_scaling") or {}), **(given.get("rope_parameters") or {})}
    kind = said.get("rope_type", said.get("type", "default"))
    if kind not in ROTARY:
        raise _foreign("rope_type", kind, ROTARY)
    if said.get("partial_rotary_factor", given.get("partial_rotary_factor", 1.0)) != 1.0:
        raise _foreign("partial_rotary_factor", said.get("partial_rotary_factor"), (1.0,))
    longest = given.get("max_position_embeddings", 2048)
    original = said.get("original_max_position_embeddings") or longest
    yarn = kind == "yarn"
    return Rotary(
        kind,
        theta=said.get("rope_theta", given.get("rope_theta", 10_000.0)),
        factor=said.get("factor") or (longest / original if yarn else 1.0),
        original=original,
        low=(said.get("beta_slow") or 1) if yarn else said.get("low_freq_factor", 1.0),
        high=(said.get("beta_fast") or 32) if yarn else said.get("high_freq_factor", 4.0),
        scale=_yarn_scale(said),
        truncate=said.get("truncate", True),
    )


def _yarn_scale(said: Mapping[str, Any]) -> float | None:
    """What the file says, or what follows from the two scales of DeepSeek's variant."""
    from math import log

    first, second, factor = said.get("mscale"), said.get("mscale_all_dim"), said.get("factor") or 1.0
    if said.get("attention_factor") is not None or not (first and second) or factor <= 1:
        scale: float | None = said.get("attention_factor")
        return scale
    return float((0.1 * first * log(factor) + 1) / (0.1 * second * log(factor) + 1))


def _foreign(name: str, value: Any, known: tuple[Any, ...]) -> ForeignError:
    return ForeignError(
        f"the native decoder does not compute {name}={value!r}",
        found=f"it knows {', '.join(map(str, known))}",
        do="use --model_impl transformers, which takes any causal language model of transformers (ddp, fsdp, hsdp)",
    )
