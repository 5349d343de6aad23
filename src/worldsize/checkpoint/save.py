"""Room: saving. Stop the training for a copy, write in the background, commit by one rename when all ranks are done.

Every rank runs the same steps in a thread of its own and tells the others, before each next step, whether it got
through: so a rank that fails ends the save everywhere, and nobody waits for it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from worldsize import __version__
from worldsize.checkpoint import disk, retain, stage
from worldsize.checkpoint.manifest import FOLDER, MANIFEST, TRAIN, Manifest, folder_name
from worldsize.checkpoint.retain import Keep
from worldsize.errors import CheckpointError, OwnershipError, WorldsizeError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from torch import Tensor

    from worldsize.checkpoint import store
    from worldsize.checkpoint.disk import FileFact
    from worldsize.checkpoint.owner import Owner
    from worldsize.runtime.comm import Comm

    _Signature = tuple[tuple[Any, ...], stage.Ties]

T = TypeVar("T")
_MEMORY = "worldsize-save-memory"
_PATIENCE_S = 30.0
"""So long a failed process waits for its first save at most."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a save ended; equal on all ranks but for the times."""

    step: int
    path: Path
    error: WorldsizeError | None
    """None where the checkpoint is committed."""
    bytes: int
    """Size of all its files."""
    seconds: float
    """From the call of `save` to the end."""
    stall: float
    """Seconds of it in which the training stood still."""
    removed: tuple[int, ...] = ()
    """Steps whose checkpoints were deleted afterwards."""
    note: str | None = None
    """What went wrong after the commit, without harm to it."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a save will need."""

    bytes: int
    """Size of one checkpoint."""
    free: int | None
    """Free bytes where it goes; None where they cannot be told."""

    @property
    def fits(self) -> bool:
        """Whether one checkpoint fits there now."""
        return self.free is None or self.bytes <= self.free


@dataclass(frozen=True, slots=True)
class _Answer(Generic[T]):
    value: T | None
    error: WorldsizeError | None = None


@dataclass(frozen=True, slots=True)
class _Done:
    bytes: int = 0
    removed: tuple[int, ...] = ()
    note: str | None = None


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the ranks agreed on, for as long as every rank's tensors keep their signature."""

    signature: _Signature
    aliases: dict[str, str]
    agreed: store.Agreed


@dataclass(frozen=True, slots=True)
class _Request:
    step: int
    train: dict[str, str]
    """Key -> its value, as text of JSON. In one line: Python's fast encoder makes no others, and the training waits for it."""
    facts: Mapping[str, Any]

    @property
    def text(self) -> str:
        """All of it, for people."""
        whole = {key: json.loads(value) for key, value in self.train.items()}
        return json.dumps(whole, indent=1, sort_keys=True) + "\n"


@dataclass(frozen=True, slots=True)
class _Job:
    request: _Request
    number: int
    layout: _Layout
    problem: WorldsizeError | None
    began: float
    stall: float


