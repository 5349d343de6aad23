"""Room: TensorBoard's event files. Each attempt has a file of its own, which begins by taking back what does not hold."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldsize.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from worldsize.track.base import Row, Status, Training

_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\..*")
_ENVIRONMENT, _CONFIG, _ENDED = "run/environment", "run/config", "run/attempts"


class TensorBoard:
    """Writes scalars, the settings as text and hyperparameters, and how the attempts ended.

    Args:
        training: the run.
        folder: for the event files; `tensorboard` in the run folder where None.
    """

    rewinds = True

    def __init__(self, training: Training, *, folder: str | Path | None = None) -> None:
        try:
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise MissingExtraError.of("tensorboard", "tensorboard") from error
        place = training.folder / "tensorboard" if folder is None else Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        self.ids: Mapping[str, str] = {"folder": str(place)} if folder is not None else {"folder": "tensorboard"}
        before = _files(place)
        self.through = min(training.step, _next_step(before[-1])) if before else 0
        # Readers take files in the order of the seconds in their names, whatever the clocks of two hosts say.
        second = max(int(time.time()), _second(before[-1]) + 1) if before else int(time.time())
        name = f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}.{training.attempt}"
        self._writer = RecordWriter((place / name).open("wb"))
        self._begin(training)

    def log(self, rows: Sequence[Row]) -> None:
        """An event a step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for row in rows:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
            self._event(step=row.step, wall_time=row.time, summary=Summary(value=values))
        self._writer.flush()

    def close(self, status: Status, words: str) -> None:
        """The status goes to the hyperparameters' page."""
        self._event(summary=_session_end(status))
        self._text(_ENDED, f"{status}: {words}")
        self._writer.close()

    def _begin(self, training: Training) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from torch.utils.tensorboard import summary

        self._event(file_version="brain.Event:2")
        self._event(step=self.through, session_log=SessionLog(status=SessionLog.START))
        plain = {name: _plain(value) for name, value in training.config.items() if value is not None}
        experiment, session, _ = summary.hparams(plain, {"loss": 0.0})
        self._event(summary=experiment)
        self._event(summary=session)
        self._text(_CONFIG, _table(training.config))
        self._text(_ENVIRONMENT, _table(training.environment))
        if training.ended:
            self._text(_ENDED, "\n\n".join(training.ended))
        self._writer.flush()

    def _text(self, tag: str, words: str) -> None:
        from torch.utils.tensorboard import summary

        self._event(step=self.through, summary=summary.text(tag, words))

    def _event(self, **parts: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.write(Event(**{"wall_time": time.time(), **parts}).SerializeToString())


def _files(folder: Path) -> list[Path]:
    """Event files as their readers sort them."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def _second(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def _next_step(path: Path) -> int:
    """The step after the last one with numbers in a file; the one that the file begins at where there are none."""
    following = 0
    for event in _events(path):
        if event.HasField("session_log"):
            following = event.step
        elif any(value.HasField("simple_value") for value in event.summary.value):
            following = event.step + 1
    return following


def _events(path: Path) -> Iterator[Any]:
    """Up to where a kill cut it."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    yield from LegacyEventFileLoader(str(path)).Load()


def _session_end(status: Status) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.hparams import api_pb2, metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    ends = {"finished": api_pb2.STATUS_SUCCESS, "stopped": api_pb2.STATUS_UNKNOWN, "failed": api_pb2.STATUS_FAILURE}
    info = SessionEndInfo(status=ends[status], end_time_secs=time.time())
    data = HParamsPluginData(session_end_info=info, version=metadata.PLUGIN_DATA_VERSION)
    about = SummaryMetadata(
        plugin_data=SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME, content=data.SerializeToString())
    )
    return Summary(value=[Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=about)])


def _plain(value: Any) -> bool | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)


def _table(values: Mapping[str, Any]) -> str:
    lines = [f"| {name} | {str(value).replace('|', ' ')} |" for name, value in values.items()]
    return "\n".join(["| | |", "|---|---|", *lines])
