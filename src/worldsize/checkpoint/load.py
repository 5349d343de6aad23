"""Room: loading. The newest checkpoint that is whole, agreed by all ranks; each reads what it needs of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from worldsize.checkpoint import disk
from worldsize.checkpoint.facts import TensorFact
from worldsize.checkpoint.manifest import FOLDER, MANIFEST, TRAIN, Manifest, committed, read, share, step_of, verify
from worldsize.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch import Tensor

    from worldsize.runtime.comm import Comm
    from worldsize.runtime.stretch import Stretch

__all__ = ["TensorFact", "load", "load_some", "metadata", "newest", "read_train"]

T = TypeVar("T")
PATIENCE = 60.0
"""Seconds that a rank waits for a checkpoint which another rank sees already."""
_SHOWN = 3


def newest(run_dir: Path | str, comm: Comm, *, patience: float = PATIENCE) -> tuple[Path | None, list[str]]:
    """Collective. The newest committed checkpoint that verifies, and why each newer one was skipped, a line each.

    (None, []) where the run has none yet. The ranks share the reading of the files.

    Args:
        run_dir: the run folder.
        comm: the other ranks.
        patience: seconds to wait on a slow shared folder for what another rank sees already.

    Raises:
        CheckpointError: there are checkpoints, but none that verifies: training must not begin anew by itself.
    """
    comm.barrier()
    folder = Path(run_dir) / FOLDER
    names = {path.name for found in comm.gather(committed(run_dir)) for path in found}
    skipped: list[str] = []
    for name in sorted(names, key=lambda name: step_of(Path(name)) or 0, reverse=True):
        problems = _problems(folder / name, comm, patience)
        if not problems:
            return folder / name, skipped
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        skipped.append(f"skipped {folder / name}: {problems[0]}{more}")
    if skipped:
        raise CheckpointError(
            f"none of the {len(skipped)} checkpoints in {folder} can be used",
            found="; ".join(skipped),
            do="repair the folder, or start in a new run folder",
        )
    return None, []


def _problems(path: Path, comm: Comm, patience: float) -> list[str]:
    unseen = [rank for rank, seen in enumerate(comm.gather(_appears(path, patience))) if not seen]
    if unseen:
        ranks = ", ".join(map(str, unseen[:5]))
        return [f"after {patience:.0f} s rank {ranks} does not see it: the run folder must be shared by all nodes"]
    manifest, wrong = _manifest(path)
    wrong_anywhere = [problem for problems in comm.gather(wrong) for problem in problems]
    if wrong_anywhere or manifest is None:
        return list(dict.fromkeys(wrong_anywhere))
    if len(set(comm.gather(manifest.to_json()))) > 1:
        return ["the ranks read different manifests: the run folder must be shared by all nodes"]
    mine = share(manifest.files, comm.size)[comm.rank]
    return [problem for problems in comm.gather(verify(path, mine)) for problem in problems]


def _manifest(path: Path) -> tuple[Manifest | None, list[str]]:
    try:
        return read(path), []
    except CheckpointError as error:
        return None, [str(error)]


def _appears(path: Path, patience: float) -> bool:
    end, pause = time.monotonic() + patience, 0.01
    while not (path / MANIFEST).is_file():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
    return True


def read_train(path: Path | str) -> dict[str, Any]:
    """What `save` was given as `train`. Raises CheckpointError where it cannot be read."""
    file = Path(path) / TRAIN
    try:
        return cast("dict[str, Any]", json.loads(file.read_text()))
    except OSError as error:
        raise disk.explain(error, "reading", file) from error
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged", found=str(error), do="use an older checkpoint") from error


def metadata(path: Path | str) -> dict[str, TensorFact]:
    """Shape and dtype of every saved tensor by name, tied ones under each of their names. Raises CheckpointError."""
    from worldsize.checkpoint import store

    path = Path(path)
    return _with_aliases(store.facts_of(store.read_metadata(path)), read(path).aliases)


def load(
    path: Path | str,
    tensors: Mapping[str, Tensor | Stretch],
    comm: Comm,
    *,
    scattered: bool = False,
    left: tuple[str, ...] = (),
) -> None:
    """Collective. Fill these tensors in place from a checkpoint, whatever layout wrote it.

    Strict: the names, shapes and dtypes must be those of the checkpoint. Each rank reads only the pieces it needs.

    Args:
        path: a committed checkpoint that was verified (see `newest`).
        tensors: name -> replicated tensor, DTensor or stretch of a tensor, on any device.
        comm: the other ranks.
        scattered: whether ranks want tensors of different names: together they want all.
        left: what names begin with that nobody needs to want.

    Raises:
        CheckpointError: on every rank, naming the rank, with the counts of what is missing or unexpected. After a
            failed read the tensors are partly filled.
    """
    wanted = {name for names in comm.gather(set(tensors)) for name in names} if scattered else tensors.keys()
    answers = comm.gather(_told(lambda: _load(Path(path), tensors, wanted, left=left)))
    failed = [(rank, error) for rank, error in enumerate(answers) if error]
    if not failed:
        return
    rank, error = failed[0]
    where = f"rank {rank}: " if comm.size > 1 else ""
    raise CheckpointError(f"{where}{error.what}", found=error.found, do=error.do)


def _told(work: Callable[[], None]) -> CheckpointError | None:
    try:
        work()
    except CheckpointError as error:
        return error
    except Exception as error:  # noqa: BLE001 whatever it is, the other ranks must hear of it
        return CheckpointError(f"loading failed: {type(error).__name__}: {error}")
    return None


def load_some(path: Path, tensors: Mapping[str, Tensor | Stretch], *, convert: bool = False) -> None:
    """Local. Like `load`, from a checkpoint that may hold other tensors besides, and of other dtypes where `convert`."""
    if problem := _told(lambda: _load(path, tensors, None, convert=convert)):
        raise problem


def _load(
    path: Path,
    tensors: Mapping[str, Tensor | Stretch],
    wanted: Collection[str] | None,
    *,
    convert: bool = False,
    left: tuple[str, ...] = (),
) -> None:
    """Of a checkpoint that must hold what is wanted and nothing else but what is left, where that is said."""
    from worldsize.checkpoint import store

    manifest, saved = read(path), store.read_metadata(path)
    if strangers := store.files_of(saved) - manifest.files.keys():
        raise CheckpointError(f"{path} names files that its manifest does not", found=", ".join(sorted(strangers)))
    facts = _with_aliases(store.facts_of(saved), manifest.aliases)
    needed = {name: fact for name, fact in facts.items() if not name.startswith(left)}
    _complete(path, tensors if wanted is None else wanted, needed, others=wanted is None)
    _alike(path, tensors, facts, convert=convert)
    for part in _rounds(tensors, manifest.aliases):
        store.read(path, saved, part)


def _rounds(tensors: Mapping[str, Tensor | Stretch], aliases: Mapping[str, str]) -> list[dict[str, Tensor | Stretch]]:
    """Tied tensors were saved once: a read for each of the tensors that take the same name of the checkpoint."""
    rounds: list[dict[str, Tensor | Stretch]] = []
    for name, tensor in tensors.items():
        source = aliases.get(name, name)
        free = next((part for part in rounds if source not in part), None)
        if free is None:
            rounds.append(free := {})
        free[source] = tensor
    return rounds


def _with_aliases(facts: dict[str, TensorFact], aliases: Mapping[str, str]) -> dict[str, TensorFact]:
    return facts | {name: facts[first] for name, first in aliases.items() if first in facts}


def _complete(path: Path, wanted: Collection[str], saved: Mapping[str, TensorFact], *, others: bool) -> None:
    missing, unexpected = set(wanted) - saved.keys(), set() if others else saved.keys() - set(wanted)
    if missing or unexpected:
        raise CheckpointError(
            f"{path} holds other tensors than this training",
            found=f"{_some(missing, 'are not in it')}; {_some(unexpected, 'are only in it')}; "
            f"{len(saved.keys() & set(wanted))} names are in both",
            do="resume with the model and the optimizer it was written with, or load its weights only",
        )


def _alike(
    path: Path, tensors: Mapping[str, Tensor | Stretch], saved: Mapping[str, TensorFact], *, convert: bool
) -> None:
    here = {
        name: TensorFact(tuple(tensor.shape), saved[name].dtype if convert else tensor.dtype)
        for name, tensor in tensors.items()
    }
    other = [name for name, fact in here.items() if fact != saved[name]]
    if other:
        name = other[0]
        raise CheckpointError(
            f"{path} holds {len(other)} tensors of other shape or dtype, such as {name}",
            found=f"{list(saved[name].shape)} {saved[name].dtype} saved, "
            f"{list(tensors[name].shape)} {tensors[name].dtype} here",
            do="resume with the model it was written with",
        )


def _some(names: Collection[str], what: str) -> str:
    shown = f" ({', '.join(sorted(names)[:_SHOWN])}{', …' if len(names) > _SHOWN else ''})" if names else ""
    return f"{len(names)} {what}{shown}"
