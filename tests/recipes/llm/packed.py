"""Room: rows of several documents for tests: what a kernel of attention makes of them, and the losses of their samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from worldsize.recipes.llm.losses import IGNORED

if TYPE_CHECKING:
    from torch import Tensor

    from worldsize.recipes.llm.attention import Kernel

WINDOWS = [None, 24, 1000]
"""None; one that ends inside of documents; one that is wider than a row."""
SIZES = [70, 30, 57], [1, 140, 16]
"""Documents of two rows, whose ends are on no block's edge."""
LENGTH, HEADS, GROUPS = 200, 4, 2


def documents(device: torch.device) -> Tensor:
    """(2, LENGTH): the number of the document at each position, and padding behind them."""
    found = torch.full((2, LENGTH), -1)
    for row, sizes in enumerate(SIZES):
        found[row, : sum(sizes)] = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return found.to(device)


def operands(device: torch.device, size: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values for two rows, and what is sent back."""
    draw = torch.Generator().manual_seed(0)
    heads = (HEADS, GROUPS, GROUPS, HEADS)
    found = (torch.randn(2, count, LENGTH, size, generator=draw) for count in heads)
    return [each.to(device, dtype) for each in found]


def attended(kernel: Kernel, given: list[Tensor], where: Tensor | None, window: int | None) -> dict[str, Tensor]:
    """What a kernel gives forward and backward, where documents are seen, else 0."""
    query, key, value, sent = (each.clone().requires_grad_() for each in given)
    output = kernel.view(LENGTH, where, query.device).attend(query, key, value, window, 0.3)
    inside = torch.ones_like(output) if where is None else (where >= 0)[:, None, :, None].expand_as(output)
    (output * sent.detach() * inside).sum().backward()
    grads = {name: each.grad for name, each in (("query", query), ("key", key), ("value", value))}
    return {"output": output.detach() * inside, **{name: each for name, each in grads.items() if each is not None}}


def one_by_one(kernel: Kernel, given: list[Tensor], where: Tensor, window: int | None) -> dict[str, Tensor]:
    """What it gives where each document is a row by itself: the oracle of packing."""
    names = ("output", "query", "key", "value")
    shapes = {"output": given[3], "query": given[0], "key": given[1], "value": given[2]}
    found = {name: torch.zeros_like(shapes[name]) for name in names}
    for row in range(len(where)):
        for number in range(int(where[row].max()) + 1):
            at = (where[row] == number).nonzero().flatten()
            part = [each[row : row + 1, :, at].clone().requires_grad_() for each in given]
            view = kernel.view(len(at), None, at.device)
            output = view.attend(part[0], part[1], part[2], window, 0.3)
            (output * part[3].detach()).sum().backward()
            for name, value in zip(names, (output.detach(), *(each.grad for each in part[:3])), strict=True):
                assert value is not None
                found[name][row, :, at] = value[0]
    return found


def sample_losses(decoder: Any, found: Any, device: torch.device) -> list[float]:
    """The loss of each label that counts of a dataset's rows, sorted."""
    losses: list[float] = []
    for start in range(0, len(found), 3):
        batch = found.collate([found[index] for index in range(start, min(start + 3, len(found)))])
        batch = {name: value.to(device) for name, value in batch.items()}
        with torch.no_grad():
            each = decoder(batch["tokens"], batch["labels"], batch["position_ids"], batch.get("documents"))
        losses += each[batch["labels"] != IGNORED].tolist()
    return sorted(losses)
