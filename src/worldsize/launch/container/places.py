"""Room: which paths of the host a container needs, and whether they are there: found out at submit, on the login node.

Bound by themselves: the job's folder, working folder and run folder, the home folder, caches, and whatever absolute path
stands in the job's variables and arguments; of links, also what they lead to (B093).
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError
from worldsize.launch.container import registry
from worldsize.launch.container.spec import parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from worldsize.launch.profile import Profile
    from worldsize.launch.spec import JobSpec

CACHES = (
    "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE", "TORCH_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR", "UV_CACHE_DIR", "PIP_CACHE_DIR", "WANDB_DIR", "WANDB_CACHE_DIR",
)  # fmt: skip
"""Variables that name folders which must be there: a cache that is not found is downloaded once more by every rank."""

_IMAGES_OWN = tuple(
    map(Path, ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/usr", "/etc", "/proc", "/sys", "/dev", "/run"))
)
_MOST_LINKS = 1000


def bound(spec: JobSpec, folder: Path, profile: Profile, environ: Mapping[str, str]) -> JobSpec:
    """The job with all binds of its container.

    Args:
        spec: the job, its paths absolute and its variables resolved.
        folder: the job's own folder.
        profile: the site.
        environ: the submitter's environment.
    """
    if spec.container is None:
        return spec
    given = spec.container.binds
    covered = [Path(parts(bind)[0][1]) for bind in given]
    found = [path for path in dict.fromkeys(_wanted(spec, folder, profile, environ)) if _may(path)]
    needless = [
        path for path in found if any(path.is_relative_to(other) for other in (*covered, *found) if other != path)
    ]
    own = tuple(str(path) for path in found if path not in needless and path not in covered)
    update = {"binds": (*given, *own), "runtime": registry.runtime(spec, profile), "image": _image(spec)}
    return spec.model_copy(update={"container": spec.container.model_copy(update=update)})


def check(spec: JobSpec, folder: Path) -> None:
    """What can be known to be wrong with the container of a job, before it waits in a queue.

    Args:
        spec: the job, as `bound` leaves it.
        folder: the job's own folder, which is not made yet.

    Raises:
        ConfigError: the image or a path that is bound is not there; or the job asks for what a container cannot have.
    """
    asked = spec.container
    if asked is None:
        return
    outside = next((name for name in ("venv", "conda", "exec_command") if getattr(spec, name)), None)
    if outside:
        raise ConfigError(
            f"{outside} acts outside of the container", do="leave it out; container.python is the interpreter"
        )
    if spec.stage and asked.runtime in ("docker", "podman"):
        raise ConfigError(
            f"stage does not go with {asked.runtime}: no signal would reach the ranks", do="leave one out"
        )
    if asked.image.startswith("/") and not Path(asked.image).exists():
        raise ConfigError("the image of the container is not there", found=asked.image, do="mend container.image")
    for (host, _), _ in map(parts, asked.binds):
        if not Path(host).exists() and Path(host) != folder:
            raise ConfigError(
                "a path that the container needs is not there",
                found=host,
                do="make it, or mend the bind or the variable that names it",
            )
    if asked.runtime == "charliecloud":
        _points(spec)


def _image(spec: JobSpec) -> str:
    """A path is made absolute; another name is the runtime's to find."""
    assert spec.container is not None
    image, beside = spec.container.image, Path(spec.chdir or ".", spec.container.image)
    return str(beside.absolute()) if image.startswith((".", "~")) or (image and beside.exists()) else image


def _points(spec: JobSpec) -> None:
    """ch-run makes no folder to mount at."""
    assert spec.container is not None
    image = Path(spec.container.image)
    if not image.is_dir():
        return
    ends = [Path(parts(bind)[0][1]) for bind in spec.container.binds]
    for end in ends:
        inside = image / end.relative_to("/")
        above = any(end.is_relative_to(other) for other in (*ends, Path("/tmp")) if other != end)  # noqa: S108 - bound by it
        if not inside.exists() and not above:
            raise ConfigError("the image has no folder to bind at", found=str(end), do=f"mkdir -p {inside}")


def _wanted(spec: JobSpec, folder: Path, profile: Profile, environ: Mapping[str, str]) -> Iterator[Path]:
    """With what links lead to."""
    for path in _named(spec, folder, profile, environ):
        yield path
        yield path.resolve()
    home = Path(spec.chdir or ".")
    for entry in islice(home.iterdir(), _MOST_LINKS) if home.is_dir() else ():
        if entry.is_symlink() and entry.exists():
            yield entry.resolve()


def _named(spec: JobSpec, folder: Path, profile: Profile, environ: Mapping[str, str]) -> Iterator[Path]:
    assert spec.container is not None
    yield folder
    yield from (Path(path) for path in (spec.chdir, spec.run_dir, *spec.stage) if path)
    if spec.container.home and environ.get("HOME"):
        yield Path(environ["HOME"])
    variables = {**profile.env, **spec.env}
    yield from (Path(variables[name]) for name in CACHES if variables.get(name, "").startswith("/"))
    yield from _absolute((*variables.values(), *spec.program))


def _absolute(words: Iterable[str]) -> Iterator[Path]:
    """Paths that are there: words, what follows a "=" in one, what a ":" divides."""
    for word in words:
        for part in (word.partition("=")[2] if word.startswith("-") else word).split(":"):
            try:
                if part.startswith("/") and Path(part).exists():
                    yield Path(part)
            except OSError:  # a text that is no path: too long, say
                continue


def _may(path: Path) -> bool:
    """Whether it can be laid over the image's own, and be written on a command line."""
    own = path == Path("/") or any(path.is_relative_to(other) for other in _IMAGES_OWN)
    return not own and not any(letter in str(path) for letter in ",:")
