"""Room: what a task of a step does on its node before anything is started: compares, warns, copies, sets variables."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError
from worldsize.launch import fingerprint, secrets, staging, threads
from worldsize.launch.slurm import facts
from worldsize.launch.staging import Stage

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from worldsize.launch.slurm.ways import Work
    from worldsize.world import World

_POLL_S = 0.5
FINGERPRINT = "WORLDSIZE_FINGERPRINT"
"""The variable that names the file of the environment's fingerprint."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a job asks of its nodes.

    Attributes:
        secrets: the file with them.
        stage: what is copied to the node's own disk: absolute.
        venv: an archive of a virtual environment that is unpacked there.
        fingerprint: the file with the one at submit; written here where there is none.
        code: the folder whose commit belongs to it.
        strict: refuse another environment instead of saying so.
    """

    secrets: Path | None = None
    stage: tuple[str, ...] = ()
    venv: str | None = None
    fingerprint: Path | None = None
    code: Path | None = None
    strict: bool = False


def look(asked: Asked, world: World, environ: Mapping[str, str]) -> list[str]:
    """What is to be said before anything begins: once a job of its environment, once a node of its CPUs.

    Raises:
        ConfigError: the environment is another one, and that was to be refused.
    """
    lines = _compared(asked.fingerprint, asked) if asked.fingerprint and world.rank == 0 else []
    narrow = threads.narrow(environ, len(os.sched_getaffinity(0))) if world.local_rank == 0 else None
    return [*lines, *([f"{socket.gethostname()}: {narrow}"] if narrow else [])]


def variables(asked: Asked) -> dict[str, str]:
    """What the ranks are told, besides their place."""
    told = {} if asked.fingerprint is None else {FINGERPRINT: str(asked.fingerprint)}
    return told | (secrets.read(asked.secrets) if asked.secrets else {})


def staged(asked: Asked, world: World, environ: Mapping[str, str], meet: Path) -> Stage | None:
    """The copies on this node, when all nodes have theirs; None where nothing is to be copied.

    No node waits for another with a limit of its own: how long copies take is not known.

    Args:
        asked: what.
        world: where this task stands.
        environ: of the task.
        meet: a path, of this attempt alone, in a folder that all nodes share.

    Raises:
        LaunchError: something cannot be copied.
    """
    if not asked.stage and asked.venv is None:
        return None
    stage = Stage(f"{meet.name}-{socket.gethostname()}", asked.stage, asked.venv)
    done = meet.with_name(f"{meet.name}.staged")
    if world.local_rank == 0:
        began = time.monotonic()
        stage.fill(environ)
        stage.gather(world.local_size)
        sys.stderr.write(f"worldsize: {socket.gethostname()}: staged in {time.monotonic() - began:.1f} s\n")
        done.mkdir(exist_ok=True)
        (done / str(world.node)).touch()
    else:
        stage.wait(world.local_rank)
    while len(list(done.glob("*"))) < world.nodes:
        time.sleep(_POLL_S)
    return stage


def placed(work: Work, stage: Stage, *, venv: bool) -> Work:
    """The work with the copies' folder in its words, by the interpreter that was unpacked."""
    words = tuple(word.replace(staging.PLACE, str(stage.path)) for word in work.program)
    template = work.template and work.template.replace(staging.PLACE, str(stage.path))
    return replace(work, program=words, template=template, python=str(stage.python) if venv else work.python)


def _compared(path: Path, asked: Asked) -> list[str]:
    now = fingerprint.take(asked.code)
    try:
        then = fingerprint.read(facts.get(path))
    except FileNotFoundError:
        facts.put(path, now)
        return []
    lines = fingerprint.differences(then, now)
    if lines and asked.strict:
        raise ConfigError(
            "the environment is not the one at submit, and strict_env is set",
            found="; ".join(lines),
            do="submit again, or bring it back",
        )
    return ["the environment is not the one at submit:", *(f"  {line}" for line in lines)] if lines else []
