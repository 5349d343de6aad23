"""Room: Docker and Podman: one container a task, with the host's network, shared memory and processes.

Our process is not the first of its own process namespace, which would not end by signals that it does not handle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from worldsize.launch.container.box import Rendered
from worldsize.launch.container.handed import handing

if TYPE_CHECKING:
    from worldsize.launch.container.box import Box

_AMD = ("--device", "/dev/kfd", "--device", "/dev/dri")
_COMMON = ("--rm", "--network=host", "--ipc=host", "--pid=host", "--ulimit", "memlock=-1")


def docker(box: Box) -> Rendered:
    """As the user, not as root: files in the run folder shall be theirs."""
    gpus = {"nvidia": ("--gpus", "all"), "amd": _AMD, "none": ()}[box.gpus]
    return _render(box, ("docker", "run", *_COMMON), gpus, '--user "$(id -u):$(id -g)"')


def podman(box: Box) -> Rendered:
    """Without root the user is the same inside as outside."""
    gpus = {"nvidia": ("--device", "nvidia.com/gpu=all"), "amd": _AMD, "none": ()}[box.gpus]
    return _render(box, ("podman", "run", *_COMMON), gpus, '$([ "$(id -u)" = 0 ] || echo --userns=keep-id)')


def _render(box: Box, run: tuple[str, ...], gpus: tuple[str, ...], user: str) -> Rendered:
    binds = tuple(word for mount in box.mounts for word in ("--volume", mount))
    before = (*run, *gpus, *binds, "--workdir", box.workdir, *box.options)
    # An image's own entry point would be given our command as its arguments.
    return Rendered(handing(box, before, ("--entrypoint=env", box.image, *box.inside()[1:]), user))
