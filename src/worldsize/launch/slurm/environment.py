"""Room: what a batch script sets up before its step: modules, variables, virtual environment, commands. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worldsize.launch.profile import Profile
    from worldsize.launch.spec import JobSpec


def environment(spec: JobSpec, profile: Profile) -> Iterator[str]:
    """The lines of bash."""
    for module in (*profile.modules, *spec.modules):
        yield f"module load {shlex.quote(module)} || exit 2"
    for name, value in {**profile.env, **spec.env}.items():
        yield f"export {name}={shlex.quote(value)}"
    if spec.venv:
        yield f"source {shlex.quote(f'{spec.venv}/bin/activate')} || exit 2"
    yield from spec.setup
