"""Any job that a spec allows: texts that a shell would like to read, in every place that a person can fill."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

Draw = Any
SONGS = (
    "$(canary)", "`canary`", "; canary;", "&& canary &&", "| canary", "' ; canary ; '", '" ; canary ; "', "$((a[$(canary)]))",
    "${x:=$(canary)}", "<(canary)", "&canary&", "') canary ('", "\\'; canary #", "$'\\x27; canary", "%s%n", "!!", "~", "*", "?",
    "[a]", "{a,b}", "$HOME", "$@", "\\", "#", " ", "'", '"', "--", "-", "=", "é漢", "\x85", "\u2028",
)  # fmt: skip
"""`canary` is a command that leaves a file: whoever executes any of these has read a text as a shell's."""
BROKEN = (
    "\n",
    "\ncanary\n",
    "\nEND_OF_SETUP\ncanary\n",
    "\\\n",
    "\r",
    "\t",
    "\nEOF\ncanary\n",
    "\x1b",
    "\x01",
    "\x81\x88",
)
_CONTROL = "".join(map(chr, [*range(32), 127]))
_PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=_CONTROL), max_size=6)
_ANY = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)


def _joined(*parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(st.one_of(*parts), max_size=4).map("".join)


MAYBE = _joined(_PLAIN, st.sampled_from(SONGS))
LINE = MAYBE.map(lambda text: text or "x")
WORD = _joined(_ANY, st.sampled_from(SONGS), st.sampled_from(BROKEN))
NAME = LINE.map(lambda text: text.replace("/", "_"))
FOLDER = NAME.map(lambda text: f"f {text}")
LOG = NAME.map(lambda text: text.replace("%", "").replace("\\", "") + "%A-%a-%j.out")
WORDS = st.lists(WORD, max_size=5)
LINES = st.lists(LINE, min_size=1, max_size=2)
MODULES = st.lists(LINE.map(lambda text: "".join(text.split()) or "m"), min_size=1, max_size=2)
VARIABLES = st.dictionaries(
    st.one_of(
        st.from_regex(r"V[A-Za-z0-9_]{0,4}", fullmatch=True),
        st.sampled_from([
            "HOME", "CDPATH", "TMPDIR", "GLOBIGNORE", "PYTHONPATH", "LD_PRELOAD", "enter", "folder", "job",
            "code", "step", "name", "run", "LC_ALL", "SHELL",
        ]),
    ),
    WORD,
    max_size=3,
)  # fmt: skip
SETUPS = st.lists(
    st.sampled_from([
        "true", "x='a b'", "# a comment", "cat > /dev/null <<'EOF'\n$(not read)\nEOF", "if true; then\n  :\nfi", ": \\",
        "set -e",
        "f() { :; }; f", ": \"$HOME\" '$x'",
    ]),
    max_size=2,
)  # fmt: skip
OPTIONS = st.lists(LINE.map("--switches=".__add__), max_size=2)
_NUMBER = st.integers(1, 16)


@dataclass(frozen=True)
class AnyJob:
    """What is asked, and what is special around it; folders are names below a folder of the test."""

    asked: dict[str, Any]
    site: dict[str, Any]
    folders: dict[str, str] = field(default_factory=dict)
    code: int = 0


def _optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A few of them at a time."""
    return st.lists(st.sampled_from(sorted(fields)), max_size=6, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: fields[name] for name in names})
    )


_ASKED = _optional(
    job_name=NAME, partition=LINE, account=LINE, qos=LINE, constraint=LINE, reservation=LINE, cpus_per_task=_NUMBER,
    cpu_bind=LINE, gpu_bind=LINE, exclusive=st.sampled_from([True, "user"]), comment=LINE, begin=LINE,
    nice=st.integers(-9, 9), output=LOG, error=LOG, requeue=st.booleans(), mail_type=st.just("END,FAIL"), mail_user=LINE,
    licenses=LINE, extra=OPTIONS, run_dir=LINE, max_restarts=st.integers(0, 3), stage=LINES, strict_env=st.booleans(),
    snapshot=st.booleans(), exclude=st.just("bad[1-3]"), time=st.sampled_from(["10", "2-12"]), signal_lead=st.integers(1, 599),
    dependency=st.just("afterok:123:124_7,afterany:125"), modules=MODULES, exclude_bad_nodes=st.booleans(),
    pass_env=st.just(["P1"]), secrets=st.just(["S1"]),
)  # fmt: skip
_SITE = _optional(
    address_suffix=LINE, interface=LINE, skip=st.just(["comment", "open-mode"]), add=OPTIONS, gres_name=LINE,
    gpus_form=st.just("gres"), modules=MODULES, mpi=st.just("pmix"), env=VARIABLES, requeue=st.booleans(), threads=_NUMBER,
)  # fmt: skip
_SIZES = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"gpus_per_node": _NUMBER}),
    st.fixed_dictionaries({"gpus_per_node": st.just("4,4,2"), "nodes": st.just(3)}),
    st.fixed_dictionaries({"gres": LINE.filter(lambda text: "gpu" not in text)}),
    st.fixed_dictionaries({"nproc_per_node": _NUMBER, "array": st.just("0-7%2")}),
    st.fixed_dictionaries({"nodelist": st.just("a[1-2],b7"), "nodes": st.integers(3, 9)}),
)
_MEMORY = st.sampled_from([{}, {"mem": "all"}, {"mem": "2.5GB"}, {"mem_per_cpu": "1G"}, {"mem_per_gpu": 16}])
_PLACES = st.sampled_from([{}, {"venv": True}, {"venv": "packed.tar.gz"}, {"conda": "c"}, {"container": True}])
CONTAINERS = ("apptainer", "singularity", "pyxis", "enroot", "podman", "docker", "charliecloud")


@st.composite
def _program(draw: Draw) -> dict[str, Any]:
    """What runs, and how."""
    way = draw(
        st.sampled_from(["worldsize", "srun", "torchrun", "accelerate", "deepspeed", "horovodrun", "template"])
    )
    begins = draw(st.sampled_from([["-m", "pack.train"], ["train.py"], []])) or [f"t{draw(WORD)}"]
    asked: dict[str, Any] = {"launcher": way, "program": [*begins, *draw(WORDS)]}
    if way == "template" or (way == "accelerate" and draw(st.booleans())):
        asked["command"] = f"launch --of {{num_processes}} {shlex.quote(draw(WORD))}"
    return asked


@st.composite
def _container(draw: Draw) -> dict[str, Any]:
    path = LINE.map(lambda text: "/b" + text.replace(":", "").replace(",", ""))
    optional = _optional(
        binds=st.lists(st.tuples(path, st.sampled_from(["", ":/in side", ":/in:ro"])).map("".join), max_size=2),
        env=VARIABLES, home=st.booleans(), gpus=st.sampled_from(["nvidia", "amd", "none"]), options=OPTIONS,
    )  # fmt: skip
    return {"image": f"img{draw(LINE)}", "runtime": draw(st.sampled_from(CONTAINERS)), **draw(optional)}


@st.composite
def any_jobs(draw: Draw) -> AnyJob:
    """A job that no rule refuses."""
    asked = {
        "nodes": draw(_NUMBER),
        **draw(_ASKED),
        **draw(_SIZES),
        **draw(_MEMORY),
        **draw(_PLACES),
        **draw(_program()),
    }
    asked |= {"env": draw(VARIABLES), "setup": draw(SETUPS)}
    if "conda" in asked:
        asked["conda"] = draw(LINE)
    if "container" in asked:
        asked["container"] = draw(_container())
    folders = {name: draw(FOLDER) for name in ("job", "chdir", "venv", "python")}
    return AnyJob(asked, draw(_SITE), folders, draw(st.sampled_from([0, 0, 0, 75, 3])))
