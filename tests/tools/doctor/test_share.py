"""What a host sees of a shared folder, and what a disk gives."""

from __future__ import annotations

from pathlib import Path

from worldsize.tools.doctor import disk, share


def test_files_are_seen_and_missed(tmp_path: Path) -> None:
    """With the seconds it took."""
    folder = share.begin(str(tmp_path / "not" / "there"))
    assert Path(folder).parent == tmp_path
    share.put(folder, "one", "here")
    seen = share.look(folder, ["one", "two"], "here", 0.05)
    assert seen["one"] is not None
    assert seen["two"] is None
    share.end(folder)
    assert list(tmp_path.iterdir()) == []


def test_an_open_file_keeps_its_contents(tmp_path: Path) -> None:
    """When another is renamed over it."""
    share.put(str(tmp_path), "one", "old")
    share.hold(str(tmp_path), "one")
    share.put(str(tmp_path), "one", "new")
    assert share.held("one") == "old"
    assert share.look(str(tmp_path), ["one"], "new", 0.0)["one"] is not None


def test_a_file_is_claimed_once(tmp_path: Path) -> None:
    """By whoever comes first."""
    assert share.claim(str(tmp_path), ["x", "y"]) == ["x", "y"]
    assert share.claim(str(tmp_path), ["y", "z"]) == ["z"]


def test_a_write_is_measured_and_leaves_nothing(tmp_path: Path) -> None:
    """Room, speed."""
    found = disk.write(tmp_path / "runs" / "new", 4, 5.0)
    assert (found.path, found.written, found.error) == (str(tmp_path), 4.0, "")
    assert found.speed > 0
    assert list(tmp_path.iterdir()) == []


def test_a_write_is_bounded(tmp_path: Path) -> None:
    """No time, no bytes."""
    assert disk.write(tmp_path, 1000, 0.0).written == 0.0
