"""Room: what each task of a job sets up before its program: modules, variables, virtual environment, commands. Pure.

It is text of bash that the step's tasks run themselves, each on its own node: nodes may differ, and what is set here is
there for the ranks. Nothing of it runs in the batch script, which knows the first node only.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from worldsize.launch import fingerprint, secrets, staging

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from worldsize.launch.profile import Profile
    from worldsize.launch.spec import JobSpec

THREADS = "OMP_NUM_THREADS"
PYTHON = "python"
"""The interpreter of an environment that is activated: the first on PATH."""

_END = "END_OF_SETUP"
_FAIL = '{ echo "worldsize: $(uname -n): %s" >&2; exit 2; }'
_UNREACHED = (
    "trap 'code=$?; [ $code != 0 ] || "
    '{ echo "worldsize: $(uname -n): the setup ended before the program began" >&2; code=2; }; exit $code\' EXIT'
)
"""A quote or a here-document that is left open would swallow the program, and the job would seem to have done its work."""
_FIND_MODULE = """\
for file in "${LMOD_PKG:+$LMOD_PKG/init/bash}" "${MODULESHOME:+$MODULESHOME/init/bash}" \\
    /etc/profile.d/lmod.sh /etc/profile.d/z00_lmod.sh /etc/profile.d/modules.sh; do
  type module >/dev/null 2>&1 && break
  [ -r "$file" ] && . "$file"
done"""
_CONDA = 'eval "$("${CONDA_EXE:-conda}" shell.bash hook 2>/dev/null)" && type conda >/dev/null 2>&1'

_CARRIED = frozenset({
    "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "PATH", "LD_LIBRARY_PATH", "CONDA_EXE", "BASH_ENV",
    "MODULEPATH", "MODULESHOME", "MODULES_CMD", "MODULERCFILE", "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT",
    "SLURM_DEBUG_FLAGS", "KRB5CCNAME", "XDG_CONFIG_HOME", "XDG_STATE_HOME",
    "http_proxy", "https_proxy", "no_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
})  # fmt: skip
_CARRIED_BEGIN = ("LC_", "BASH_FUNC_module", "BASH_FUNC_ml", "BASH_FUNC__module", "LMOD_")


def carried(environ: Mapping[str, str], spec: JobSpec) -> dict[str, str]:
    """What of the submitter's environment a job begins with: who and where one is, where programs are, how out.

    No other state of a shell reaches it: neither what happens to be set, nor what another job set (B012). Which modules
    are loaded is left out too: else `module load` would do nothing there for one whose variables are not.
    """
    kept = {name: value for name, value in environ.items() if name in _CARRIED or name.startswith(_CARRIED_BEGIN)}
    return {name: value for name, value in kept.items() if name not in spec.secrets}


def environment(spec: JobSpec, profile: Profile) -> list[str]:
    """The lines of the batch script that hold what its tasks run: $enter. None where there is nothing to set up."""
    lines = "\n".join(_setup(spec, profile)).split("\n")
    if lines == [""]:
        return []
    end = _END
    while end in lines:
        end += "_"
    return [f"IFS= read -r -d '' enter <<'{end}'", _UNREACHED, *lines, 'exec "$@"', end]


def enter(spec: JobSpec, profile: Profile) -> str:
    """What stands before a task's command, where there is something to set up."""
    return '/bin/bash -c "$enter" worldsize ' if any(_setup(spec, profile)) else ""


def interpreter(spec: JobSpec, otherwise: str) -> str:
    """The Python of the tasks: that of the image, or of the environment that is activated."""
    if spec.container:
        return spec.container.python
    if spec.conda:
        return PYTHON
    return f"{spec.venv}/bin/python" if spec.venv and not staging.is_archive(spec.venv) else otherwise


def told(spec: JobSpec) -> Iterator[str]:
    """Options of `worldsize node`: what it does on its node before the program."""
    yield f'--fingerprint="$folder/{fingerprint.FILE}"'
    if not spec.snapshot:
        yield f"--code={shlex.quote(spec.chdir or '.')}"
    if spec.strict_env:
        yield "--strict-env"
    if spec.secrets:
        yield f'--secrets="$folder/{secrets.FILE}"'
    if spec.venv and staging.is_archive(spec.venv):
        yield f"--venv={shlex.quote(spec.venv)}"
    yield from (f"--stage={shlex.quote(path)}" for path in spec.stage)


def _setup(spec: JobSpec, profile: Profile) -> Iterator[str]:
    yield from _modules((*profile.modules, *spec.modules))
    for name, value in _variables(spec, profile).items():
        yield f"export {name}={shlex.quote(value)}"
    if spec.venv and not staging.is_archive(spec.venv):
        activate = f"{spec.venv}/bin/activate"
        yield f"[ -r {shlex.quote(activate)} ] || {_fail('this virtual environment is not here:', spec.venv)}"
        yield f"source {shlex.quote(activate)}"
    if spec.conda:
        yield f"{_CONDA} || {_fail('there is no conda here for environment', spec.conda, 'load its module, or put it on PATH')}"
        yield f"conda activate {shlex.quote(spec.conda)} || {_fail('conda has no environment', spec.conda)}"
    # An empty line takes a backslash at a command's end: it would join the next one to it, or the program.
    yield from (f"{command}\n" if command.endswith("\\") else command for command in spec.setup)


def _modules(names: tuple[str, ...]) -> Iterator[str]:
    if not names:
        return
    yield _FIND_MODULE
    missing = _fail("no module command for module", names[0], "load what a job needs in setup instead")
    yield f"type module >/dev/null 2>&1 || {missing}"
    for name in names:
        yield f"module load {shlex.quote(name)} || {_fail('this module cannot be loaded:', name)}"


def _variables(spec: JobSpec, profile: Profile) -> dict[str, str]:
    threads = {} if profile.threads is None else {THREADS: str(profile.threads)}
    return {**threads, **profile.env, **spec.env}


def _fail(what: str, name: str = "", do: str = "") -> str:
    """Say it with the node's name, and end with code 2. The name is quoted for a text in double quotes."""
    told = f"{what} {name}".strip() + (f". Do: {do}." if do else ".")
    quoted = "".join(f"\\{letter}" if letter in '\\"$`' else letter for letter in told)
    return _FAIL % quoted
