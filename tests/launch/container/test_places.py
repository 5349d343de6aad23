"""Paths that a container needs: bound by themselves, and missed at submit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from worldsize.errors import ConfigError
from worldsize.launch.container.places import bound, check
from worldsize.launch.profile import Profile
from worldsize.launch.spec import JobSpec

if TYPE_CHECKING:
    from pathlib import Path


def job(folder: Path, runtime: str = "apptainer", *, words: tuple[str, ...] = (), **asked: Any) -> JobSpec:
    """A job in a container, with everything bound."""
    box = {"image": "i.sif", "runtime": runtime} | asked.pop("container", {})
    (folder / "work").mkdir(exist_ok=True)
    spec = {"program": ("train.py", *words), "chdir": str(folder / "work"), "container": box, **asked}
    return bound(JobSpec.of(spec), folder / "work" / "jobs" / "1", Profile(), {"HOME": str(folder / "me")})


def binds(spec: JobSpec) -> set[str]:
    """Its binds."""
    assert spec.container is not None
    return set(spec.container.binds)


def test_what_a_job_names_is_bound(tmp_path: Path) -> None:
    """Working, run and home folder, caches, data in variables and arguments; of links what they lead to (B093)."""
    names = ("run", "me", "cache", "real", "data", "words", "given", "far")
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "near").symlink_to(tmp_path / "far")
    spec = job(
        tmp_path,
        run_dir=str(tmp_path / "run"),
        env={"HF_HOME": str(tmp_path / "cache"), "DATA": f"{tmp_path}/data:{tmp_path}/link", "N": "/no/such"},
        words=(f"--x={tmp_path / 'words'}", "/usr", "/", "--y=no"),
        container={"binds": str(tmp_path / "given")},
    )
    assert binds(spec) == {str(tmp_path / name) for name in (*names, "link", "work")}


def test_what_lies_in_what_is_bound_is_not_bound_again(tmp_path: Path) -> None:
    """The job's folder below the working folder."""
    assert binds(job(tmp_path, container={"home": False})) == {str(tmp_path / "work")}


def test_the_image_beside_the_script_is_found_from_anywhere(tmp_path: Path) -> None:
    """A name that is no path is the runtime's to find."""
    (tmp_path / "work").mkdir()
    assert job(tmp_path).container == job(tmp_path, container={"image": "i.sif"}).container
    (tmp_path / "work" / "i.sif").touch()
    found = job(tmp_path).container
    assert found is not None
    assert found.image == str(tmp_path / "work" / "i.sif")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"container": {"image": "/no/i.sif"}}, "image of the container is not there. Found: /no/i.sif"),
        ({"container": {"binds": "/no/data"}}, "needs is not there. Found: /no/data"),
        ({"env": {"HF_HOME": "/no/cache"}}, "needs is not there. Found: /no/cache"),
        ({"venv": "/v"}, "venv acts outside"),
        ({"stage": ("/srv",), "runtime": "docker"}, "no signal would reach the ranks"),
    ],
)
def test_what_is_missing_is_said_at_submit(tmp_path: Path, asked: dict[str, Any], says: str) -> None:
    """Not after an hour in the queue (B093)."""
    (tmp_path / "me").mkdir()
    with pytest.raises(ConfigError, match=says):
        check(job(tmp_path, **asked), tmp_path)


def test_an_image_without_the_folder_to_bind_at_is_said(tmp_path: Path) -> None:
    """Charliecloud makes none."""
    for name in ("me", "image"):
        (tmp_path / name).mkdir()
    spec = job(tmp_path, "charliecloud", container={"image": str(tmp_path / "image"), "binds": "/usr/share"})
    with pytest.raises(ConfigError, match=r"no folder to bind at\. Found: /usr/share\. Do: mkdir"):
        check(spec, tmp_path)
