from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.checkpoint import disk
from worldsize.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@given(st.lists(st.binary(max_size=40)))
def test_digest_does_not_depend_on_the_portions(portions: list[bytes]) -> None:
    """A digest fed in any portions is that of the whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "PIECE", 16)
        one, other = disk.Digest(), disk.Digest()
        for portion in portions:
            one.update(memoryview(portion))
        other.update(memoryview(b"".join(portions)))
        assert one.text() == other.text()


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 32, 33])
def test_what_was_written_is_what_is_read_back(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest of the bytes given is the digest of the file, around the borders of the pieces."""
    monkeypatch.setattr(disk, "PIECE", 16)
    file = disk.Recorder(tmp_path / "f")
    for byte in os.urandom(size):
        file.write(bytes([byte]))
    file.close()
    assert disk.fact(tmp_path / "f") == file.fact()


def test_replace_leaves_nothing_beside(tmp_path: Path) -> None:
    """A replaced text file stands alone in its folder."""
    disk.replace(tmp_path / "a", "1")
    disk.replace(tmp_path / "a", "2")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["2"]


def test_a_writable_folder_is_made_private(tmp_path: Path) -> None:
    """A run folder that does not exist yet is made for its owner alone, and the probe leaves nothing."""
    free = disk.check_writable(tmp_path / "runs" / "a")
    assert free
    assert (tmp_path / "runs" / "a").stat().st_mode & 0o777 == 0o700
    assert not list((tmp_path / "runs" / "a").iterdir())


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system mounted read-only (root may write whatever the mode says)."""
    folder = tmp_path / "ro"
    folder.mkdir()
    if os.geteuid():
        folder.chmod(0o555)
        yield folder
        return
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], check=False, capture_output=True)
    if made.returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_read_only_folder_is_refused_before_training(read_only: Path) -> None:
    """B057: a folder that cannot be written is refused at once, in one line with the path and the free bytes."""
    with pytest.raises(CheckpointError, match="bytes free there") as caught:
        disk.check_writable(read_only)
    assert str(read_only) in str(caught.value)
    assert "\n" not in str(caught.value)
