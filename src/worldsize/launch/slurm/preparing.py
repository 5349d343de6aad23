"""Room: a job spec as its script and its tasks need it: absolute paths, the submitter's variables, the code's copy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError
from worldsize.launch import secrets, snapshot, staging, units
from worldsize.launch.slurm.ways import ONE_TASK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from worldsize.launch.spec import JobSpec

CODE = "code"
"""Where the copy of the code lies in the job's folder."""

_MODULE = "-m"


def whole(spec: JobSpec) -> JobSpec:
    """With absolute paths: nothing depends on where a batch script lies or begins (B027)."""
    home = Path(spec.chdir or Path.cwd()).absolute()
    update = {"chdir": str(home), "stage": tuple(str(_from(home, path)) for path in spec.stage)}
    named = {name: str(_from(home, value)) for name in ("venv", "run_dir") if (value := getattr(spec, name))}
    return spec.model_copy(update={**update, **named})


def resolved(spec: JobSpec, folder: Path, environ: Mapping[str, str], also: Sequence[str] = ()) -> JobSpec:
    """With the submitter's variables, and the program in the copy of its code.

    Args:
        spec: the job.
        folder: its own folder.
        environ: the submitter's environment.
        also: names of variables that are taken where they are set, and are no secrets of the job.

    Raises:
        ConfigError: a variable is not set, or the script is not in the code.
    """
    values = {name: environ[name] for name in also if name in environ and name not in spec.secrets}
    values |= secrets.values(spec.pass_env, environ, setting="pass_env")
    if spec.run_dir:
        values["WORLDSIZE_RUN_DIR"] = spec.run_dir
    if not spec.snapshot:
        return spec.model_copy(update={"env": values | spec.env})
    root, home = code_root(spec), Path(str(spec.chdir)).resolve()
    program, paths = _moved(spec, root, folder / CODE)
    if program[0] == _MODULE and home.is_relative_to(root):
        # What Python puts first for -m is the working folder: the code that was edited since would win.
        paths.insert(0, str(folder / CODE / home.relative_to(root)))
        values["PYTHONSAFEPATH"] = "1"
    own = spec.env.get("PYTHONPATH", values.get("PYTHONPATH", ""))
    paths += [str(snapshot.moved(Path(path), root, folder / CODE) or path) for path in own.split(":") if path]
    env = values | spec.env | ({"PYTHONPATH": ":".join(dict.fromkeys(paths))} if paths else {})
    return spec.model_copy(update={"program": program, "env": env})


def code_root(spec: JobSpec) -> Path:
    """The folder that the copy of the code is of."""
    home = Path(str(spec.chdir))
    if spec.code_root:
        return _from(home, spec.code_root).resolve()
    first = spec.program[:1]
    return snapshot.root_of(home / first[0] if first and first[0] != _MODULE else home).resolve()


def copy_code(spec: JobSpec, folder: Path) -> None:
    """Make the copy.

    Raises:
        ConfigError: see `snapshot.take`; or the script is not among what was taken.
    """
    limit = None if spec.code_limit in (None, "all") else units.mebibytes(str(spec.code_limit)) * snapshot.MEBIBYTE
    into = folder / CODE
    snapshot.take(
        code_root(spec), into, suffixes=spec.code_file_suffixes, exclude=spec.exclude_code_folders, cap=limit
    )
    script = Path(_moved(spec, code_root(spec), into)[0][0]) if spec.program[0] != _MODULE else into
    if not script.exists():
        raise ConfigError(
            f"the copy of the code has no {spec.program[0]}",
            found="git ignores it, or it is excluded",
            do="see code_file_suffixes and exclude_code_folders",
        )


def check(spec: JobSpec) -> None:
    """What can be known to be wrong with the environment that is asked for.

    Raises:
        ConfigError: a path is not there, or nothing would hear of it.
    """
    unheard = [name for name in ("secrets", "stage", "snapshot") if getattr(spec, name)]
    if unheard and not spec.program:
        raise ConfigError("without a program nothing hears of this", found=", ".join(unheard), do="leave it out")
    packed = bool(spec.venv and staging.is_archive(spec.venv))
    lone = [name for name, given in (("secrets", spec.secrets), ("stage", spec.stage), ("venv", packed)) if given]
    if lone and spec.launcher == ONE_TASK and spec.nodes > 1:
        raise ConfigError(
            f"launcher {spec.launcher} starts the ranks of other nodes by ssh: this would not reach them, or be seen",
            found=", ".join(lone),
            do="use launcher srun",
        )
    staging.check(spec.stage, spec.venv)
    if spec.venv and not packed and not Path(spec.venv, "bin", "activate").is_file():
        raise ConfigError("venv is no virtual environment", found=f"no bin/activate in {spec.venv}", do="mend venv")


def _moved(spec: JobSpec, root: Path, into: Path) -> tuple[tuple[str, ...], list[str]]:
    """The program in the copy; folders of it that are imported from."""
    venv = Path(spec.venv) if spec.venv and not staging.is_archive(spec.venv) else None
    paths = [str(snapshot.moved(path, root, into)) for path in snapshot.imported_from(root, venv)]
    first, *words = spec.program
    if first == _MODULE:
        return spec.program, paths
    script = Path(str(spec.chdir), first)
    place = snapshot.moved(script.parent.resolve() / script.name, root, into)
    if place is None:
        raise ConfigError(f"{first} is not in the code that is copied", found=str(root), do="give code_root")
    return (str(place), *words), paths


def _from(home: Path, path: str) -> Path:
    return home / Path(path).expanduser()
