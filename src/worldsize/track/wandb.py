"""Room: Weights & Biases: one run for all attempts, on its server, or in files for `wandb sync` where there is no way to it."""

from __future__ import annotations

import netrc
import socket
import struct
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from worldsize.errors import MissingExtraError
from worldsize.runtime import env

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from worldsize.track.base import Row, Status, Training

_SERVER = "https://api.wandb.ai"
_REACH, _FINISH = 5.0, 60.0
_BLOCK, _HEADER, _IDENT = 32768, 7, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


class WandB:
    """Writes history, settings and environment.

    Args:
        training: the run.
        project: WANDB_PROJECT, or the name of the folder that the run folder is in, where None.
        entity: WANDB_ENTITY, or the key's own, where None.
        settings: more arguments of `wandb.init`.
    """

    rewinds = False

    def __init__(
        self, training: Training, *, project: str | None = None, entity: str | None = None, **settings: Any
    ) -> None:
        try:
            with _hooks_kept():
                import wandb
        except ImportError as error:
            raise MissingExtraError.of("wandb", "wandb") from error
        said = env.read()
        mode = settings.pop("mode", None) or _mode(said)
        run = training.ids.get("id") or training.id[:16]
        how = wandb.Settings(console="off", silent=True, finish_timeout=_FINISH, save_code=False)
        offline = mode != "online"
        self.through = _next_step(training.folder / "wandb", run) if offline else 0
        attempts = [*training.ended, f"{training.attempt}: from step {training.step}"]
        about = {"run": training.id, "environment": dict(training.environment), "attempts": attempts}
        config = {**training.config, "worldsize": about}
        with _hooks_kept():
            self._run: Any = wandb.init(**{
                "mode": mode, "id": run, "dir": training.folder, "name": training.folder.name, "config": config,
                "project": project or said.get("WANDB_PROJECT") or training.folder.parent.name or "worldsize",
                "entity": entity, "resume": "allow", "reinit": "create_new", "settings": how, **settings,
            })  # fmt: skip
        if not offline:
            self.through = self._run.starting_step
        self.ids: Mapping[str, str] = {"id": run, "project": self._run.project, "mode": mode}

    def log(self, rows: Sequence[Row]) -> None:
        """A line of the history a step."""
        for row in rows:
            self._run.log({**row.values, "_timestamp": row.time}, step=row.step)

    def close(self, status: Status, words: str) -> None:
        """Code 0, or 1; one that goes on later is said to be preempted."""
        self._run.summary["status"] = words
        if status == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == "finished" else 1)


def _mode(said: Mapping[str, str]) -> str:
    """Online where there is a key and a way; nobody is ever asked."""
    asked = said.get("WANDB_MODE") or "online"
    if asked != "online":
        return asked
    address = urlsplit(said.get("WANDB_BASE_URL") or _SERVER)
    proxied = any(said.get(name) for name in ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY"))
    return "online" if _key(said, address.hostname or "") and (proxied or _answers(address)) else "offline"


def _key(said: Mapping[str, str], host: str) -> bool:
    if said.get("WANDB_API_KEY") or said.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    files = [Path(said["NETRC"])] if said.get("NETRC") else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for file in files:
        with suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(str(file)).authenticators(host):
                return True
    return False


def _answers(address: Any) -> bool:
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        with socket.create_connection((address.hostname, port), timeout=_REACH):
            return True
    except OSError:
        return False


@contextmanager
def _hooks_kept() -> Iterator[None]:
    """Its own print what failed a second time."""
    before = sys.excepthook, sys.exit
    try:
        yield
    finally:
        sys.excepthook, sys.exit = before


def _next_step(folder: Path, run: str) -> int:
    """The step after the last one in the files of a run: what its process still held when it was killed is not there."""
    for file in sorted(folder.glob(f"*run-*-{run}/*.wandb"), reverse=True):
        steps = [step for record in _records(file) if (step := _step(record)) is not None]
        if steps:
            return steps[-1] + 1
    return 0


def _step(record: bytes) -> int | None:
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    found = Record.FromString(record)
    return int(found.history.step.num) if found.HasField("history") else None


def _records(file: Path) -> Iterator[bytes]:
    """Of a file in LevelDB's log format, up to where a kill cut it."""
    parts: list[bytes] = []
    with file.open("rb") as opened:
        opened.seek(_IDENT)
        while True:
            left = _BLOCK - opened.tell() % _BLOCK
            if left < _HEADER:
                opened.seek(left, 1)
            header = opened.read(_HEADER)
            if len(header) < _HEADER:
                return
            length, kind = struct.unpack("<HB", header[4:])
            body = opened.read(length)
            if len(body) < length or kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
                return
            parts = [body] if kind in (_FULL, _FIRST) else [*parts, body]
            if kind in (_FULL, _LAST):
                yield b"".join(parts)
