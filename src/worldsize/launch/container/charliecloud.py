"""Room: Charliecloud: an image is a folder or a SquashFS file; ch-run becomes the command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worldsize.launch.container.box import LIBRARIES, Rendered

if TYPE_CHECKING:
    from worldsize.launch.container.box import Box

_USER = ("/bin/sh", "-c", 'USER=${USER:-$(id -un)} exec "$@"', "sh")
"""ch-run does nothing where it is not set."""


def render(box: Box) -> Rendered:
    """Libraries of GPUs are put into the image beforehand (ch-fromhost)."""
    binds = tuple(word for mount in box.mounts for word in ("-b", mount.removesuffix(":ro")))
    libraries = () if LIBRARIES in box.kept else ("--unset-env", LIBRARIES)
    options = (*libraries, *binds, "-c", box.workdir, *box.options)
    return Rendered((*_USER, *box.outside(), "ch-run", *options, box.image, "--", *box.inside()))
