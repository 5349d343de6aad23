"""Room: enroot, by itself or as srun's plugin Pyxis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worldsize.launch.container.box import Rendered
from worldsize.launch.container.handed import handing

if TYPE_CHECKING:
    from worldsize.launch.container.box import Box

_THERE = ("/bin/sh", "-c", 'cd "$0" && exec "$@"')


def render(box: Box) -> Rendered:
    """It has no option for the working folder. GPUs come by its hooks, which NVIDIA_VISIBLE_DEVICES calls."""
    binds = tuple(word for mount in box.mounts for word in ("--mount", mount))
    before = ("enroot", "start", *binds, *box.options)
    return Rendered(handing(box, before, (box.image, *_THERE, box.workdir, *box.inside())))


def pyxis(box: Box) -> Rendered:
    """Options of srun; there is nothing between srun and the command, which is inside already."""
    mounts = (f"--container-mounts={','.join(box.mounts)}",) if box.mounts else ()
    home = "--container-mount-home" if box.home else "--no-container-mount-home"
    srun = (f"--container-image={box.image}", *mounts, f"--container-workdir={box.workdir}", home, *box.options)
    return Rendered(box.inside(clear=True), srun)
