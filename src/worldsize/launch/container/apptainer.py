"""Room: Apptainer, and Singularity, which is called alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worldsize.launch.container.box import Rendered

if TYPE_CHECKING:
    from worldsize.launch.container.box import Box

_GPUS = {"nvidia": ("--nv",), "amd": ("--rocm",), "none": ()}


def render(box: Box, command: str = "apptainer") -> Rendered:
    """It hands the environment in, but for PATH and LD_LIBRARY_PATH, and becomes the command."""
    binds = tuple(word for mount in box.mounts for word in ("--bind", mount))
    home = () if box.home else ("--no-home",)
    options = (*_GPUS[box.gpus], *home, *binds, "--pwd", box.workdir, *box.options)
    return Rendered((*box.outside(), command, "exec", *options, box.image, *box.inside()))


def singularity(box: Box) -> Rendered:
    """The same by its older name."""
    return render(box, "singularity")
