"""Projections in eight bits: what is converted, what is refused, and that checkpoints know nothing of it. CPUs emulate them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import worldsize as ws
from tests.pools import pool
from tests.recipes.llm import folders
from worldsize.checkpoint.weights import read_weights
from worldsize.errors import ConfigError
from worldsize.recipes.llm import fp8, shape
from worldsize.recipes.llm.config import LLMConfig
from worldsize.recipes.llm.model import Decoder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose sizes are multiples of 16."""
    place = tmp_path_factory.mktemp("llama")
    folders.folder(place, num_hidden_layers=2, num_key_value_heads=4)
    return place


def emulated(scaling: str = "tensorwise") -> fp8.Eight:
    """As a GPU rounds."""
    return fp8.Eight(scaling, gathered=True, emulated=True)


def fitted(
    run_dir: Path, build: Callable[[], Decoder], eight: fp8.Eight | None, *, strategy: str, steps: int, **options: Any
) -> tuple[list[float], torch.nn.Module]:
    """Train up to a step, with projections in eight bits where that is given; the losses, and the model."""

    def made() -> torch.nn.Module:
        return eight.convert(build(), print) if eight else build()

    run = ws.Run(
        run_dir, global_batch=4, micro_batch=2, duration=f"{steps}st", strategy=strategy, precision="bf16", device="cpu",
        saving=ws.Saving(every=None),
    )  # fmt: skip
    model = run.model(made, init="meta", ready=eight.ready if eight else None, **options)
    run.optimizer(
        lambda placed: torch.optim.AdamW([each for each in placed.parameters() if each.requires_grad], 1e-2),
        model,
        clip=1.0,
    )
    rows = torch.arange(24 * 16).view(24, 16) % 7 + 3
    found = []
    for step in run.steps(list(rows), count=lambda batch: {"tokens": float(batch.numel())}):
        if eight:
            eight.moved(model)
        for tokens in step.micro_batches:
            step.backward(share=model(tokens, tokens.roll(-1, 1)).sum() / step.totals["tokens"], of="tokens")
        step.update()
        found.append(float(step.loss))
    return found, model


def trained(run_dir: Path, folder: Path, strategy: str, steps: int, scaling: str | None) -> list[float]:
    """All weights, in eight bits where a scaling is named; the losses."""
    eight = emulated(scaling) if scaling else None
    return fitted(run_dir, lambda: Decoder(shape.read(folder)), eight, strategy=strategy, steps=steps)[0]


def test_a_run_goes_on_from_eight_bits_to_sixteen_and_back(tmp_path: Path, folder: Path) -> None:
    """Sharded and gathered in eight bits, then two copies in bf16, then eight again; its checkpoints hold what bf16's do."""
    pytest.importorskip("torchao")
    losses: list[float] = []
    for strategy, steps, scaling in (("fsdp", 3, "tensorwise"), ("ddp", 5, None), ("fsdp", 7, "tensorwise")):
        losses += pool(2).run(trained, tmp_path, folder, strategy, steps, scaling)[0]
        kept = read_weights(tmp_path, prefix="model/")
        assert {name: value.shape for name, value in kept.items()} == {
            name: value.shape for name, value in Decoder(shape.read(folder)).state_dict().items()
        }
        assert {value.dtype for value in kept.values()} == {torch.float32}
        for name in ("gate_proj", "up_proj"):  # none was taken for another
            assert not torch.equal(
                kept[f"model.layers.0.mlp.{name}.weight"], kept[f"model.layers.1.mlp.{name}.weight"]
            )
    assert len(losses) == 7
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.matrix
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_eight_bits_learn_as_sixteen_do(tmp_path: Path, folder: Path, scaling: str) -> None:
    """Within 5% of each loss, the bound that GPUs have for bf16, where a loss falls to a sixth in six steps."""
    pytest.importorskip("torchao")
    wanted = pool(1).run(trained, tmp_path / "sixteen", folder, "single", 6, None)[0]
    for strategy, ranks in (("single", 1), ("ddp", 2), ("fsdp", 2), ("hsdp", 2)):
        found = pool(ranks).run(trained, tmp_path / strategy, folder, strategy, 6, scaling)[0]
        assert found == pytest.approx(wanted, rel=0.05)


def test_head_embedding_and_norms_stay_as_they_are(folder: Path) -> None:
    """Only projections of layers change, and no name does."""
    pytest.importorskip("torchao")
    plain = Decoder(shape.read(folder))
    names = list(plain.state_dict())
    made = emulated().convert(plain, print)
    changed = {name for name, module in made.named_modules() if type(module).__name__ == "Projection"}
    assert len(changed) == 2 * 7
    assert all(name.startswith("model.layers.") for name in changed)
    assert list(made.state_dict()) == names


def test_fresh_weights_are_those_of_the_model(folder: Path) -> None:
    """The same spread, under the same random key."""
    pytest.importorskip("torchao")
    made = emulated().convert(Decoder(shape.read(folder)), print)
    layer: Any = made.model.layers[0]
    layer.mlp.up_proj.reset_parameters()
    assert layer.mlp.up_proj.weight.detach().std().item() == pytest.approx(made.shape.initial, rel=0.1)


def test_sizes_that_do_not_fit_are_left_and_told(tmp_path: Path) -> None:
    """By name; none at all is refused."""
    pytest.importorskip("torchao")
    folders.folder(tmp_path / "some", num_hidden_layers=1, intermediate_size=40)
    said: list[str] = []
    emulated().convert(Decoder(shape.read(tmp_path / "some")), said.append)
    assert "3 of 7 projections stay in bf16" in said[0]
    assert "layers.0.mlp.gate_proj (40 x 32)" in said[0]
    folders.folder(tmp_path / "none", num_hidden_layers=1, hidden_size=40, intermediate_size=40)
    with pytest.raises(ConfigError, match="no projection has sizes that are multiples of 16"):
        emulated().convert(Decoder(shape.read(tmp_path / "none")), print)


def test_who_cannot_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchao, without a GPU, with an older one, under a layout that cannot."""
    config = LLMConfig.of({"precision": "fp8"})
    monkeypatch.setattr(fp8, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"worldsize\[fp8\]"):
        fp8.of(config, GPU)
    monkeypatch.setattr(fp8, "find_spec", lambda _: True)
    with pytest.raises(ConfigError, match=r"compute capability 8\.9"):
        fp8.of(config, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ConfigError, match=r"A100: 8\.0"):
        fp8.of(config, GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with pytest.raises(ConfigError, match="single, ddp, fsdp and hsdp"):
        fp8.of(LLMConfig.of({"precision": "fp8", "strategy": "zero1"}), GPU)
    with pytest.raises(ConfigError, match="precision and model_parallel_size exclude each other"):
        LLMConfig.of({"precision": "fp8", "model_parallel_size": "2"})


def test_nothing_is_asked_of_other_precisions() -> None:
    """Nor is torchao looked for."""
    assert fp8.of(LLMConfig.of({"precision": "bf16"}), torch.device("cpu")) is None
