"""Host lists of any form beside Slurm's own `scontrol show hostnames`, which needs a configuration file but no cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from worldsize.errors import WorldError
from worldsize.runtime.hostlist import compress, expand

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Ask = Callable[[list[str]], list[list[str]]]

pytestmark = pytest.mark.skipif(
    shutil.which("scontrol") is None, reason="needs Slurm's client: apt-get install slurm-client"
)
BATCH = 50
END = "zzend"
PIECE = st.from_regex(r"[a-z][a-z0-9.-]{0,5}", fullmatch=True)
RANGE = st.tuples(st.integers(0, 1200), st.integers(0, 5), st.integers(1, 5)).map(
    lambda drawn: f"{drawn[0]:0{drawn[2]}d}" + (f"-{drawn[0] + drawn[1]:0{drawn[2]}d}" if drawn[1] else "")
)
BRACKET = st.lists(RANGE, min_size=1, max_size=3).map(lambda ranges: f"[{','.join(ranges)}]")
ITEM = st.one_of(
    PIECE,
    st.tuples(PIECE, BRACKET).map("".join),
    st.tuples(PIECE, BRACKET, st.one_of(PIECE, st.just(""), st.just("-")), BRACKET).map("".join),
)
LISTS = st.lists(ITEM, min_size=1, max_size=4).map(",".join)
NEARLY = st.lists(st.sampled_from([*"ab019-.[],:", "n[1-3]", "01", "-2", "[2,4"]), min_size=1, max_size=9).map(
    "".join
)


@pytest.fixture(scope="module")
def slurms(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """What Slurm makes of each list, all of them asked as one."""
    conf: Path = tmp_path_factory.mktemp("conf") / "slurm.conf"
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    environ = {**os.environ, "SLURM_CONF": str(conf)}

    def ask(texts: list[str]) -> list[list[str]]:
        text = ",".join(f"{END},{text}" for text in texts)
        done = subprocess.run(
            ["scontrol", "show", "hostnames", text], env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        answers: list[list[str]] = []
        for name in done.stdout.split():
            answers.append([]) if name == END else answers[-1].append(name)
        return answers

    return ask


def _same(slurms: Ask, texts: list[str]) -> None:
    for text, names in zip(texts, slurms(texts) if texts else (), strict=True):
        assert expand(text) == names, text
        assert expand(compress(expand(text))) == names, text


def _no_looser(slurms: Ask, texts: list[str]) -> None:
    read = [text for text in texts if _is_read(text)]
    _same(slurms, read)


def _is_read(text: str) -> bool:
    try:
        return bool(expand(text))
    except WorldError:
        return False


@given(st.lists(LISTS, min_size=1, max_size=BATCH))
@settings(max_examples=5)
def test_any_list_is_what_slurm_says(slurms: Ask, texts: list[str]) -> None:
    """Padding, several brackets, hyphens in names: the same names in the same order, and again when compressed."""
    _same(slurms, texts)


@given(st.lists(NEARLY, min_size=1, max_size=BATCH))
@settings(max_examples=5)
def test_nothing_is_a_list_that_slurm_refuses(slurms: Ask, texts: list[str]) -> None:
    """Whatever is read at all is read as Slurm reads it; forms that it mangles are refused."""
    _no_looser(slurms, texts)


@pytest.mark.matrix
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(("texts", "agree"), [(LISTS, _same), (NEARLY, _no_looser)], ids=["lists", "nearly lists"])
def test_ten_thousand_lists_are_what_slurm_says(
    slurms: Ask,
    texts: st.SearchStrategy[str],
    agree: Callable[[Ask, list[str]], None],
    part: int,
) -> None:
    """Four times fifty batches of fifty."""

    @seed(part)
    @settings(max_examples=50, database=None)
    @given(st.lists(texts, min_size=BATCH, max_size=BATCH))
    def look(batch: list[str]) -> None:
        agree(slurms, batch)

    look()
