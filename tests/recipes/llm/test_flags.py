"""Each setting of a training changes something that can be seen: kernels, what is learnt, what is written and when."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from tests.recipes.llm import folders
from tests.recipes.llm.test_train import trained
from tests.track import libraries
from worldsize.recipes.llm import meter
from worldsize.runtime.comm import Alone

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
PAIRS = [(f"{number}?", " y" * (1 + number % 3)) for number in range(8)]
SIZES: dict[str, Any] = {"num_hidden_layers": 2}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model, and prompts that are a step together."""
    place = tmp_path_factory.mktemp("flags")
    folders.folder(place / "model", **SIZES)
    path = folders.lines(place / "d.jsonl", ({"prompt": one, "completion": other} for one, other in PAIRS))
    return {
        "init_ckpt": str(place / "model"), "data_path": str(path), "cache_dir": str(place / "cache"), "max_seq_len": 32,
        "global_batch": 8, "micro_batch": 4, "packing": "false", "train_steps": 1, "precision": "fp32", "device": "cpu",
        "strategy": "single",
    }  # fmt: skip


def rows(run: Path, name: str) -> dict[int, float]:
    """A number of a run by step."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[name] for row in found if name in row}


class Operations(TorchDispatchMode):
    """Which operations of torch are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note it, and do it."""
        del types
        self.seen.add(func.name().removeprefix("aten::").split(".")[0])
        return func(*args, **(kwargs or {}))


def operations(given: dict[str, Any], run: Path, **more: str) -> set[str]:
    """What a training of a step calls."""
    found = Operations()
    with found:
        trained({**given, "output_dir": str(run), **more})
    return found.seen


@pytest.fixture(scope="module")
def usual(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What is called where nothing is asked for."""
    return operations(given, tmp_path_factory.mktemp("usual"))


FUSED_KERNEL = {
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
}
PRODUCTS = {"bmm", "_safe_softmax", "_softmax_backward_data"}


def test_use_flash_attn_selects_the_kernel(given: dict[str, Any], usual: set[str], tmp_path: Path) -> None:
    """One that never holds all scores, forward and backward; without it matrix products and a softmax."""
    plain = operations(given, tmp_path, use_flash_attn="false")
    assert usual >= FUSED_KERNEL
    assert not usual & PRODUCTS
    assert plain >= PRODUCTS
    assert not plain & FUSED_KERNEL


@pytest.mark.parametrize(("asked", "kernel"), [("true", "sdpa (flash)"), ("false", "math")])
def test_the_kernel_that_runs_is_said(
    given: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str], asked: str, kernel: str
) -> None:
    """With the model, before the first step."""
    trained({**given, "output_dir": str(tmp_path), "use_flash_attn": asked})
    assert f"attention: {kernel};" in capfd.readouterr().err


def test_use_fused_ops_selects_loss_and_optimizer(given: dict[str, Any], usual: set[str], tmp_path: Path) -> None:
    """A loss by pieces of the logits and AdamW as one operation; without it cross-entropy of all, and AdamW step by step."""
    apart = operations(given, tmp_path, use_fused_ops="false")
    assert "_fused_adamw_" in usual - apart
    assert {"nll_loss_forward", "_log_softmax", "addcdiv_"} <= apart - usual


@pytest.mark.parametrize("over", ["completion", "all"])
def test_loss_over_is_what_is_learnt(given: dict[str, Any], tmp_path: Path, over: str) -> None:
    """The first step's loss is transformers' mean over answers with their ends, or over all that follows something."""
    model, tokenizer = folders.made("llama", **SIZES), folders.tokenizer()
    each = []
    for prompt, completion in PAIRS:
        before, after = (tokenizer(text)["input_ids"] for text in (prompt, completion))
        tokens = torch.tensor([*before, *after, tokenizer.eos_token_id])
        with torch.no_grad():
            losses = cross_entropy(model(tokens[None]).logits[0, :-1], tokens[1:], reduction="none")
        each.append(losses if over == "all" else losses[len(before) - 1 :])
    trained({**given, "output_dir": str(tmp_path), "loss_over": over})
    assert rows(tmp_path, "loss")[0] == pytest.approx(float(torch.cat(each).mean()), rel=1e-5)


@pytest.mark.parametrize(("every", "steps"), [("0", [5]), ("3", [3, 5]), ("4", [4, 5])])
def test_save_steps_is_when_it_is_saved(given: dict[str, Any], tmp_path: Path, every: str, steps: list[int]) -> None:
    """And at the end."""
    trained({**given, "output_dir": str(tmp_path), "train_steps": 5, "save_steps": every})
    found = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert found == [f"step-{step:08d}" for step in steps]


@pytest.mark.parametrize(("every", "steps"), [("2", [2, 4, 5]), ("5", [5])])
def test_log_steps_is_when_speed_is_told(
    given: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str], every: str, steps: list[int]
) -> None:
    """In the run's numbers and to a person, at these steps and at the end."""
    trained({**given, "output_dir": str(tmp_path), "train_steps": 5, "log_steps": every})
    found = rows(tmp_path, "tokens_per_second_per_device")
    assert [index + 1 for index in found] == steps
    assert all(value > 0 for value in found.values())
    told = [line for line in capfd.readouterr().err.splitlines() if "tokens_per_second" in line]
    assert [int(line.split()[1]) for line in told] == steps


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_track_sends_the_same_numbers_elsewhere(given: dict[str, Any], tmp_path: Path) -> None:
    """Losses, speed and evaluation in TensorBoard, by its own reader."""
    more = {"train_steps": 2, "log_steps": 2, "eval_steps": 2, "eval_data": given["data_path"]}
    trained({**given, **more, "output_dir": str(tmp_path), "track": "tensorboard"})
    found = libraries.tensorboard_history(tmp_path)
    for name in ("loss", "eval_loss", "eval_perplexity", "tokens_per_second_per_device"):
        wanted = rows(tmp_path, name)
        assert wanted
        assert {step: float(value) for step, value in found[name]} == pytest.approx(wanted, rel=1e-6)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that a meter reads, which a test moves."""
    now = [100.0]
    monkeypatch.setattr("worldsize.recipes.llm.meter.time.perf_counter", lambda: now[0])
    return now


def test_speed_is_tokens_over_time_and_devices(clock: list[float]) -> None:
    """Between two looks; each begins anew."""
    found = meter.Meter(flops=3.0, ranks=4, device=CPU)
    clock[0] += 2.0
    found.add(300.0)
    found.add(500.0)
    assert found.read(Alone())["tokens_per_second_per_device"] == 800 / 2.0 / 4
    clock[0] += 10.0
    found.add(80.0)
    assert found.read(Alone())["tokens_per_second_per_device"] == 80 / 10.0 / 4


def test_on_a_gpu_there_are_mfu_and_memory(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations a second of each over its peak, after waiting for it; the most memory that was held."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 7_000_000_000)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    device = torch.device("cuda", 0)
    found = meter.Meter(flops=1e9, ranks=2, device=device)
    clock[0] += 4.0
    found.add(8e6)
    said = found.read(Alone())
    assert said["mfu"] == pytest.approx((8e6 / 4.0 / 2) * 1e9 / 989e12)
    assert said["memory_gb"] == 7.0
    assert waited == [device]


def test_a_device_that_is_not_known_has_no_mfu(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a CPU, nor a GPU whose peak nobody wrote down."""
    del clock
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Other 1")
    assert meter.peak(CPU) is None
    assert meter.peak(torch.device("cuda", 0)) is None
