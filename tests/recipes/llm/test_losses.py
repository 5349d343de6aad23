"""The head's loss is the same in pieces: of positions, and of the vocabulary over ranks."""

from __future__ import annotations

import pytest
import torch

from tests.pools import pool
from worldsize.recipes.llm import losses

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
WORDS = 36


def computed(way: str, scale: float, *, alike: bool, compiled: bool = False) -> Found:
    """Losses, and the gradients of states and of this rank's part of the weight, in float64."""
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(2, 7, 8, dtype=torch.float64, generator=draw).requires_grad_()
    weight = torch.randn(WORDS, 8, dtype=torch.float64, generator=draw)
    labels = torch.randint(0, WORDS, (2, 7), generator=draw)
    labels[0, 2] = labels[1, 5] = losses.IGNORED
    cut = None
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        size = WORDS // torch.distributed.get_world_size()
        first = torch.distributed.get_rank() * size
        group = torch.distributed.group.WORLD
        assert group is not None
        weight, cut = weight[first : first + size].clone(), losses.Cut(first, group)
    weight.requires_grad_()
    if way == "plain":
        found = losses.plain(states, weight, labels, scale, cut)
    else:
        found = losses.chunked(states, weight, labels, scale, rows=5, cut=cut, compiled=compiled)
    outer = torch.ones_like(found) if alike else torch.linspace(0.5, 2, 14, dtype=found.dtype).view(2, 7)
    (found.sum() if alike else (found * outer).sum()).backward()
    assert states.grad is not None
    assert weight.grad is not None
    return found.detach(), states.grad, weight.grad


def on_rank(way: str, scale: float, *, alike: bool) -> Found:
    """The same in a world of ranks."""
    from worldsize.runtime import session

    session.session("cpu").need_group()
    return computed(way, scale, alike=alike)


def test_parts_of_the_vocabulary_give_the_whole_ones_losses() -> None:
    """Losses are equal, states' gradients add up, weights' are parts; ignored labels, scaled logits, other weights included."""
    for way, scale, alike in (("plain", 1.0, True), ("chunked", 0.3, True), ("chunked", 1.0, False)):
        wanted, of_states, of_weight = computed("plain", scale, alike=alike)
        ranks = pool(2).run(on_rank, way, scale, alike=alike)
        for found, _, _ in ranks:
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ranks[0][1] + ranks[1][1], of_states, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.cat([ranks[0][2], ranks[1][2]]), of_weight, rtol=1e-12, atol=1e-12)


def test_pieces_of_positions_give_the_whole_ones_losses() -> None:
    """In one pass, and anew where losses are weighted in other ways."""
    for scale, alike in ((1.0, True), (0.3, True), (0.3, False)):
        for found, wanted in zip(
            computed("chunked", scale, alike=alike), computed("plain", scale, alike=alike), strict=True
        ):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_it_is_the_same() -> None:
    """What happens to logits, in a few passes."""
    for scale, alike in ((1.0, True), (0.3, False)):
        compiled = computed("chunked", scale, alike=alike, compiled=True)
        for found, wanted in zip(compiled, computed("plain", scale, alike=alike), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
