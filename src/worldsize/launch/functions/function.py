"""Room: the decorator: a function that runs where a configuration says, and gives a `Job` back."""

from __future__ import annotations

import copy
import functools
import json
import secrets
import shlex
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar, overload

from worldsize.errors import ConfigError, LaunchError
from worldsize.launch.functions import bundle, here, inside, vault
from worldsize.launch.functions.bundle import Wrapped
from worldsize.launch.functions.config import PROGRAM, SlurmConfig
from worldsize.launch.functions.job import Job
from worldsize.launch.spec import JobSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from worldsize.launch.functions.here import Here

P = ParamSpec("P")
R = TypeVar("R")
Config = SlurmConfig | JobSpec
Call = tuple[tuple[Any, ...], dict[str, Any]]

_MARK = "call.json"
_KINDS = ("afterok", "afterany", "afternotok")


class JobFunction(Wrapped, Generic[P, R]):
    """A function that can be handed over: `main(x)` calls it here, `main[config](x)` where the configuration says."""

    def __init__(self, function: Callable[P, R], config: SlurmConfig | None = None) -> None:
        super().__init__(function)
        self.config = config

    def __call__(self, *args: P.args, **named: P.kwargs) -> R:
        """Call it here, plainly."""
        value: R = self.function(*args, **named)
        return value

    def __getitem__(self, config: Any) -> Bound[P, R]:
        """With a configuration: a SlurmConfig or a JobSpec (its program is the function).

        nntool's further forms are taken too: (config, params, submit, task, argv) and a mapping of these names.
        """
        names = ("slurm_config", "slurm_params_kwargs", "slurm_submit_kwargs", "slurm_task_kwargs", "system_argv")
        parts = (
            config
            if isinstance(config, dict)
            else dict(zip(names, config if isinstance(config, tuple) else (config,), strict=False))
        )
        unknown = [name for name in parts if name not in names]
        if unknown or not isinstance(parts.get("slurm_config"), Config):
            found = f"{unknown[0]!r}" if unknown else repr(parts.get("slurm_config"))
            raise ConfigError(
                f"{self.__name__}[...] takes a SlurmConfig or a JobSpec",
                found=found,
                do="write main[SlurmConfig(...)](...)",
            )
        return Bound(
            self, _with(parts["slurm_config"], *(parts.get(name) for name in names[1:4])), parts.get("system_argv")
        )

    def submit(self, *args: P.args, **named: P.kwargs) -> Job[R]:
        """Hand it over with the configuration that the decorator was given.

        Raises:
            ConfigError: it was given none.
        """
        if self.config is None:
            raise ConfigError(
                f"{self.__name__} has no configuration", do="write main[config](...), or @ws.job(mode=...)"
            )
        return self[self.config](*args, **named)

    def __reduce__(self) -> str | tuple[Any, ...]:
        found = super().__reduce__()
        return found if isinstance(found, str) else (JobFunction, (self.function, self.config))


