from __future__ import annotations

import ctypes
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.checkpoint.states import path_of, save_once
from tests.pools import together
from worldsize.checkpoint import ranges
from worldsize.checkpoint.load import load
from worldsize.runtime.comm import Alone

if TYPE_CHECKING:
    from worldsize.runtime.comm import Comm

WIDE, MEGA = 8192, 1 << 20


@given(st.data(), st.sampled_from([64, 4096, 1 << 20]))
def test_any_box_of_any_tensor(data: st.DataObject, buffer: int) -> None:
    """Whatever box of whatever shape, with a buffer of whatever size: the values are those of the box."""
    sizes = data.draw(st.lists(st.integers(1, 40), max_size=4))
    offsets = [data.draw(st.integers(0, size - 1)) for size in sizes]
    lengths = [data.draw(st.integers(1, size - at)) for size, at in zip(sizes, offsets, strict=True)]
    dtype = data.draw(st.sampled_from([torch.uint8, torch.float16, torch.float64]))
    whole = (torch.arange(math.prod(sizes)) % 251).to(dtype).reshape(sizes)
    target = torch.zeros(lengths, dtype=dtype)
    descriptor = os.memfd_create("values")
    try:
        os.write(descriptor, b"before" + whole.numpy().tobytes())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ranges, "BUFFER", buffer)
            ranges.fill(descriptor, len(b"before"), sizes, offsets, target)
    finally:
        os.close(descriptor)
    box = tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))
    assert torch.equal(target, whole[box])


def test_a_file_that_ends_too_early_is_told() -> None:
    """Nothing is left half filled in silence."""
    descriptor = os.memfd_create("values")
    with pytest.raises(OSError, match="ends too early"):
        ranges.fill(descriptor, 0, [4], [0], torch.zeros(4))
    os.close(descriptor)


def state() -> dict[str, torch.Tensor]:
    """48 MB in tensors that are cut in all ways: by rows, by columns, in one dimension."""
    torch.manual_seed(3)
    return {
        "model/rows": torch.randn(512, WIDE),
        "model/columns": torch.randn(512, WIDE),
        "model/flat": torch.randn(4 * MEGA),
    }


def bytes_read() -> int:
    """What this process has read by system calls, from disk or from what the system keeps of it."""
    words = Path("/proc/self/io").read_text(encoding="ascii").split()
    return int(words[words.index("rchar:") + 1])


def peak() -> int:
    """The most memory that this process held since the last call, in bytes."""
    words = Path("/proc/self/status").read_text(encoding="ascii").split()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return int(words[words.index("VmHWM:") + 1]) * 1024


@pytest.mark.parametrize("dim", [0, 1])
def test_little_is_held_beside_the_target(dim: int) -> None:
    """A quarter of a tensor of 64 MB, by rows or by columns, takes one buffer more than itself."""
    descriptor = os.memfd_create("values")
    os.truncate(descriptor, 64 * MEGA)
    target = torch.ones(2048, WIDE).chunk(4, dim)[1].contiguous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "BUFFER", MEGA)
        offsets = [target.shape[dim] * (dim == axis) for axis in (0, 1)]
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not hide what is needed now
        ranges.fill(descriptor, 0, [2048, WIDE], offsets, target[:1, :1])
        peak()
        before = peak()
        ranges.fill(descriptor, 0, [2048, WIDE], offsets, target)
        most = peak()
    os.close(descriptor)
    assert most - before < 2 * MEGA
    assert not target.any()


def cost(comm: Comm, path: Path) -> tuple[float, bool]:
    """Bytes read, as a share of this rank's state; and whether it is right."""
    mesh, whole = init_device_mesh("cpu", (comm.size,)), state()
    cuts: dict[str, Any] = {"model/rows": Shard(0), "model/columns": Shard(1), "model/flat": Shard(0)}
    mine = {name: distribute_tensor(torch.zeros_like(tensor), mesh, [cuts[name]]) for name, tensor in whole.items()}
    load(path, mine, comm)  # the first one also reads modules
    for tensor in mine.values():
        tensor.to_local().zero_()
    before = bytes_read()
    load(path, mine, comm)
    done = bytes_read() - before
    right = all(
        torch.equal(tensor.to_local(), distribute_tensor(whole[name], mesh, [cuts[name]]).to_local())
        for name, tensor in mine.items()
    )
    return done / sum(tensor.to_local().nbytes for tensor in mine.values()), right


def test_a_rank_reads_only_what_it_needs(tmp_path: Path) -> None:
    """Of tensors that one rank wrote whole, each of four reads its quarter."""
    save_once(tmp_path, Alone(), state(), 1)
    for read, right in together(cost, 4, path_of(tmp_path, 1)):
        assert right
        assert read < 1.02
