"""Slurm's commands, container runtimes and a Python that only tell what they were given; a script that runs in them."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.launch import shell
from worldsize.launch.profile import Profile
from worldsize.launch.slurm.environment import interpreter
from worldsize.launch.slurm.places import Where
from worldsize.launch.slurm.script import script
from worldsize.launch.spec import JobSpec

if TYPE_CHECKING:
    from tests.launch.slurm.anyjob import AnyJob

BASH = shutil.which("bash") or "bash"
_TELL = 'cat /proc/$$/cmdline >> "$SEEN_AT/{}"\n'
_SRUN = 'while case "${1-}" in --*) ;; *) false ;; esac; do shift; done\nexec "$@"\n'
_PYTHON = f"""case "$3" in
after) {_TELL.format("after")} echo "3 again node7,node8"; exit 0 ;;
esac
{_TELL.format("argv")} cat /proc/$$/environ > "$SEEN_AT/environ"
read -r code < "$SEEN_AT/code"; exit "$code"
"""
_RUNTIME = """__kept=("PATH=$PATH" "SEEN_AT=$SEEN_AT" "SEEN_IMAGE=$SEEN_IMAGE")
while [ $# -gt 0 ] && [ "$1" != "$SEEN_IMAGE" ]; do
  [ "$1" != --env ] || { __name=$2; __kept+=("$2=${!__name}"); }
  shift
done
shift; [ "${1-}" != -- ] || shift
case "${0##*/}" in
docker | podman | enroot) exec env -i "${__kept[@]}" "$@" ;;
*) exec "$@" ;;
esac
"""
_MODULE = 'module() { printf "%s\\0" "$@" >> "$SEEN_AT/modules"; }\n'
_CONDA = 'cat <<"EOF"\nconda() { printf "%s\\0" "$@" >> "$SEEN_AT/conda"; }\nEOF\n'


@dataclass(frozen=True)
class Seen:
    """What a script did."""

    spec: JobSpec
    site: Profile
    text: str
    code: int
    said: str
    folder: Path

    def told(self, name: str) -> list[str]:
        """What one of the commands was given."""
        path = self.folder / name
        found = path.read_bytes() if path.exists() else b""
        return [os.fsdecode(word) for word in found.split(b"\0")[:-1]]

    @property
    def words(self) -> list[str]:
        """The argv of the task's Python."""
        return self.told("argv")[2:]

    @property
    def environ(self) -> dict[str, str]:
        """Its environment."""
        return dict(item.split("=", 1) for item in self.told("environ"))


class Sham:
    """The commands, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.canary = folder, folder / "sung"
        for name in ("apptainer", "singularity", "ch-run", "podman", "docker", "enroot"):
            self._tool(name, _TELL.format("runtime") + _RUNTIME, BASH)
        for name, body in (("srun", _SRUN), ("scontrol", ""), ("sbatch", "echo 77\n")):
            self._tool(name, _TELL.format(name) + body)
        for name in ("python", "python3"):
            self._tool(name, _PYTHON)
        self._tool("canary", f": > '{self.canary}'\n")
        self._tool("conda", _CONDA)
        self._tool("sleep", "")
        (folder / "init").mkdir()
        (folder / "init" / "bash").write_text(_MODULE, encoding="utf-8")

    def run(self, job: AnyJob, folder: Path) -> Seen:
        """Run the script of a job, whose folders lie here."""
        places = {name: folder / found for name, found in job.folders.items()}
        for name, path in places.items():
            path.mkdir(exist_ok=True)
            if name == "venv":
                (path / "bin").mkdir(exist_ok=True)
                (path / "bin" / "activate").touch()
            target = path / ("bin/python" if name == "venv" else "python")
            target.unlink(missing_ok=True)
            target.symlink_to(self.folder / "python")
        asked = {**job.asked, "chdir": str(places["chdir"])}
        if asked.get("venv") is True:
            asked["venv"] = str(places["venv"])
        if "container" in asked:
            asked["container"] = {**asked["container"], "python": str(places["python"] / "python")}
        spec, site = JobSpec.of(asked), Profile.of(job.site)
        own = str(places["python"] / "python")
        text = script(spec, site, Where(places["job"], interpreter(spec, own), own))
        return self._run(spec, site, text, job.code, folder)

    def _run(self, spec: JobSpec, site: Profile, text: str, code: int, folder: Path) -> Seen:
        seen = folder / "seen"
        seen.mkdir()
        (seen / "code").write_text(f"{code}\n", encoding="utf-8")
        (seen / "script.sh").write_bytes(text.encode())
        environ = {
            "PATH": f"{self.folder}:{os.defpath}",
            "HOME": str(folder),
            "LMOD_PKG": str(self.folder),
            "SEEN_AT": str(seen),
            "SEEN_IMAGE": spec.container.image if spec.container else "",
            "SLURM_JOB_ID": "12",
            "SLURM_JOB_NUM_NODES": str(spec.nodes),
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_JOB_END_TIME": "2000000000",
        }
        done = shell.call([BASH, str(seen / "script.sh")], environ, timeout=120, cwd=Path(spec.chdir or "/"))
        return Seen(spec, site, text, done.code, done.out + done.err, seen)

    def _tool(self, name: str, body: str, by: str = "/bin/sh") -> None:
        path = self.folder / name
        path.write_text(f"#!{by}\n{body}", encoding="utf-8")
        path.chmod(0o755)
