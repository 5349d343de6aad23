from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.checkpoint import disk, manifest
from worldsize.checkpoint.disk import FileFact
from worldsize.checkpoint.manifest import FORMAT, Manifest, committed, folder_name, read, share, step_of, verify
from worldsize.errors import CheckpointError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1).filter(
    lambda name: name not in (".", "..")
)


def build(**more: Any) -> Manifest:
    """A manifest of a small checkpoint."""
    values: dict[str, Any] = {
        "step": 7,
        "epoch": 1,
        "samples": 28,
        "layout": {"strategy": "ddp", "ranks": 2},
        "exact": True,
        "files": {},
        "created": "2026-11-27T00:00:00+00:00",
        "attempt": 0,
        "version": "0.1.0",
    }
    return Manifest(**(values | more))


def commit(run_dir: Path, step: int, content: dict[str, str] | None = None) -> Path:
    """A committed checkpoint of these text files."""
    path = run_dir / manifest.FOLDER / folder_name(step)
    path.mkdir(parents=True)
    facts = {name: disk.write(path / name, text) for name, text in (content or {"a": "x"}).items()}
    disk.write(path / manifest.MANIFEST, build(step=step, files=facts).to_json())
    return path


@given(st.dictionaries(st.text(), PLAIN), st.dictionaries(NAMES, st.integers(0)), st.booleans() | st.text())
def test_a_manifest_reads_back(layout: dict[str, Any], sizes: dict[str, int], exact: bool | str) -> None:
    """What a manifest says comes back from its text, whatever it is."""
    files = {name: FileFact(size, "d") for name, size in sizes.items()}
    one = build(layout=layout, files=files, exact=exact)
    assert Manifest.from_json(one.to_json()) == one


@given(st.data())
def test_a_flipped_bit_in_a_manifest_never_changes_what_it_says(data: st.DataObject) -> None:
    """A damaged manifest is refused, or the damage was in the white space."""
    one = build(files={"a": FileFact(3, "d")})
    raw = bytearray(one.to_json().encode())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return
    with suppress(CheckpointError):
        assert Manifest.from_json(text) == one


def test_a_newer_format_names_both() -> None:
    """A checkpoint of a newer version is refused with its format and ours."""
    text = json.dumps({"format": FORMAT + 6})
    with pytest.raises(CheckpointError, match=rf"format {FORMAT + 6}.*up to format {FORMAT}"):
        Manifest.from_json(text)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "1"}', '{"format": 0}', '{"format": 1}', "null"])
def test_what_is_no_manifest_is_refused(text: str) -> None:
    """Text that is no manifest is called damaged, not a traceback."""
    with pytest.raises(CheckpointError, match="damaged"):
        Manifest.from_json(text)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ""])
def test_a_manifest_cannot_name_files_outside(name: str) -> None:
    """A manifest that names files outside its folder is refused."""
    with pytest.raises(CheckpointError, match="outside"):
        Manifest.from_json(build(files={name: FileFact(1, "d")}).to_json())


@given(st.lists(st.integers(0, 10**12), unique=True, max_size=20))
def test_names_say_steps_for_any_step(steps: list[int]) -> None:
    """A folder's name gives its step back, also where the step has more digits than the name is padded to."""
    assert [step_of(Path(folder_name(step))) for step in steps] == steps


@pytest.mark.parametrize(
    "name", ["step-7", "step-0000000007", "step-00000007.tmp", ".step-00000007", "step--0000007"]
)
def test_other_names_are_no_checkpoints(name: str) -> None:
    """Only the exact form is a checkpoint's name."""
    assert step_of(Path(name)) is None


def test_committed_in_the_order_of_numbers(tmp_path: Path) -> None:
    """Steps are ordered as numbers; folders without a manifest, hidden ones and strangers are no checkpoints."""
    for step in (100_000_000, 99_999_999, 5):
        commit(tmp_path, step)
    (tmp_path / manifest.FOLDER / folder_name(6)).mkdir()
    commit(tmp_path, 7).rename(tmp_path / manifest.FOLDER / ".step-00000007.x.tmp")
    (tmp_path / manifest.FOLDER / "best.json").write_text("[]")
    assert [step_of(path) for path in committed(tmp_path)] == [5, 99_999_999, 100_000_000]


def test_no_run_folder_has_no_checkpoints(tmp_path: Path) -> None:
    """A run that never saved has none."""
    assert committed(tmp_path / "nowhere") == []


def test_a_whole_checkpoint_verifies(tmp_path: Path) -> None:
    """Files that are what the manifest says give no problem."""
    assert verify(commit(tmp_path, 3, {"a": "x", "b": ""})) == []


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    """One changed byte of the same size is found and its file named."""
    path = commit(tmp_path, 3, {"a": "hello", "b": "world"})
    (path / "b").write_text("worle")
    assert [problem.split(":")[0] for problem in verify(path)] == ["b"]


def test_sizes_come_first(tmp_path: Path) -> None:
    """A truncated and a missing file are told with both numbers before any digest is computed."""
    path = commit(tmp_path, 3, {"a": "hello", "b": "world", "c": "other"})
    (path / "a").write_text("hel")
    (path / "b").unlink()
    (path / "c").write_text("OTHER")
    assert verify(path) == ["a: 3 bytes, the manifest says 5", "b: No such file or directory"]


def test_ranks_verify_their_share(tmp_path: Path) -> None:
    """Each file is looked at by exactly one rank."""
    path = commit(tmp_path, 3, {"a": "hello", "b": "world", "c": "x"})
    (path / "c").write_text("y")
    shares = share(read(path).files, 2)
    assert sorted(name for mine in shares for name in mine) == ["a", "b", "c"]
    assert [len(verify(path, mine)) for mine in shares].count(1) == 1


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 9))
def test_shares_are_even(sizes: list[int], ranks: int) -> None:
    """No rank has more to read than another by more than the largest file."""
    files = {str(index): FileFact(size, "") for index, size in enumerate(sizes)}
    loads = [sum(files[name].size for name in mine) for mine in share(files, ranks)]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    """A folder whose name says another step than its manifest is not used."""
    path = commit(tmp_path, 3)
    moved = path.rename(path.with_name(folder_name(4)))
    with pytest.raises(CheckpointError, match="step 4 in the name, step 3 in the manifest"):
        read(moved)


def test_an_error_names_the_folder(tmp_path: Path) -> None:
    """The error about a damaged manifest says where it is."""
    path = commit(tmp_path, 3)
    (path / manifest.MANIFEST).write_bytes(b"\xff{")
    with pytest.raises(CheckpointError, match=folder_name(3)):
        read(path)


def test_sizes_add_up() -> None:
    """A manifest knows the size of its checkpoint."""
    assert replace(build(), files={"a": FileFact(3, ""), "b": FileFact(4, "")}).bytes == 7