class Bound(Generic[P, R]):
    """A function with its configuration, and what must have happened before it."""

    def __init__(self, function: JobFunction[P, R], config: Config, argv: Sequence[str] | None) -> None:
        self._function, self._config, self._argv = function, config, argv
        self._after: list[tuple[str, tuple[Job[Any], ...]]] = []

    def __call__(self, *args: P.args, **named: P.kwargs) -> Job[R]:
        """Hand the call over. Inside its own job it is made instead.

        Raises:
            ConfigError: what is asked for cannot be.
            NotSentError: the function or an argument cannot be pickled. Nothing was submitted.
            LaunchError: Slurm refuses it.
        """
        return self._each([(args, named)], array=False)[0]

    submit = __call__

    def map_array(self, *iterables: Iterable[Any]) -> list[Job[R]]:
        """A call for each item (of several iterables: for each first, second, ... items together), as one Slurm array."""
        calls: list[Call] = [(args, {}) for args in zip(*iterables, strict=True)]
        return self._each(calls, array=True) if calls else []

    def on_condition(self, jobs: Job[Any] | Sequence[Job[Any]], condition: str = "afterok") -> Self:
        """Wait for these jobs; may be said again, then for all of them. Changes this object and gives it back.

        Args:
            jobs: the jobs.
            condition: afterok: until they succeeded; afternotok: failed; afterany: ended.

        Raises:
            ConfigError: there is no such condition, or these are no jobs.
        """
        listed = (jobs,) if isinstance(jobs, Job) else tuple(jobs)
        if condition not in _KINDS or not listed or not all(isinstance(job, Job) for job in listed):
            raise ConfigError(
                f"{self._function.__name__} cannot wait for this",
                found=f"{condition}: {listed!r}",
                do=f"give jobs, and one of {', '.join(_KINDS)}",
            )
        self._after.append((condition, listed))
        return self

    def afterok(self, *jobs: Job[Any]) -> Self:
        """Wait until these jobs have succeeded."""
        return self.on_condition(jobs, "afterok")

    def afterany(self, *jobs: Job[Any]) -> Self:
        """Wait until these jobs have ended."""
        return self.on_condition(jobs, "afterany")

    def afternotok(self, *jobs: Job[Any]) -> Self:
        """Wait until these jobs have failed."""
        return self.on_condition(jobs, "afternotok")

    def __getitem__(self, after: Any) -> Self:
        """The same with a dependency: `[job]`, `[job, other]`, `["afterany": job]`, `[{"afternotok": [job]}]`."""
        bound = copy.copy(self)
        bound._after = list(self._after)  # noqa: SLF001 - its own kind
        if isinstance(after, slice):
            return bound.on_condition(after.stop, after.start)
        if isinstance(after, dict):
            for kind, jobs in after.items():
                bound.on_condition(jobs, kind)
            return bound
        return bound.on_condition(after)

    @property
    def _mode(self) -> str:
        return self._config.mode if isinstance(self._config, SlurmConfig) else "slurm"

    @property
    def _name(self) -> str:
        return f"{self._function.__module__}.{self._function.__qualname__}"

    def _each(self, calls: list[Call], *, array: bool) -> list[Job[R]]:
        if self._mode in ("run", "debug") or here.is_running():
            return [self._done(self._made(*call)) for call in calls]
        number, rank = here.number(self._name), here.find()
        if rank is not None:
            return self._again(rank, calls, number)
        return self._submitted(calls, number, array=array)

    def _made(self, args: tuple[Any, ...], named: dict[str, Any]) -> R:
        """Call it here; in mode debug the debugger opens where it fails, if there is a person."""
        for condition, jobs in self._after:
            for job in jobs:
                _met(condition, job)
        try:
            value: R = self._function.function(*args, **named)
        except Exception:
            if self._mode == "debug" and sys.stdin is not None and sys.stdin.isatty():
                import pdb  # noqa: T100 - it is what mode debug is for

                traceback.print_exc()
                pdb.post_mortem()
            raise
        return value

    def _done(self, value: R) -> Job[R]:
        return Job.done_here(self._function.__name__, value)

    def _again(self, rank: Here, calls: list[Call], number: int) -> list[Job[R]]:
        """The script runs again inside a job: the call that this job is for is made; the others are other jobs'."""
        mark = json.loads(vault.get(rank.folder, _MARK))
        if not mark["script"]:
            return [self._done(self._made(*call)) for call in calls]
        jobs: list[Job[R]] = []
        for at, (args, named) in enumerate(calls):
            if (mark["name"], mark["number"]) == (self._name, number) and at == rank.member:
                jobs.append(self._done(inside.make(rank, self._function.function, args, named, by_name=True)))
            else:
                jobs.append(Job(name=self._function.__name__))
                jobs[-1].set_exception(
                    LaunchError(
                        f"this call of {self._function.__name__} is another job's", found=f"this is job {rank.job}"
                    )
                )
        return jobs

    def _submitted(self, calls: list[Call], number: int, *, array: bool) -> list[Job[R]]:
        folder = self._folder()
        spec = self._spec(folder, len(calls) if array else None)
        mark = {"script": spec.launcher == "template", "name": self._name, "number": number}
        files = {_MARK: json.dumps(mark).encode(), inside.PATHS: json.dumps(self._paths(folder)).encode()}
        if not mark["script"]:
            files |= {inside.calls(at): bundle.call(self._function, *call) for at, call in enumerate(calls)}
        return _SUBMIT[self._mode](self, spec, folder, files, array)

    def _folder(self) -> Path:
        """A new one for every job: two never meet in one."""
        config = self._config
        base = (
            Path(config.output_parent_path, config.output_folder) if isinstance(config, SlurmConfig) else Path("jobs")
        )
        name = config.job_name if isinstance(config, SlurmConfig) and config.job_name else self._function.__name__
        return Path.cwd() / base / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"

    def _spec(self, folder: Path, members: int | None) -> JobSpec:
        """The whole job: what the configuration says, and what this call adds."""
        config, local = self._config, self._mode == "local"
        more: dict[str, Any] = {"env": {here.CALL: str(folder)}}
        if not local:
            more["dependency"] = [(kind, tuple(job.job_id for job in jobs)) for kind, jobs in self._after]
        if isinstance(config, JobSpec):
            given = {name: getattr(config, name) for name in config.model_fields_set - {"program"}}
            more["env"] |= config.env
            more["dependency"] += config.dependency
            script = config.launcher == "template"
            return JobSpec(**{**given, **more, **_array(members, None), "program": () if script else PROGRAM})
        if not config.job_name:
            more["job_name"] = self._function.__name__
        if not config.stderr_to_stdout:
            more["error"] = str(folder / ("slurm-%j.err" if members is None else "slurm-%A_%a.err"))
        if config.use_packed_code:
            more["setup"] = [f"cd {shlex.quote(str(self._packed(folder, Path.cwd())))}"]
        if config.use_distributed_env:
            more["command"] = self._command(config.distributed_launch_command)
        return config.spec(**more, **_array(members, config))

    def _command(self, line: str) -> str:
        """The command with this program's own words; its program beside this interpreter, where PATH has none."""
        first, _, rest = line.partition(" ")
        beside = Path(sys.executable).parent / first
        if "/" not in first and shutil.which(first) is None and beside.exists():
            line = f"{shlex.quote(str(beside))} {rest}"
        return " ".join((line, *map(shlex.quote, sys.argv[1:] if self._argv is None else self._argv)))

    def _paths(self, folder: Path) -> dict[str, Any]:
        home = Path.cwd()
        path = [str(self._packed(folder, home / entry)) for entry in sys.path]
        return {"path": path, "argv": sys.argv, "prefix": sys.prefix, "base": sys.base_prefix}

    def _packed(self, folder: Path, path: Path) -> Path:
        """Where a path lies in the copy of the code, if the copy is what runs."""
        from worldsize.launch import snapshot
        from worldsize.launch.slurm.preparing import CODE

        config = self._config
        if not isinstance(config, SlurmConfig) or not config.use_packed_code:
            return path
        return snapshot.moved(path.resolve(), Path(config.code_root).resolve(), folder / CODE) or path

    def _fill(self, folder: Path, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            vault.put(folder / name, data)
        config = self._config
        if isinstance(config, SlurmConfig) and (config.pack_code or config.use_packed_code):
            from worldsize.launch import snapshot
            from worldsize.launch.slurm.preparing import CODE

            snapshot.take(
                Path(config.code_root),
                folder / CODE,
                suffixes=config.code_file_suffixes,
                exclude=config.exclude_code_folders,
            )

    def _to_slurm(self, spec: JobSpec, folder: Path, files: Mapping[str, bytes], array: bool) -> list[Job[R]]:
        from worldsize.launch import env, profile
        from worldsize.launch.functions.watch import SlurmJob, watch
        from worldsize.launch.slurm import submit as slurm
        from worldsize.launch.slurm.client import Client

        for kind, waited in self._after:
            for each in waited:
                if each.done():
                    _met(kind, each)
            if not all(isinstance(job, SlurmJob) for job in waited):
                raise ConfigError(
                    "a Slurm job waits for Slurm jobs only", found=repr(waited), do="use one mode for all of them"
                )
        environ = env.read()
        client = Client(environ)
        made = slurm.draft(spec, profile.find(environ), folder)
        ticket = slurm.submit(
            made, client, slurm.state_folder(environ), fill=functools.partial(self._fill, files=files)
        )
        ids = [f"{ticket.job}_{at}" for at in range(_members(spec))] if array else [ticket.job]
        jobs: list[SlurmJob[R]] = [SlurmJob(each, ticket.name, folder, client) for each in ids]
        watch(jobs, client)
        return list(jobs)

    def _to_here(self, spec: JobSpec, folder: Path, files: Mapping[str, bytes], array: bool) -> list[Job[R]]:
        from worldsize.launch.functions.nearby import Dependency, LocalJob

        folder.mkdir(mode=0o700, parents=True)
        self._fill(folder, files)
        after = [Dependency(kind, waited) for kind, waited in self._after]
        first = f"local-{folder.name.rpartition('-')[2]}"
        ids = [f"{first}_{at}" for at in range(_members(spec))] if array else [first]
        jobs: list[LocalJob[R]] = [LocalJob(each, spec, folder, at, after) for at, each in enumerate(ids)]
        for job in jobs:
            job.start()
        return list(jobs)


_SUBMIT: dict[str, Callable[..., list[Job[Any]]]] = {"slurm": Bound._to_slurm, "local": Bound._to_here}  # noqa: SLF001


@overload
def job(function: Callable[P, R], /) -> JobFunction[P, R]: ...
@overload
def job(**settings: Any) -> Callable[[Callable[P, R]], JobFunction[P, R]]: ...
def job(function: Callable[P, R] | None = None, /, **settings: Any) -> Any:
    """A function that can be handed over: `@ws.job`, or `@ws.job(mode="slurm", ...)` with settings for its `submit`."""
    if function is not None:
        return JobFunction(function)
    config = SlurmConfig(**settings)
    return lambda function: JobFunction(function, config)


slurm_fn = job
"""The name that nntool gives it."""


def _with(config: Config, params: Any, submit: Any, task: Any) -> Config:
    """The configuration with further free settings."""
    if not isinstance(config, SlurmConfig) or not (params or submit or task):
        return config
    from dataclasses import replace

    return replace(
        config,
        extra_params_kwargs={**config.extra_params_kwargs, **(params or {})},
        extra_submit_kwargs={**config.extra_submit_kwargs, **(submit or {})},
        extra_task_kwargs={**config.extra_task_kwargs, **(task or {})},
    )


def _array(members: int | None, config: SlurmConfig | None) -> dict[str, str]:
    if members is None:
        return {}
    from worldsize.launch.functions import extras

    given = (
        extras.read(config.extra_params_kwargs, config.extra_submit_kwargs, config.extra_task_kwargs)
        if config
        else {}
    )
    at_once = given.get(extras.PARALLELISM)
    return {"array": f"0-{members - 1}{f'%{at_once}' if at_once else ''}"}


def _members(spec: JobSpec) -> int:
    return int(str(spec.array).partition("%")[0].rpartition("-")[2]) + 1


def _met(condition: str, job: Job[Any]) -> None:
    failed = job.cancelled() or job.exception() is not None
    if condition != "afterany" and failed != (condition == "afternotok"):
        raise LaunchError(f"{condition} will never be: {job}", do="see why it ended, and submit it again")
