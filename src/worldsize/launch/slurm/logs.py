"""Room: the log files of jobs: which they are, one attempt of them, read together and on as they grow.

Everything that a job prints is in Slurm's own file, all attempts one after the other. What each rank printed is in a file
of its own where the supervisor started the ranks; elsewhere it is picked out of that file, if its lines say the rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError
from worldsize.launch.slurm import states
from worldsize.launch.slurm.states import JobFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from worldsize.launch.slurm.known import Known

ALL = -1
"""Every rank."""

_CHUNK = 1 << 20
_TAIL = 1 << 18
_HEADER = re.compile(rb"^worldsize: job \S+, attempt (\d+), on ", re.MULTILINE)
_RANK = re.compile(r"rank-(\d+)\.log")


@dataclass(frozen=True, slots=True)
class Source:
    """A file to read.

    Attributes:
        path: the file, which need not be there yet.
        label: what its lines begin with where several are read together.
        attempt: only what this attempt of the job printed.
        rank: only lines that say that they are of this rank.
    """

    path: Path
    label: str = ""
    attempt: int | None = None
    rank: int | None = None


class Reader:
    """One source from its beginning, and then what was added since. Survives a file that is cut short or replaced."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._at, self._file, self._partial = 0, 0, b""
        self._inside = source.attempt is None
        self._label = f"[{source.label}] ".encode() if source.label else b""
        self._raw = not self._label and source.attempt is None and source.rank is None
        self._wanted = (
            None if source.rank is None else re.compile(rb"^(?: *%d: |\[rank ?%d\]:? )" % ((source.rank,) * 2))
        )

    def read(self) -> bytes:
        """What came since the last time, by whole lines where lines must be told apart; at most some of it at once.

        Raises:
            ConfigError: it may not be read.
        """
        data = self._new()
        if self._raw or not data:
            return data
        *lines, self._partial = (self._partial + data).split(b"\n")
        return b"".join(self._line(line + b"\n") for line in lines)

    def rest(self) -> bytes:
        """The last line, where it has no end."""
        line, self._partial = self._partial, b""
        return self._line(line + b"\n") if line else b""

    def _line(self, line: bytes) -> bytes:
        header = _HEADER.match(line)
        if header and self.source.attempt is not None:
            self._inside = int(header[1]) == self.source.attempt
        shown = self._inside and (self._wanted is None or self._wanted.match(line))
        return self._label + line if shown else b""

    def _new(self) -> bytes:
        try:
            with self.source.path.open("rb") as file:
                facts = self.source.path.stat()
                if facts.st_ino != self._file or facts.st_size < self._at:
                    self._at, self._file, self._partial = 0, facts.st_ino, b""
                file.seek(self._at)
                data = file.read(_CHUNK)
        except PermissionError as error:
            raise ConfigError("this log may not be read", found=str(error), do="ask its owner") from error
        except OSError:
            return b""
        self._at += len(data)
        return data


class Merged:
    """Several sources, and more as they turn up. `take` is given their bytes."""

    def __init__(self, take: Callable[[bytes], object]) -> None:
        self._take = take
        self._readers: dict[Path, Reader] = {}
        self.shown = False
        """Whether anything was."""

    def add(self, sources: Iterable[Source]) -> None:
        """Read these too, if they are new."""
        for source in sources:
            self._readers.setdefault(source.path, Reader(source))

    def pump(self) -> bool:
        """Take what is new in all of them; whether there was anything."""
        found = False
        for reader in self._readers.values():
            while data := reader.read():
                self._take(data)
                found = True
        self.shown = self.shown or found
        return found

    def finish(self) -> None:
        """Take last lines that have no end."""
        self.pump()
        for reader in self._readers.values():
            if rest := reader.rest():
                self._take(rest)
                self.shown = True


def select(members: Sequence[Known], ranks: Sequence[int] = (), attempt: int | None = None) -> list[Source]:
    """The files that hold what is asked for, labelled where there is more than one kind of them.

    Args:
        members: the jobs.
        ranks: these, or `ALL`; none: everything that the job printed.
        attempt: this one alone.
    """
    found = [(known.job, source) for known in members for source in _of(known, ranks, attempt)]
    several, apart = len(members) > 1, len({source.label for _, source in found}) > 1

    def labelled(job: str, source: Source) -> Source:
        parts = [*[job] * several, *([source.label] if apart and source.label else [])]
        return replace(source, label=" ".join(parts))

    return [labelled(job, source) for job, source in found]


def of_job(known: Known, attempt: int | None = None) -> list[Source]:
    """What Slurm writes the job's output to, and its errors where they are apart."""
    facts = known.facts or JobFacts(known.job, 0)
    out, err = (_filled(known, facts, name) for name in ("output", "error"))
    out, err = facts.stdout or out, facts.stderr or err
    home = Path(facts.work_dir or str((known.spec or {}).get("chdir") or "/"))
    texts = dict.fromkeys(text for text in (out, err) if text)
    names = ("", "stderr")
    return [Source(home / text, name, attempt) for text, name in zip(texts, names, strict=False)]


def attempts(known: Known) -> list[Path]:
    """The folders in which the supervisor keeps the logs of ranks: one each time they were started, oldest first."""
    folder = None if known.folder is None else known.folder / f"logs-{known.job}" / "attempts"
    found = [path for path in folder.iterdir() if path.name.isdigit()] if folder and folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.name))


def newest(path: Path) -> tuple[int | None, str]:
    """The number of the newest attempt, where the log says it, and what it printed, its end at least."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            text = file.read()
    except OSError:
        return None, ""
    headers = list(_HEADER.finditer(text))
    begin = headers[-1].start() if headers else 0
    return int(headers[-1][1]) if headers else None, text[begin:].decode(errors="replace")


def _of(known: Known, ranks: Sequence[int], attempt: int | None) -> list[Source]:
    if not ranks:
        return of_job(known, attempt)
    folders = attempts(known)
    if not folders and (known.spec or {}).get("launcher") != "worldsize":
        return [replace(source, rank=rank) for rank in ranks if rank != ALL for source in of_job(known, attempt)[:1]]
    chosen = [folder for folder in folders if attempt is None or folder.name == str(attempt)]
    return [source for folder in chosen for source in _of_ranks(folder, ranks)]


def _of_ranks(folder: Path, ranks: Sequence[int]) -> Iterator[Source]:
    files = {int(found[1]): path for path in sorted(folder.iterdir()) if (found := _RANK.fullmatch(path.name))}
    for rank in files if ALL in ranks else ranks:
        if rank in files:
            yield Source(files[rank], f"rank {rank}")


def _filled(known: Known, facts: JobFacts, name: str) -> str:
    """The path of a log, as our own spec says it."""
    if known.spec is None or known.folder is None:
        return ""
    array, _, task = known.job.partition("_")
    pattern = known.spec.get(name)
    if name == "output" and not pattern:
        pattern = str(known.folder / ("slurm-%A_%a.out" if task else "slurm-%j.out"))
    number = facts.number or int(array.partition("+")[0])
    own = replace(facts, number=number, name=str(known.spec.get("job_name") or facts.name))
    own = replace(own, array=int(array), task=int(task)) if task.isdigit() else own
    return states.path(str(pattern), own) if pattern else ""