class Checkpointer:
    """Saves the training of one run folder. All ranks make one, and call its collective methods in the same order.

    Args:
        run_dir: the run folder.
        comm: the other ranks. A second channel to them is forked for the background.
        owner: the claim on the run folder, on the one rank that holds it; None on the others.
        keep: which checkpoints stay.
        synchronous: let the training wait for every save.
        on_error: what the next collective call does about a failed save: raise its error, or go on. A run folder
            taken over by another attempt always raises.
        scattered: whether ranks hold tensors of different names, as the stages of a pipeline do.

    Raises:
        CheckpointError: not exactly one rank owns the run folder.
    """

    def __init__(
        self,
        run_dir: Path,
        comm: Comm,
        *,
        owner: Owner | None,
        keep: Keep | None = None,
        synchronous: bool = False,
        on_error: Literal["stop", "continue"] = "continue",
        scattered: bool = False,
    ) -> None:
        self._run_dir, self._comm, self._owner = run_dir, comm, owner
        self._keep = keep or Keep()
        self._synchronous, self._on_error, self._scattered = synchronous, on_error, scattered
        self._token, self._lead = _leader(comm, owner)
        self._background = comm.fork()
        self._layout: _Layout | None = None
        self._staging: stage.Staging | None = None
        self._thread: threading.Thread | None = None
        self._outcomes: deque[Outcome] = deque()
        self._unsaid: WorldsizeError | None = None
        self._last: _Request | None = None
        self._count = 0
        self.slowest = 0.0
        """Seconds that the slowest save took so far."""

    def prepare(self, tensors: Mapping[str, Tensor], *, memory: bool = True) -> Estimate:
        """Collective. Plan the saves of these tensors and make their host memory ready in the background.

        Without it the first save does so.

        Args:
            tensors: as for `save`.
            memory: False where no save is near: memory is held from when it is made, and the device waits for a part of that.

        Returns:
            how large a checkpoint will be and how much space there is.
        """
        layout = self._meet(tensors, _Answer(None))
        if memory:
            self._thread = threading.Thread(
                target=lambda: _captured(lambda: self._ready(tensors, layout, gently=True)),
                name=_MEMORY,
                daemon=True,
            )
            self._thread.start()
        size = sum(layout.agreed.bytes(rank) for rank in range(self._comm.size))
        return Estimate(size, disk.free(self._run_dir))

    def save(
        self, tensors: Mapping[str, Tensor], train: dict[str, Any], facts: Mapping[str, Any], *,
        later: Collection[str] = (), wait: bool = False,
    ) -> None:  # fmt: skip
        """Collective. Begin a save; the training may change its tensors when this returns, but for those of `later`.

        Waits first for a save under way. A repeated call with the same step, facts and `train` after a committed
        save does nothing. How it ended is told by `poll` or `wait`.

        Args:
            tensors: name -> replicated tensor or DTensor, the same names on every rank.
            train: plain values (as of JSON), equal on all ranks.
            facts: `step`, `epoch`, `samples`, `layout`, `exact`, and what else the manifest should say;
                `best=True` marks the checkpoint as the best so far.
            later: names of tensors that the training leaves alone until it has called `hold`: their copies may run beside it.
            wait: return only when it is over.

        Raises:
            CheckpointError: on every rank: ranks disagree, `train` is not plain, a tensor is not dense, or not all
                ranks came here; with on_error="stop" also the error of an earlier save (of this one if waiting).
            OwnershipError: another attempt has taken the run folder over.
        """
        began = time.monotonic()
        self._settle()
        request, problem = _captured(lambda: _request(train, facts))
        layout = self._meet(tensors, _Answer(_fingerprint(request), problem))
        assert request is not None
        if request == self._last:
            return
        _, failed = _captured(lambda: self._ready(tensors, layout).fill(tensors, later))
        job = _Job(request, self._count, layout, failed, began, time.monotonic() - began)
        self._count += 1
        self._thread = threading.Thread(
            target=self._run, args=(job,), name=f"worldsize-save-{request.step}", daemon=True
        )
        self._thread.start()
        if wait or self._synchronous:
            self._settle()

    def hold(self) -> None:
        """Local and cheap: from now on the tensors of `later` may be changed. For before each change of them."""
        if self._staging is not None:
            self._staging.hold()

    def poll(self) -> list[Outcome]:
        """Local and cheap: the saves that ended since the last `poll` or `wait`."""
        found: list[Outcome] = []
        with suppress(IndexError):
            while True:
                found.append(self._outcomes.popleft())
        return found

    @property
    def busy(self) -> bool:
        """Whether a save is under way on this rank."""
        return self._thread is not None and self._thread.name != _MEMORY and self._thread.is_alive()

    def wait(self) -> list[Outcome]:
        """Collective. Wait for the save under way and return what `poll` would. Raises as `save` does."""
        self._settle()
        return self.poll()

    def mark_best(self, step: int) -> None:
        """Say that the checkpoint of this step is the best so far, after it was saved."""
        if self._owner:
            retain.mark_best(self._run_dir, step)

    def finish(self) -> None:
        """Local. Before a process ends that has failed: let a save under way end, if that takes no longer than saves do.

        Raises nothing. The others may be silent for ever: a failed rank must not wait for them.
        """
        if self._thread is not None and self.busy:
            self._thread.join(max(_PATIENCE_S, 2 * self.slowest))

    def close(self) -> None:
        """Collective. Wait for the save under way and give everything back. Raises nothing: see `poll`."""
        if self._thread:
            self._thread.join()
        self._drop_staging()
        self._background.close()

    def _settle(self) -> None:
        if self._thread:
            self._thread.join()
            self._thread = None
        error, self._unsaid = self._unsaid, None
        if error and (self._on_error == "stop" or isinstance(error, OwnershipError)):
            raise error

    def _meet(self, tensors: Mapping[str, Tensor], answer: _Answer[Any]) -> _Layout:
        """The ranks meet: they hear whether all can go on, and agree anew on who writes what where that changed."""
        signature, problem = _captured(lambda: _signature(tensors))
        if problem:
            answer = _Answer(None, problem)
        changed = self._layout is None or self._layout.signature != signature
        try:
            met = self._comm.gather((answer, changed))
        except RuntimeError as error:
            do = "call it on every rank, at the same step"
            raise CheckpointError("not all ranks came to this save", found=str(error), do=do) from error
        _raise_first([answer for answer, _ in met])
        _same([answer.value for answer, _ in met])
        if self._layout is None or any(changed for _, changed in met):
            assert signature is not None
            self._layout = self._lay_out(tensors, signature)
        return self._layout

    def _lay_out(self, tensors: Mapping[str, Tensor], signature: _Signature) -> _Layout:
        from worldsize.checkpoint import store

        self._drop_staging()
        met = self._comm.gather((sorted(tensors), signature[1]))
        if not self._scattered:
            _same_names([names for names, _ in met])
        everyone = {name for names, _ in met for name in names}
        aliases = stage.agreed_ties(
            [(pairs, unknown | everyone.difference(names)) for names, (pairs, unknown) in met]
        )
        whole = {name: tensor for name, tensor in tensors.items() if name not in aliases}
        answers = self._comm.gather(_Answer(*_captured(lambda: store.propose(whole))))
        _raise_first(answers)
        return _Layout(
            signature, aliases, store.agree([answer.value for answer in answers if answer.value is not None])
        )

    def _ready(self, tensors: Mapping[str, Tensor], layout: _Layout, *, gently: bool = False) -> stage.Staging:
        if self._staging is None:
            plan = layout.agreed.plans[self._comm.rank]
            self._staging = stage.Staging(plan, stage.cuda_device(tensors), gently=gently)
        return self._staging

    def _drop_staging(self) -> None:
        if self._staging:
            self._staging.close()
            self._staging = None

    def _run(self, job: _Job) -> None:
        final = self._run_dir / FOLDER / folder_name(job.request.step)
        done = _Done()
        error: WorldsizeError | None = None
        try:
            done = self._write(job, final)
            self._last = job.request
        except WorldsizeError as failure:
            error = self._unsaid = failure
        except Exception as failure:  # noqa: BLE001 a thread has nobody else to tell
            error = self._unsaid = CheckpointError(f"saving {final} failed", found=_told(failure))
        seconds = time.monotonic() - job.began
        self.slowest = max(self.slowest, seconds)
        self._outcomes.append(
            Outcome(job.request.step, final, error, done.bytes, seconds, job.stall, done.removed, done.note)
        )

    def _write(self, job: _Job, final: Path) -> _Done:
        tmp = retain.hidden(self._run_dir, job.request.step, f"{self._token}-{job.number}", retain.TMP)
        try:
            self._together(final, lambda: _open(tmp, job.problem))
            written = self._together(final, lambda: self._pieces(tmp, job))
            return self._by_owner(final, lambda: self._commit(tmp, final, job, written))
        except BaseException:
            if self._owner:
                shutil.rmtree(tmp, ignore_errors=True)
            raise

    def _pieces(self, tmp: Path, job: _Job) -> tuple[store.Written, dict[str, FileFact]]:
        from worldsize.checkpoint import store

        assert self._staging is not None
        self._staging.arrive()
        written, facts = store.write(tmp, job.layout.agreed.plans[self._comm.rank], self._staging.copies)
        _read_back(tmp, facts)
        if self._staging.torn:
            raise CheckpointError(
                "the optimizer's state was changed while it was copied",
                found="a change after the step that is saved and before the next update",
                do="change it after step.update(), or save with Saving(synchronous=True)",
            )
        return written, facts

    def _commit(
        self, tmp: Path, final: Path, job: _Job, written: list[tuple[store.Written, dict[str, FileFact]]]
    ) -> _Done:
        """Only on the owner: what makes the folder a checkpoint, and then what need not stay."""
        from worldsize.checkpoint import store

        assert self._owner is not None
        files = {name: fact for _, facts in written for name, fact in facts.items()}
        _here(tmp, files)
        files[store.METADATA] = store.write_metadata(tmp, job.layout.agreed, [places for places, _ in written])
        files[TRAIN] = disk.write(tmp / TRAIN, job.request.text)
        _read_back(tmp, {name: files[name] for name in (store.METADATA, TRAIN)})
        manifest = _manifest(job, files, self._owner.attempt)
        disk.write(tmp / MANIFEST, manifest.to_json())
        disk.sync(tmp)
        self._owner.check()
        retain.place(tmp, final)
        removed, problem = _captured(lambda: tuple(retain.prune(self._run_dir, self._keep, job.request.step)))
        return _Done(manifest.bytes, removed or (), f"deleting old checkpoints: {problem}" if problem else None)

    def _together(self, final: Path, work: Callable[[], T]) -> list[T]:
        """Every rank does its part; all learn whether all got through."""
        answers = self._background.gather(_Answer(*_captured(work, final)))
        _raise_first(answers)
        return [answer.value for answer in answers]  # type: ignore[misc]  # without an error there is a value

    def _by_owner(self, final: Path, work: Callable[[], T]) -> T:
        """The owner does it; all learn what came of it."""
        mine: _Answer[T] = _Answer(*_captured(work, final)) if self._owner else _Answer(None)
        answer = self._background.broadcast(mine, self._lead)
        _raise_first([answer])
        return answer.value  # type: ignore[return-value]  # without an error there is a value


