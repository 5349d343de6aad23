"""Room: lines that ranks leave in files for whoever started them, the exit record among them. No torch.

Launchers flatten exit codes (torchrun makes 1 of every failure), so a batch script cannot know from the code whether
the training stopped on request: `stopped <step>`. How far it got is in it too: `committed <step>`.
"""

from __future__ import annotations

import os

from worldsize.runtime import env

EXIT_FILE = "WORLDSIZE_EXIT_FILE"


def expected() -> bool:
    """Whether somebody will look for the record."""
    return bool(env.read().get(EXIT_FILE))


def stopped(step: int) -> None:
    """Everything up to `step` is committed, and the processes end because they were asked to. Safe in a handler."""
    append(EXIT_FILE, f"stopped {step}\n")


def committed(step: int) -> None:
    """Everything up to `step` is committed."""
    append(EXIT_FILE, f"committed {step}\n")


def append(name: str, line: str) -> None:
    """Add a line to the file that variable `name` names; nothing where it is not set."""
    target = env.read().get(name)
    if not target:
        return
    descriptor = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, os.fsencode(line))
    finally:
        os.close(descriptor)
