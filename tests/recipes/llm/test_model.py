from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recipes.llm import folders
from worldsize.errors import ConfigError
from worldsize.recipes.llm import attention, losses, shape
from worldsize.recipes.llm.model import Decoder, Norm, Ways

if TYPE_CHECKING:
    from pathlib import Path

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("llama", {"num_key_value_heads": 4}),
    "llama 3": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "head_dim": 16}),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3}),
    "llama 3.2, tied": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, yarn of two scales": ("llama", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 5}),
    "qwen 2": ("qwen2", {}),
    "qwen 2, some windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    "qwen 3": ("qwen3", {"head_dim": 16}),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "smollm 3": ("smollm3", {"no_rope_layer_interval": 2}),
}


def ours(model: Any, config: dict[str, Any], ways: Ways | None = None) -> Decoder:
    """The native decoder with the weights of transformers' model."""
    decoder = Decoder(shape.of(config), ways).eval()
    decoder.load_state_dict(model.state_dict())
    return decoder


def written(model: Any) -> dict[str, Any]:
    """What config.json says of it."""
    found: dict[str, Any] = json.loads(model.config.to_json_string())
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str) -> None:
    """Each family, beyond the original length and the window: float32, 1e-5 relative."""
    family, settings_ = FAMILIES[name]
    model = folders.made(family, **settings_)
    tokens = torch.randint(0, 160, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, found = model(tokens).logits, ours(model, written(model))(tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=float(1e-5 * wanted.abs().max()))


SIZES = st.fixed_dictionaries(
    {
        "num_key_value_heads": st.sampled_from([1, 2, 4]),
        "head_dim": st.sampled_from([4, 8, 12]),
        "num_hidden_layers": st.integers(1, 3),
        "intermediate_size": st.integers(8, 40),
        "rms_norm_eps": st.sampled_from([1e-6, 1e-5]),
        "tie_word_embeddings": st.booleans(),
        "rope_parameters": st.builds(lambda base: {"rope_type": "default", "rope_theta": base}, st.floats(1e2, 1e6)),
    }
)


@settings(max_examples=15)
@given(st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]), SIZES)
def test_random_shapes(family: str, sizes: dict[str, Any]) -> None:
    """Any sizes of any family, and the number of parameters."""
    model = folders.made(family, **sizes)
    decoder = ours(model, written(model))
    assert decoder.shape.parameters == sum(value.numel() for value in model.parameters())
    tokens = torch.randint(0, 160, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, found = model(tokens).logits, decoder(tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=float(1e-5 * wanted.abs().max()))


def test_older_files_say_the_same() -> None:
    """rope_theta and rope_scaling in place of rope_parameters; what is null is none."""
    config = written(folders.made("llama", rope_parameters=LLAMA3))
    scaling = dict(config.pop("rope_parameters"))
    old = {**config, "rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    assert shape.of(old).rotary == shape.of({**config, "rope_parameters": LLAMA3}).rotary
    mistral = written(folders.made("mistral"))
    assert shape.of({**mistral, "sliding_window": None}).windows == (None,) * 4
    assert (
        shape.of({name: value for name, value in mistral.items() if name != "sliding_window"}).windows == (4096,) * 4
    )


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "rope_type='longrope'"),
    ],
)
def test_what_is_not_computed_is_refused(change: dict[str, Any], found: str) -> None:
    """With the other way to take."""
    with pytest.raises(ConfigError, match=found) as caught:
        shape.of({**written(folders.made("llama")), **change})
    assert "--model_impl transformers" in str(caught.value)