def _signature(tensors: Mapping[str, Tensor]) -> _Signature:
    stage.check_dense(tensors)
    return stage.signature(tensors), stage.tied(tensors)


def _leader(comm: Comm, owner: Owner | None) -> tuple[str, int]:
    tokens = comm.gather(owner.token if owner else None)
    owners = [(token, rank) for rank, token in enumerate(tokens) if token]
    if len(owners) != 1:
        found = f"{len(owners)} of {comm.size} ranks"
        raise CheckpointError("one rank owns the run folder", found=found, do="claim it on one rank and hand that in")
    return owners[0]


def _open(tmp: Path, problem: WorldsizeError | None) -> None:
    if problem:
        raise problem
    tmp.mkdir(parents=True, exist_ok=True)


def _here(folder: Path, facts: Mapping[str, FileFact]) -> None:
    """What other ranks wrote must be in the folder that is renamed: theirs may lie on another disk of the same name."""
    for name, expected in facts.items():
        path = folder / name
        if not path.exists() or path.stat().st_size != expected.size:
            raise CheckpointError(
                f"{path}, which another rank wrote, is not to be seen here",
                do="put the run folder on a file system that all nodes share, under one absolute path",
            )


def _read_back(folder: Path, facts: Mapping[str, FileFact]) -> None:
    for name, expected in facts.items():
        if disk.fact(folder / name) != expected:
            raise CheckpointError(f"{folder / name} does not read back as it was written", do="check that disk")


