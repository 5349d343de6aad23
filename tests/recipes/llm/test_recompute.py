"""What layers compute again changes what is held, and no number."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from worldsize.errors import ConfigError
from worldsize.recipes.llm import lora, shape
from worldsize.recipes.llm.config import LLMConfig
from worldsize.recipes.llm.measure import Host
from worldsize.recipes.llm.model import Decoder
from worldsize.recipes.llm.modes import Mode
from worldsize.recipes.llm.recompute import Recomputation
from worldsize.strategies.transform import blocks

CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
MODES = ("none", "selective", "selective:2", "full")


def made(mode: str) -> tuple[nn.Module, torch.Tensor]:
    """A decoder with drop-out in its adapters, computed so, and tokens."""
    torch.manual_seed(0)
    adapters = lora.of(LLMConfig.of({"lora_rank": 2, "lora_dropout": 0.3}))
    assert adapters is not None
    model = lora.adapt(Decoder(shape.of(CONFIG)), adapters).double()
    for name, value in model.named_parameters():
        value.requires_grad_()
        if "lora" in name:
            nn.init.normal_(value)
    Recomputation(Mode.parse(mode))(blocks(model), lambda _: nullcontext())
    return model, torch.randint(0, 64, (2, 48))


def passed(mode: str, backend: str | None = None) -> list[float]:
    """Numbers of a pass forward and backward."""
    model, tokens = made(mode)
    if backend:
        torch.compiler.reset()
        for block in blocks(model):
            block.compile(backend=backend, fullgraph=True)
    torch.manual_seed(1)
    loss = model(tokens, tokens).sum()
    loss.backward()
    drawn = float(torch.rand(()))
    return [
        float(loss.detach()),
        drawn,
        *(float(value.grad.norm()) for value in model.parameters() if value.grad is not None),
    ]


@pytest.fixture(scope="module")
def plain() -> list[float]:
    """Nothing computed again."""
    return passed("none")


@pytest.mark.parametrize("mode", MODES[1:])
def test_numbers_are_the_same(mode: str, plain: list[float]) -> None:
    """Losses, all gradients, and what is drawn afterwards; float64, with drop-out."""
    assert len(plain) > 40
    assert passed(mode) == pytest.approx(plain, rel=1e-10)


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("mode", MODES)
def test_compiled_layers_share_their_code(mode: str) -> None:
    """One graph for all layers, two where they differ; recomputation is inside of it."""
    counted: Any = torch._dynamo.utils.counters
    counted.clear()
    passed(mode, "eager" if mode == "none" else "aot_eager")
    assert counted["stats"]["unique_graphs"] == (2 if ":" in mode else 1)
    assert not counted["graph_break"]


def test_less_is_held() -> None:
    """Each mode holds less than the one before it, as counted."""
    needs = []
    for mode in MODES:
        model, tokens = made(mode)
        needs.append(Host(model.parameters()).peak(lambda m=model, t=tokens: m(t, t).sum().backward()))  # type: ignore[misc]
    assert needs == sorted(needs, reverse=True)
    assert needs[-1] < 0.6 * needs[0]


@pytest.mark.parametrize("text", ["some", "selective:0", "selective:x", "full:2"])
def test_other_modes_are_refused(text: str) -> None:
    """With those that there are."""
    with pytest.raises(ConfigError, match="activation_checkpointing"):
        LLMConfig.of({"activation_checkpointing": text})