def test_a_folder_without_config_is_said(tmp_path: Path) -> None:
    """With what is there."""
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ConfigError, match=r"no config\.json.*weights\.bin"):
        shape.read(tmp_path)


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("weights", ["one", "each its own"])
def test_losses_in_chunks_are_the_plain_ones(rows: int, weights: str) -> None:
    """Values and gradients, for a mean and for weights of any kind; ignored positions count for nothing."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 9, 8, dtype=torch.float64, generator=draw)
    head = torch.randn(11, 8, dtype=torch.float64, generator=draw)
    labels = torch.randint(0, 11, (3, 9), generator=draw)
    labels[0, :4] = losses.IGNORED
    outer = torch.rand(3, 9, dtype=torch.float64, generator=draw) if weights == "each its own" else torch.tensor(0.3)
    found = []
    for way in (losses.plain, partial(losses.chunked, rows=rows)):
        states, weight = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        values = way(states, weight, labels, scale=0.5)
        (values * outer).sum().backward() if weights == "each its own" else (values.sum() * outer).backward()
        found.append((values.detach(), states.grad, weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert found[0][0][0, :4].abs().sum() == 0


def test_losses_in_chunks_hold_few_logits() -> None:
    """The largest tensor that is made is a chunk's."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            out = func(*args, **(kwargs or {}))
            Largest.size = max(Largest.size, out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    hidden, head = torch.randn(1, 512, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    labels = torch.randint(0, 1000, (1, 512))
    with Largest():
        losses.chunked(hidden, head, labels, rows=32).sum().backward()
    assert Largest.size == 32 * 1000


@pytest.mark.parametrize("window", [None, 3])
def test_documents_do_not_see_each_other(window: int | None) -> None:
    """A row of two documents gives what each gives alone."""
    model = folders.made("mistral", sliding_window=window)
    decoder = ours(model, written(model))
    first, second = (
        torch.randint(0, 160, (1, size), generator=torch.Generator().manual_seed(size)) for size in (7, 9)
    )
    row = torch.cat((first, second), dim=1)
    positions = torch.cat((torch.arange(7), torch.arange(9)))[None]
    documents = torch.tensor([[0] * 7 + [1] * 9])
    with torch.no_grad():
        found = decoder(row, None, positions, documents)
        wanted = torch.cat((decoder(first), decoder(second)), dim=1)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["sdpa", "math"])
def test_kernels_agree(name: str) -> None:
    """Every kernel of this device."""
    model = folders.made("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=2)
    tokens = torch.randint(0, 160, (2, 16), generator=torch.Generator().manual_seed(1))
    decoder = ours(model, written(model), Ways(attention.kernel(name, torch.device("cpu"), 8)))
    with torch.no_grad():
        torch.testing.assert_close(decoder(tokens), model(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_norms_are_one_operation_or_several(monkeypatch: pytest.MonkeyPatch, *, fused: bool) -> None:
    """As `--use_fused_ops` says; the numbers are the same."""
    model = folders.made("qwen3")
    decoder, plain, calls = ours(model, written(model), Ways(fused=fused)), torch.rms_norm, list[int]()

    def noted(*of: Any) -> torch.Tensor:
        calls.append(1)
        return plain(*of)

    monkeypatch.setattr(torch, "rms_norm", noted)
    tokens = torch.randint(0, 160, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(decoder(tokens), model(tokens).logits, rtol=1e-5, atol=1e-5)
    norms = sum(isinstance(each, torch.nn.RMSNorm) for each in decoder.modules())
    assert len(calls) == (norms if fused else 0)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.float64])
def test_norms_by_several_operations_round_as_one(kind: torch.dtype) -> None:
    """They compute in float32 at least, and give what they were given."""
    states = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(kind)
    one, several = (Norm(32, 1e-6, Ways(fused=fused)).to(kind)(states) for fused in (True, False))
    torch.testing.assert_close(one, several)


def test_a_kernel_that_is_not_here_is_refused() -> None:
    """With the device."""
    with pytest.raises(ConfigError, match="needs CUDA"):
        attention.kernel("cudnn", torch.device("cpu"), 64)
    with pytest.raises(ConfigError, match="choose one of auto"):
        attention.kernel("none", torch.device("cpu"), 64)
    with pytest.raises(ConfigError, match="heads of at least 16"):
        attention.kernel("flex", torch.device("cuda"), 8)


def test_narrow_heads_are_packed_with_a_mask() -> None:
    """flex_attention cannot compute them on CUDA."""
    narrow, wide = (attention.kernel("auto", torch.device("cuda"), size) for size in (8, 16))
    documents = torch.zeros(1, 4, dtype=torch.int64)
    assert isinstance(narrow.view(4, documents, torch.device("cpu")), attention.Masked)
    assert isinstance(wide.view(4, documents, torch.device("cpu")), attention.Blocks)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_are_the_whole_model(stages: int) -> None:
    """One after another they compute what it does."""
    model = folders.made("llama", num_hidden_layers=5)
    decoder = ours(model, written(model))
    tokens = torch.randint(0, 160, (2, 8), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    value: Any = (tokens, labels)
    with torch.no_grad():
        for stage in decoder.pipeline_stages(stages):
            value = stage(*value)
        assert torch.equal(value, decoder(tokens, labels))
