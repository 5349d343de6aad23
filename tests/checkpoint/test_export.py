from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, load_model

from tests.checkpoint.states import path_of, save_once
from tests.checkpoint.trained import LAYOUTS, Net, make, trained
from worldsize.checkpoint import export
from worldsize.checkpoint.export import Weights
from worldsize.checkpoint.opened import Opened
from worldsize.checkpoint.weights import read_weights
from worldsize.errors import CheckpointError, ConfigError
from worldsize.runtime.comm import Alone

if TYPE_CHECKING:
    from torch import Tensor


@pytest.fixture(scope="module", params=LAYOUTS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A run of each layout, and the model that it ended with."""
    folder = tmp_path_factory.mktemp("runs") / request.param
    return path_of(folder, 4), trained(folder, request.param)


def weights(path: Path, dtype: str | None = None, *, average: bool = False) -> Weights:
    """Those of the only model."""
    return Weights.choose(Opened(path), None, dtype, average=average)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether names and values are the same, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_safetensors(run: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    """Every layout's checkpoint becomes one file with the model's own names and values, tied ones once."""
    path, model = run
    assert export.safetensors(weights(path), tmp_path / "x.safetensors", 1) == [tmp_path / "x.safetensors"]
    found = load_file(tmp_path / "x.safetensors")
    assert equal(found, {name: value for name, value in model.items() if name != "tied.weight"})
    net = Net()
    missing, unexpected = load_model(net, tmp_path / "x.safetensors")
    assert not missing
    assert not unexpected
    assert equal(net.state_dict(), model)
    assert equal(read_weights(tmp_path / "x.safetensors"), model)


def test_many_files(run: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    """No file holds more than it may, unless one tensor is larger; the index says where each is; ours are read back."""
    path, model = run
    files = export.safetensors(weights(path), tmp_path / "out", 400)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(t.nbytes for name, t in model.items() if name != "tied.weight")
    for file in files:
        held = load_file(file)
        assert set(held) == {name for name, where in index["weight_map"].items() if where == file.name}
        assert sum(tensor.nbytes for tensor in held.values()) <= 400
    assert equal(read_weights(tmp_path / "out"), model)


def test_another_dtype(run: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    """Floating-point tensors are cast, counters are not."""
    path, model = run
    export.safetensors(weights(path, "bf16"), tmp_path / "x.safetensors", 1)
    export.torch_file(weights(path, "bf16"), tmp_path / "x.pt")
    cast = {name: value.bfloat16() if value.is_floating_point() else value for name, value in model.items()}
    assert equal(read_weights(tmp_path / "x.safetensors"), cast)
    assert equal(torch.load(tmp_path / "x.pt", weights_only=True), cast)


def test_the_average(run: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    """The running average comes out under the same names, and is not the weights."""
    path, model = run
    export.torch_file(weights(path, average=True), tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found.keys() == model.keys()
    assert not torch.equal(found["emb.weight"], model["emb.weight"])


def test_a_torch_file_goes_on_elsewhere(run: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    """Plain torch loads model and optimizer from the file and makes the next step that our run makes."""
    path, _ = run
    export.torch_file(weights(path), tmp_path / "state.pt")
    export.torch_file(weights(path), tmp_path / "y.pt", optimizer=True)
    assert equal(torch.load(tmp_path / "state.pt", weights_only=True), run[1])
    found = torch.load(tmp_path / "y.pt", weights_only=True)
    assert found["model"]["tied.weight"].data_ptr() == found["model"]["emb.weight"].data_ptr()
    net = Net()
    net.load_state_dict(found["model"])
    optimizer = make(net)
    optimizer.load_state_dict(found["optimizer"])
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-4, 1e-4])
    assert optimizer.param_groups[1]["weight_decay"] == 0.0
    opened = Opened(path)
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            for key in ("step", "exp_avg", "exp_avg_sq"):
                assert torch.equal(optimizer.state[parameter][key], opened.tensor(f"optim/0/net.{name}/{key}"))
    net(torch.randn(4, 8)).sum().backward()
    optimizer.step()


def test_memory_is_that_of_one_tensor(tmp_path: Path) -> None:
    """Safetensors of 64 MB are written with no more than two tensors of 4 MB in memory."""
    tensors = {f"model/m/{n}": torch.full((1 << 20,), float(n)) for n in range(16)}
    save_once(tmp_path, Alone(), tensors, 1)
    opened = weights(path_of(tmp_path, 1))
    status = Path("/proc/self/status")

    def high() -> int:
        words = status.read_text(encoding="ascii").split()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return int(words[words.index("VmHWM:") + 1]) * 1024

    del tensors
    export.safetensors(opened, tmp_path / "warm", 1 << 40)
    high()
    before = high()
    export.safetensors(opened, tmp_path / "out", 10 << 20)
    assert high() - before < 16 << 20
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 8
    assert torch.equal(read_weights(tmp_path / "out")["15"], torch.full((1 << 20,), 15.0))


def test_nothing_is_written_over(run: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    """What is there stays, and after an error nothing new is there."""
    (tmp_path / "x.pt").write_text("mine")
    with pytest.raises(CheckpointError, match="is there already"):
        export.torch_file(weights(run[0]), tmp_path / "x.pt")
    assert (tmp_path / "x.pt").read_text() == "mine"


@pytest.mark.parametrize("text", ["", "GB", "0", "5 apples", "-1GB"])
def test_sizes_that_are_none(text: str) -> None:
    """A size is a number of bytes, kilobytes and so on."""
    with pytest.raises(ConfigError):
        export.size(text)
    assert [export.size(good) for good in ("5GB", "2 KiB", "1.5mb", "7")] == [5 * 10**9, 2048, 1500000, 7]


def test_several_models_need_a_name(tmp_path: Path) -> None:
    """Which model is meant is asked for with the names that are there."""
    save_once(tmp_path, Alone(), {"model/G/w": torch.ones(2), "model/D/w": torch.zeros(2)}, 1)
    opened = Opened(path_of(tmp_path, 1))
    with pytest.raises(ConfigError, match=r"which model is meant.*G, D"):
        Weights.choose(opened, None, None, average=False)
    with pytest.raises(ConfigError, match=r"holds no model 'X'"):
        Weights.choose(opened, "X", None, average=False)
    assert torch.equal(Weights.choose(opened, "D", None, average=False).tensor("w"), torch.zeros(2))


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    """Its files are compared with the manifest first."""
    save_once(tmp_path, Alone(), {"model/G/w": torch.ones(2)}, 1)
    file = path_of(tmp_path, 1) / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="damaged"):
        Opened(path_of(tmp_path, 1))
