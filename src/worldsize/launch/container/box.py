"""Room: what every runtime is told, and what it makes of that. Values only, and the words that all of them share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

CLEARED = (
    "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONSTARTUP", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV",
    "CONDA_EXE", "CONDA_PYTHON_EXE", "CONDA_SHLVL", "LD_PRELOAD",
)  # fmt: skip
"""Variables that speak of the host's Python: inside they would lead to other packages, or nowhere."""
LIBRARIES = "LD_LIBRARY_PATH"
HOSTS_OWN = (
    "PATH", LIBRARIES, "TMPDIR", "HOSTNAME", "PWD", "OLDPWD", "SHELL", "SHLVL", "BASH_ENV", "BASH_FUNC_*", "CONDA_*", "_",
)  # fmt: skip
"""What else stays outside where variables are handed in one by one, unless the job sets it; PATH is always the image's."""


@dataclass(frozen=True, slots=True)
class Box:
    """A container as a runtime needs it.

    Attributes:
        image, workdir, gpus ("nvidia", "amd", "none"), home, options: as in `Container`.
        binds: (path on the host, path inside, "ro" or "").
        env: variables that are set inside.
        kept: names among `CLEARED` and `HOSTS_OWN` that the job sets itself.
    """

    image: str
    workdir: str
    binds: tuple[tuple[str, str, str], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    gpus: str = "none"
    home: bool = True
    options: tuple[str, ...] = ()
    kept: frozenset[str] = frozenset()

    @property
    def mounts(self) -> tuple[str, ...]:
        """host:inside, host:inside:ro."""
        return tuple(":".join(filter(None, bind)) for bind in self.binds)

    @property
    def cleared(self) -> tuple[str, ...]:
        """Names that are taken away."""
        return tuple(name for name in CLEARED if name not in self.kept)

    def outside(self) -> tuple[str, ...]:
        """What takes the names away before a runtime that hands its whole environment in."""
        return ("env", *(word for name in self.cleared for word in ("-u", name)))

    def inside(self, *, clear: bool = False) -> tuple[str, ...]:
        """What sets variables inside: every image has `env`, and no runtime reads the values in a way of its own."""
        gone = tuple(word for name in self.cleared if clear for word in ("-u", name))
        return ("env", *gone, *(f"{name}={value}" for name, value in self.env.items()))


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a runtime makes of a box.

    Attributes:
        argv: what stands before the command that runs inside.
        srun: options of srun.
    """

    argv: tuple[str, ...]
    srun: tuple[str, ...] = ()

    def running(self, program: str) -> tuple[str, ...]:
        """The argv that executes a program inside. `env`, at the end of `argv`, would set a variable where one has an =."""
        plain = ("sh", "-c", 'exec "$0" "$@"') if self.argv and "=" in program else ()
        return (*self.argv, *plain, program)
