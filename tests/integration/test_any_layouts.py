"""Any two layouts and any step between them: what the first wrote the second goes on with, or refuses with the numbers."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.integration import program, stack
from tests.pools import pool
from worldsize.errors import ConfigError, LayoutError
from worldsize.tools.trial import Layout

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

    from tests.integration.program import Curve

Triple = tuple[Layout, Layout, int, int]
"""Writer, reader, after which step the first is stopped, and the micro-batch."""
PARTS, EACH = 100, 2
STEPS = 2 * program.STEPS_PER_EPOCH
WHOLE = ("horovod", *stack.ZERO)
"""They lie over all ranks, with no other axis."""
MODULES, WIDTHS = 9, (8, 16)
"""Of the chain: how many can begin a stage, and what tensor ranks divide."""


@st.composite
def layouts(draw: DrawFn) -> Layout:
    """On one to four ranks; one in forty is anything at all, of the others only the batch may be too small."""
    anything = draw(st.sampled_from([False] * 39 + [True]))
    tp, pp = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 2), (1, 3), (4, 1), (1, 4), (2, 2)]))
    shares = draw(st.integers(1, 4 // (tp * pp)))
    ranks = draw(st.integers(1, 4)) if anything else tp * pp * shares
    name = draw(st.sampled_from(["ddp", "fsdp", "hsdp", *(WHOLE if tp * pp == 1 or anything else ())]))
    axes = {axis: str(size) for axis, size in (("tp", tp), ("pp", pp)) if size > 1}
    if pp > 1:
        axes["schedule"] = draw(st.sampled_from(stack.SCHEDULES))
    if name == "hsdp":
        axes["replicas"] = str(draw(st.integers(1, 4)) if anything else draw(st.sampled_from([1, shares])))
    return Layout(name, ranks, tuple(axes.items()))


TRIPLES: SearchStrategy[Triple] = st.tuples(
    layouts(), layouts(), st.integers(1, STEPS - 1), st.sampled_from([2, 3, 4, 5, 6, 8, 12, 16])
)


def obstacles(layout: Layout, micro: int) -> list[tuple[str, ...]]:
    """What the arithmetic does not allow, said again here in a few lines: for each the sizes that a refusal must name."""
    axes = dict(layout.axes)
    tp, pp, replicas = (int(axes.get(axis, 1)) for axis in ("tp", "pp", "replicas"))
    shares, rest = divmod(layout.ranks, tp * pp)
    stages = pp * (1 if axes.get("schedule") in {"gpipe", "1f1b"} else 2)
    micros = -(-program.GLOBAL // micro)
    found = [
        (rest > 0, (f"{layout.ranks} ranks", f"pp={pp}", f"tp={tp}")),
        (not rest and shares > micros, (f"{shares} ranks", f"{micros} micro-batches of {micro}")),
        (not rest and shares % replicas > 0, (f"{shares} shares", f"{replicas} replicas")),
        (any(width % tp for width in WIDTHS), (f"tp={tp}",)),
        (stages > MODULES, (f"{MODULES} modules", f"{stages} stages")),
        (tp * pp > 1 and layout.strategy in WHOLE, (f"pp={pp}" if pp > 1 else f"tp={tp}",)),
    ]
    return [sizes for stands, sizes in found if stands]


def names(text: str, sizes: tuple[str, ...]) -> bool:
    """Whether a refusal says all of them."""
    return all(re.search(rf"(?<!\w){re.escape(size)}(?!\w)", text) for size in sizes)


def attempt(folder: Path, layout: str, micro: int, stop_after: int | None = None) -> Curve | str:
    """The training as far as it gets on this rank, or why not."""
    try:
        return stack.train(folder, layout, micro_batch=micro, stop_after=stop_after)
    except (LayoutError, ConfigError) as refused:
        return str(refused)


def both(folder: Path, writer: Layout, reader: Layout, step: int, micro: int) -> Curve | str:
    """What the reader did from the step on, or the first refusal: the same on all ranks."""
    found: list[Any] = []
    for layout, stop_after in ((writer, step), (reader, None)):
        found = pool(layout.ranks).run(attempt, folder, str(layout), micro, stop_after)
        if isinstance(found[0], str):
            assert len({type(each) for each in found}) == 1, found
            return str(found[0])
    return program.everyone(found)


def hold(triple: Triple) -> None:
    """Check one."""
    writer, reader, step, micro = triple
    with TemporaryDirectory() as folder:
        after = both(Path(folder), writer, reader, step, micro)
        against = obstacles(writer, micro) or obstacles(reader, micro)
        if isinstance(after, str):
            assert any(names(after, sizes) for sizes in against), f"{triple}: {after}, and not one of {against}"
            return
        assert not against, triple
        assert sorted(after.losses) == list(range(step, STEPS))
        program.close(single(), after, 1e-10)


@cache
def single() -> Curve:
    """What one process does."""
    with TemporaryDirectory() as folder:
        (found,) = pool(1).run(stack.train, Path(folder), stack.ONE)
    return found


@cache
def drawn() -> list[Triple]:
    """As many as are tried, each another one: hypothesis draws some of them again."""
    found: dict[Triple, None] = {}

    @settings(max_examples=2 * PARTS * EACH, phases=(Phase.generate,))
    @given(TRIPLES)
    def keep(triple: Triple) -> None:
        found[triple] = None

    keep()
    return list(found)[: PARTS * EACH]


def test_nine_in_ten_divide() -> None:
    """Or the others would show little."""
    assert len(drawn()) == PARTS * EACH
    possible = [triple for triple in drawn() if not any(obstacles(layout, triple[3]) for layout in triple[:2])]
    assert len(possible) >= 0.9 * PARTS * EACH


REFUSED = {
    "grid": (Layout("ddp", 3, (("tp", "2"),)), 4),
    "micro": (Layout("fsdp", 4), 16),
    "replicas": (Layout("hsdp", 3, (("replicas", "2"),)), 4),
    "whole": (Layout("zero2", 2, (("tp", "2"),)), 4),
    "staged": (Layout("horovod", 2, (("pp", "2"), ("schedule", "gpipe"))), 4),
}


@pytest.mark.parametrize("name", REFUSED)
def test_each_refusal_names_the_sizes(name: str) -> None:
    """Those that do not go together, and not just any number."""
    layout, micro = REFUSED[name]
    assert obstacles(layout, micro)
    hold((Layout("single", 1), layout, 1, micro))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.matrix) for part in range(1, PARTS))])
def test_any_pair_that_divides_loads_and_is_equal(part: int) -> None:
    """And the rest is refused with the numbers."""
    for triple in drawn()[part::PARTS]:
        hold(triple)
