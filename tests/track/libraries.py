"""Room: what each library says about a run, read by its own means: name -> step -> value, and the steps as they come."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worldsize.train.folder import RunFolder


@dataclass(slots=True)
class Found:
    """What a library has.

    Attributes:
        runs: how many runs it knows where this one is.
        status: its word for how it ended.
        history: name -> (step, value) as it is read, nothing sorted.
    """

    runs: int
    status: str
    history: dict[str, list[tuple[int, float]]] = field(default_factory=dict)


def tensorboard(folder: Path) -> Found:
    """By the accumulator that its server uses."""
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    several = EventMultiplexer(size_guidance={"scalars": 0}).AddRunsFromDirectory(str(folder / "tensorboard"))
    several.Reload()
    one = _accumulator(folder)
    said = HParamsPluginData.FromString(one.SummaryMetadata("_hparams_/session_end_info").plugin_data.content)
    return Found(len(several.Runs()), str(said.session_end_info.status), tensorboard_history(folder))


def tensorboard_history(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Its scalars."""
    one = _accumulator(folder)
    return {name: [(event.step, event.value) for event in one.Scalars(name)] for name in one.Tags()["scalars"]}


def tensorboard_texts(folder: Path) -> dict[str, str]:
    """Its texts, all of one name together."""
    one, end = _accumulator(folder), "/text_summary"
    return {
        name.removesuffix(end): "\n".join(event.tensor_proto.string_val[0].decode() for event in one.Tensors(name))
        for name in one.Tags()["tensors"]
        if name.endswith(end)
    }


def _accumulator(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return found


def mlflow(folder: Path) -> Found:
    """By its client."""
    from mlflow import MlflowClient

    kept = RunFolder(folder).read()["trackers"]["mlflow"]
    client: Any = MlflowClient(tracking_uri=kept["uri"])
    run = client.get_run(kept["run_id"])
    history = {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(kept["run_id"], name)]
        for name in run.data.metrics
    }
    return Found(len(client.search_runs([run.info.experiment_id])), run.info.status, history)


def wandb(folder: Path) -> Found:
    """By its own reader of the files that `wandb sync` sends, in the order in which it sends them."""
    tool = Path(sys.executable).with_name("wandb")
    runs, status, history = set(), "", {}  # type: ignore[var-annotated]
    for file in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        done = subprocess.run([tool, "leet", "inspect", "--json", file], capture_output=True, text=True, check=False)
        for record in map(json.loads, done.stdout.splitlines()):
            if record["type"] == "run":
                runs.add(record["run"]["run_id"])
            if record["type"] == "exit":
                status = f"exit {record['exit'].get('exit_code', 0)}"
            if record["type"] == "history":
                for name, value in record["history"]["item"].items():
                    if not name.startswith("_"):
                        history.setdefault(name, []).append((record["history"]["step"].get("num", 0), value))
    return Found(len(runs), status, history)


def as_float32(value: float) -> float:
    """What is left of a number in TensorBoard's files."""
    found: float = struct.unpack("f", struct.pack("f", value))[0]
    return found
