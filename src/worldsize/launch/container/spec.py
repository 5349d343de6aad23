"""Room: what a job asks of its container. A value; the runtimes make command lines of it."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from worldsize.errors import ConfigError
from worldsize.launch import fields
from worldsize.launch.fields import by
from worldsize.launch.given import Given, refuse

RUNTIMES = ("apptainer", "singularity", "pyxis", "enroot", "podman", "docker", "charliecloud")
Runtime = Literal["apptainer", "singularity", "pyxis", "enroot", "podman", "docker", "charliecloud"]

_GPUS = ("nvidia", "amd", "none")


def mounts(value: Any) -> tuple[str, ...]:
    """Each "/host", "/host:/inside" or "/host:/inside:ro"."""
    found = tuple(fields.text(item) for item in fields.listed(value))
    for item in found:
        paths, mode = parts(item)
        if (
            not all(PurePosixPath(path).is_absolute() for path in paths)
            or mode not in ("", "ro", "rw")
            or "," in item
        ):
            refuse(
                f"has {item!r}",
                do="write /host, /host:/inside or /host:/inside:ro; a path with , or : cannot be bound",
            )
    return found


def parts(bind: str) -> tuple[tuple[str, str], str]:
    """(path on the host, path inside), and ro or nothing."""
    host, _, rest = bind.partition(":")
    inside, _, mode = rest.partition(":")
    return (host, inside or host), mode


class Container(Given):
    """A container. Frozen."""

    NAME: ClassVar[str] = "container"

    image: Annotated[str, by(fields.text)]
    """The image: a file or folder, or a name that the runtime fetches."""
    runtime: Annotated[Runtime | None, by(fields.choice, *RUNTIMES)] = None
    """What runs it; not given: the site profile's container."""
    binds: Annotated[tuple[str, ...], by(mounts)] = ()
    """Further paths of the host: /data, /data:/inside, /data:/inside:ro."""
    env: Annotated[dict[str, str], by(fields.variables)] = Field(default_factory=dict)
    """Variables inside, in addition to those of the job."""
    workdir: Annotated[str | None, by(fields.text)] = None
    """The working folder inside; not given: the job's."""
    gpus: Annotated[Literal["nvidia", "amd", "none"] | None, by(fields.choice, *_GPUS)] = None
    """Whose GPUs are there inside; not given: nvidia where the job has GPUs."""
    home: Annotated[bool, by(fields.flag)] = True
    """Whether the home folder is there inside: logins of trackers lie in it. Its Python packages are not used."""
    python: Annotated[str, by(fields.text)] = "python3"
    """The interpreter in the image, with worldsize."""
    options: Annotated[tuple[str, ...], by(fields.words)] = ()
    """Further options of the runtime, each as it stands: --writable-tmpfs."""


def read(value: Any) -> Container:
    """A container from its settings, or from its image alone.

    Raises:
        ConfigError: a setting is unknown or wrong.
    """
    if isinstance(value, Container):
        return value
    if isinstance(value, dict):
        return Container.of(value)
    if not isinstance(value, str):
        raise ConfigError(
            "it is neither an image nor settings", found=repr(value), do="give image, or a mapping with it"
        )
    return Container(image=value)
