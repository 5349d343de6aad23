"""Room: MLflow: one run of its store for all attempts. A store only appends, so it gets what stays."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from worldsize.errors import MissingExtraError
from worldsize.runtime import env

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from worldsize.track.base import Row, Status, Training

_STORE = "mlflow.db"
_MOST = 1000
"""Numbers that a server takes at once."""
_LONG = 5000
"""Characters of a tag."""
_THROUGH, _RUN, _STATUS, _ATTEMPTS = "worldsize.through", "worldsize.run", "worldsize.status", "worldsize.attempts"


class MLflow:
    """Writes metrics, settings as parameters, everything else as tags.

    Args:
        training: the run.
        uri: of the server or store; MLFLOW_TRACKING_URI, or `mlflow.db` beside the run folder, where None.
        experiment: its name; MLFLOW_EXPERIMENT_NAME, or that of the folder that the run folder is in, where None.
    """

    rewinds = False

    def __init__(self, training: Training, *, uri: str | None = None, experiment: str | None = None) -> None:
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise MissingExtraError.of("mlflow", "mlflow") from error
        said, beside = env.read(), training.folder.parent
        place = uri or said.get("MLFLOW_TRACKING_URI") or ""
        if not place:
            place = f"sqlite:///{_made(beside / _STORE, training.folder / f'{_STORE}.new')}"
        # Its classes show half of what they take to type checkers.
        self._client: Any = MlflowClient(tracking_uri=place)
        name = experiment or said.get("MLFLOW_EXPERIMENT_NAME") or beside.name or "worldsize"
        local = place.startswith("sqlite:")
        self._artifacts = (beside / "mlartifacts").as_uri() if local else None
        self._id = training.ids.get("run_id") or self._find(training, name)
        self.ids: Mapping[str, str] = {"run_id": self._id, "uri": place}
        known = self._client.get_run(self._id).data
        self.through = int(known.tags.get(_THROUGH, 0))
        self._tell(training, known.params)

    def log(self, rows: Sequence[Row]) -> None:
        """Metrics, and then up to where they go: sent again after a kill in between, they are the same rows."""
        from mlflow.entities import Metric

        pending: list[Any] = []
        for row in rows:
            at = round(row.time * 1000)
            pending += [Metric(_name(name), value, at, row.step) for name, value in row.values.items()]
        for first in range(0, len(pending), _MOST):
            self._client.log_batch(self._id, metrics=pending[first : first + _MOST])
        self._client.set_tag(self._id, _THROUGH, str(rows[-1].step + 1))

    def close(self, status: Status, words: str) -> None:
        """Finished, failed, or killed, which here is also one that was asked to stop."""
        self._client.set_tag(self._id, _STATUS, words[:_LONG])
        ends = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
        self._client.set_terminated(self._id, ends[status])

    def _find(self, training: Training, name: str) -> str:
        """The run that an attempt made and could not write down any more, or a new one."""
        known = self._client.get_experiment_by_name(name)
        if known is None:
            experiment = self._client.create_experiment(name, artifact_location=self._artifacts)
        else:
            experiment = known.experiment_id
        found = self._client.search_runs([experiment], f"tags.`{_RUN}` = '{training.id}'", max_results=1)
        if found:
            return str(found[0].info.run_id)
        made = self._client.create_run(experiment, tags={_RUN: training.id}, run_name=training.folder.name)
        return str(made.info.run_id)

    def _tell(self, training: Training, known: Mapping[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        # A parameter never changes: what a later attempt sets otherwise is a tag.
        config = {_name(name): str(value) for name, value in training.config.items()}
        fresh = [Param(name, value[:_LONG]) for name, value in config.items() if name not in known]
        tags = {f"config.{name}": value for name, value in config.items() if known.get(name, value) != value}
        tags |= dict(_tags(training))
        self._client.log_batch(
            self._id, params=fresh, tags=[RunTag(_name(name), value[:_LONG]) for name, value in tags.items()]
        )
        self._client.update_run(self._id, status="RUNNING")


def _made(store: Path, new: Path) -> Path:
    """The store, made whole under another name first: one whose making was killed never opens again."""
    from mlflow import MlflowClient

    for name in ("mlflow.store.db.utils", "alembic.runtime.migration"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if not store.exists():
        new.unlink(missing_ok=True)
        client: Any = MlflowClient(tracking_uri=f"sqlite:///{new}")
        client.search_experiments(max_results=1)
        with suppress(FileExistsError):  # another run was faster
            os.link(new, store)
        new.unlink()
    return store


def _tags(training: Training) -> Iterator[tuple[str, str]]:
    for name, value in training.environment.items():
        yield f"environment.{name}", str(value)
    code = training.environment.get("code") or {}
    if code.get("commit"):
        yield "mlflow.source.git.commit", code["commit"]
    if code.get("program"):
        yield "mlflow.source.name", code["program"]
    yield _STATUS, f"resumed at step {training.step}" if training.attempt else "running"
    yield _ATTEMPTS, "\n".join([*training.ended, f"{training.attempt}: from step {training.step}"])


def _name(text: str) -> str:
    """A name that MLflow takes: letters, digits, and a few signs."""
    return "".join(sign if sign.isalnum() or sign in "_-. :/" else "_" for sign in text)
