"""Room: the bash that hands variables in one by one, where a runtime begins with the image's alone.

Their names are known on the node only: Slurm sets others for each task. Its own variables begin with __: a job's of the same
name would be changed.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from worldsize.launch.container.box import HOSTS_OWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worldsize.launch.container.box import Box


def handing(box: Box, before: Sequence[str], after: Sequence[str], raw: str = "") -> tuple[str, ...]:
    """The argv that executes `before`, `raw` as bash reads it, "--env NAME" for each variable, `after`, the command."""
    left_out = "|".join((*box.cleared, *(name for name in HOSTS_OWN if name not in box.kept)))
    lines = (
        f"__run=({shlex.join(before)} {raw})",
        "for __name in $(compgen -e); do",
        f'case "$__name" in {left_out}) ;; *) __run+=(--env "$__name") ;; esac',
        "done",
        f'exec "${{__run[@]}}" {shlex.join(after)} "$@"',
    )
    return ("/bin/bash", "-c", "\n".join(lines), "worldsize")
