"""Room: the table of container runtimes, and what a job's container is to each of them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worldsize.errors import ConfigError
from worldsize.launch.container import apptainer, charliecloud, docker, enroot
from worldsize.launch.container.box import CLEARED, HOSTS_OWN, Box, Rendered
from worldsize.launch.container.spec import parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from worldsize.launch.profile import Profile
    from worldsize.launch.spec import JobSpec

_RUNTIMES: dict[str, Callable[[Box], Rendered]] = {
    "apptainer": apptainer.render,
    "singularity": apptainer.singularity,
    "charliecloud": charliecloud.render,
    "docker": docker.docker,
    "podman": docker.podman,
    "enroot": enroot.render,
    "pyxis": enroot.pyxis,
}
_NO_USER_SITE = {"PYTHONNOUSERSITE": "1"}
"""Packages in the home folder are for the host's Python."""


def render(spec: JobSpec, profile: Profile) -> Rendered:
    """What stands before the node task of a job; nothing where it has no container.

    Raises:
        ConfigError: nobody says which runtime.
    """
    if spec.container is None:
        return Rendered(())
    return _RUNTIMES[runtime(spec, profile)](box(spec, profile))


def runtime(spec: JobSpec, profile: Profile) -> str:
    """What runs the container of a job.

    Raises:
        ConfigError: neither the job nor the profile names it.
    """
    found = (spec.container and spec.container.runtime) or profile.container
    if found is None:
        raise ConfigError(
            "container: which runtime is not said",
            found=f"image {spec.container.image if spec.container else ''}",
            do=f"give container.runtime, or container in the site profile: {', '.join(_RUNTIMES)}",
        )
    return found


def box(spec: JobSpec, profile: Profile) -> Box:
    """The container of a job as its runtime needs it."""
    asked = spec.container
    assert asked is not None
    gpus = asked.gpus or ("nvidia" if spec.gpus_per_node or spec.gpus_of_gres else "none")
    return Box(
        image=asked.image,
        workdir=asked.workdir or spec.chdir or "/",
        binds=tuple((*paths, mode) for paths, mode in map(parts, asked.binds)),
        env=_NO_USER_SITE | asked.env,
        gpus=gpus,
        home=asked.home,
        options=asked.options,
        kept=frozenset({*CLEARED, *HOSTS_OWN} - {"PATH"} & {*profile.env, *spec.env, *asked.env}),
    )
