"""`worldsize llm export` and `worldsize llm generate`: each option changes what is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import worldsize as ws
from tests.recipes.llm import folders
from tests.recipes.llm.test_train import trained
from worldsize.cli.main import commands
from worldsize.recipes.llm import folder, shape
from worldsize.recipes.llm.model import Decoder

if TYPE_CHECKING:
    from pathlib import Path

DECAY = 0.5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the recipe, of two steps."""
    place = tmp_path_factory.mktemp("after")
    folders.folder(place / "model", num_hidden_layers=2)
    path = folders.lines(place / "d.jsonl", ({"text": f"{n} and {n + 1}"} for n in range(20)))
    trained(
        {
            "init_ckpt": str(place / "model"), "data_path": str(path), "cache_dir": str(place / "cache"), "precision": "fp32",
            "output_dir": str(place / "run"), "train_steps": 2, "max_seq_len": 32, "global_batch": 2, "lr": "1e-2",
            "device": "cpu", "strategy": "single",
        }
    )  # fmt: skip
    return place / "run"


def said(*words: str) -> str:
    """What a command prints."""
    done = CliRunner().invoke(commands, ["llm", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def refused(*words: str) -> str:
    """The error of a command."""
    return str(CliRunner().invoke(commands, ["llm", *words]).exception)


def test_weights_go_into_as_many_files_as_asked_for(run: Path, tmp_path: Path) -> None:
    """One if nothing is said; none larger than the size; and transformers loads them."""
    assert "weights in 1 file\n" in said("export", str(run), str(tmp_path / "one"))
    told = said("export", str(run), str(tmp_path / "more"), "--max-shard-size", "40KB")
    files = list((tmp_path / "more").glob("*.safetensors"))
    assert len(files) > 1
    assert f"weights in {len(files)} files\n" in told
    sizes = [sum(value.nbytes for value in load_file(file).values()) for file in files]
    assert max(sizes) <= 40_000
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "more").num_parameters() == sum(sizes) // 2


@pytest.mark.parametrize(("asked", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16)])
def test_the_dtype_is_the_one_asked_for(run: Path, tmp_path: Path, asked: str, dtype: torch.dtype) -> None:
    """In the files, and as the config says."""
    said("export", str(run), str(tmp_path / "out"), "--dtype", asked)
    values = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for value in values.values()} == {dtype}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype is dtype


def test_the_average_is_exported_in_place_of_the_weights(run: Path, tmp_path: Path) -> None:
    """Of a training that keeps one, as a copy of the recipe may."""
    model = run.parent / "model"
    made = ws.Run(tmp_path / "run", global_batch=2, micro_batch=2, duration="1st", strategy="single", device="cpu")
    decoder = made.model(lambda: Decoder(shape.read(model)), init="meta")
    made.warm_start(decoder, model)
    made.optimizer(lambda placed: torch.optim.SGD(placed.parameters(), 0.1), decoder)
    made.average(decoder, DECAY)
    before = {name: value.clone() for name, value in made.whole(decoder).items()}
    folder.keep(model, model, tmp_path / "run")
    for step in made.steps(torch.utils.data.TensorDataset(torch.arange(16).view(2, 8))):
        for (tokens,) in step.micro_batches:
            step.backward(decoder(tokens, tokens).mean(1))
        step.update()
    after = made.whole(decoder)
    found = {}
    for name, words in (("weights", ()), ("average", ("--average",))):
        said("export", str(tmp_path / "run"), str(tmp_path / name), "--dtype", "fp32", *words)
        found[name] = load_file(tmp_path / name / "model.safetensors")
    for name, value in found["weights"].items():
        wanted = DECAY * before[name] + (1 - DECAY) * after[name]
        torch.testing.assert_close(value, after[name], rtol=0, atol=0)
        torch.testing.assert_close(found["average"][name], wanted, rtol=1e-6, atol=1e-7)
    name = "model.embed_tokens.weight"
    assert not torch.equal(found["average"][name], found["weights"][name])


def test_a_run_without_an_average_says_so(run: Path, tmp_path: Path) -> None:
    """With the way out, and nothing is written."""
    assert "export without --average" in refused("export", str(run), str(tmp_path / "out"), "--average")
    assert not (tmp_path / "out").exists()


def test_a_prompt_goes_on_for_as_many_tokens_as_asked_for(run: Path) -> None:
    """The likeliest, as transformers has them."""
    folder_ = run.parent / "exported"
    said("export", str(run), str(folder_), "--dtype", "fp32")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder_).eval(), folders.tokenizer()
    tokens = torch.tensor([tokenizer("7 and")["input_ids"]])
    for count in (3, 12):
        wanted = model.generate(tokens, max_new_tokens=count, min_new_tokens=count, do_sample=False)[
            0, tokens.shape[1] :
        ]
        assert said("generate", str(run), "7 and", "--tokens", str(count)) == tokenizer.decode(wanted) + "\n"


def test_temperature_and_seed_draw_others(run: Path) -> None:
    """The same for the same seed."""

    def drawn(*words: str) -> str:
        return said("generate", str(run), "7 and", "--tokens", "12", *words)

    warm = drawn("--temperature", "1.5", "--seed", "1")
    assert warm == drawn("--temperature", "1.5", "--seed", "1")
    assert len({warm, drawn("--temperature", "1.5", "--seed", "2"), drawn()}) == 3


def test_chat_puts_the_prompt_into_the_template(run: Path) -> None:
    """As a user's message, after which the assistant speaks."""
    text = "<|user|>hello</s><|assistant|>"
    found = said("generate", str(run), "hello", "--chat", "--tokens", "12")
    assert found == said("generate", str(run), text, "--tokens", "12")
    assert found != said("generate", str(run), "hello", "--tokens", "12")