def _manifest(job: _Job, files: dict[str, FileFact], attempt: int) -> Manifest:
    facts = dict(job.request.facts)
    return Manifest(
        step=facts.pop("step"),
        epoch=facts.pop("epoch", 0),
        samples=facts.pop("samples", 0),
        layout=facts.pop("layout", {}),
        exact=facts.pop("exact", True),
        attempt=facts.pop("attempt", attempt),
        files=files,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        version=__version__,
        aliases=job.layout.aliases,
        extra=facts,
    )


def _captured(work: Callable[[], T], path: Path | None = None) -> tuple[T | None, WorldsizeError | None]:
    """The value, or the error in a form that can be told to the other ranks."""
    try:
        return work(), None
    except WorldsizeError as error:
        return None, error
    except OSError as error:
        return None, disk.explain(error, "writing", path) if path else CheckpointError(_told(error))
    except Exception as error:  # noqa: BLE001 whatever it is, the other ranks must hear of it
        return None, CheckpointError(f"saving failed: {_told(error)}")


def _raise_first(answers: list[_Answer[Any]]) -> None:
    failed = [(rank, answer.error) for rank, answer in enumerate(answers) if answer.error]
    if not failed:
        return
    rank, error = failed[0]
    if len(answers) == 1 or isinstance(error, OwnershipError):
        raise error
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    raise type(error)(f"rank {rank}{more}: {error.what}", found=error.found, do=error.do)


def _same_names(names: list[list[str]]) -> None:
    for rank, mine in enumerate(names):
        if odd := sorted(set(mine) ^ set(names[0])):
            found = f"{len(odd)} names on only one of ranks 0 and {rank}, such as {', '.join(odd[:3])}"
            raise CheckpointError("the names of the tensors differ between ranks", found=found)


def _same(prints: list[dict[str, str] | None]) -> None:
    """Raise CheckpointError where the ranks were not given the same step, facts and state of the training."""
    first = prints[0] or {}
    for rank, mine in enumerate(prints):
        if odd := sorted(key for key in first | (mine or {}) if first.get(key) != (mine or {}).get(key)):
            found = f"ranks 0 and {rank} have other values for {', '.join(odd)}"
            raise CheckpointError("the ranks were given different things to save", found=found)


def _fingerprint(request: _Request | None) -> dict[str, str] | None:
    if request is None:
        return None
    given = {f"train[{key!r}]": text for key, text in request.train.items()}
    given |= {f"facts[{key!r}]": _text(value) for key, value in request.facts.items()}
    return {key: hashlib.sha256(text.encode()).hexdigest()[:16] for key, text in given.items()}


def _request(train: dict[str, Any], facts: Mapping[str, Any]) -> _Request:
    _plain(train, "train")
    _plain(dict(facts), "facts")
    return _Request(int(facts["step"]), {key: _text(value) for key, value in train.items()}, dict(facts))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _plain(value: Any, where: str) -> None:
    """Raise CheckpointError on what would not come back from JSON as it went in."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if type(key) is not str:
                raise CheckpointError(f"the key {key!r} of {where} is not text", do="use text as keys")
            _plain(inner, f"{where}[{key!r}]")
    elif type(value) is list:
        for index, inner in enumerate(value):
            _plain(inner, f"{where}[{index}]")
    elif value is not None and not isinstance(value, str | bool | int | float):
        raise CheckpointError(
            f"{where} is not a plain value",
            found=f"{type(value).__module__}.{type(value).__qualname__}",
            do="make it numbers, text, lists or dictionaries; tensors go with the tensors",
        )


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
