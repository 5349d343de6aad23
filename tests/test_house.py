"""Room: the rules of the house that no linter knows: size budgets, words that belong to one room, what is loaded.

A function's length is its lines of code from `def` to its end: without its docstring, blank lines and comment lines;
the lines of a function inside it count for both.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import re
import subprocess
import sys
import tokenize
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from worldsize.cli.main import COMMANDS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "worldsize"
MAX_FILE, MAX_LOOP, MAX_STRATEGY = 600, 200, 250
SHORT, SHORT_SHARE = 20, 0.85
LONG, LONG_SHARE = 60, 0.01
MAX_COMMENTS_PER_100 = 8
ENGINES = {"deepspeed", "horovod", "wandb", "mlflow"}
TORCH_FREE = (
    "worldsize.runtime.env",
    "worldsize.runtime.hostlist",
    "worldsize.runtime.visible",
    "worldsize.runtime.network",
    "worldsize.runtime.report",
    "worldsize.runtime.keys",
    "worldsize.data.order",
    "worldsize.data.batch",
    "worldsize.checkpoint.manifest",
    "worldsize.checkpoint.owner",
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A Python file of the project with its syntax tree."""

    path: Path
    text: str
    tree: ast.Module

    @classmethod
    def read(cls, path: Path) -> Source:
        """Read and parse one file."""
        text = path.read_text(encoding="utf-8")
        return cls(path, text, ast.parse(text))

    @property
    def room(self) -> str:
        """The path below the package, e.g. train/loop.py."""
        return self.path.relative_to(PACKAGE).as_posix()

    @property
    def module(self) -> str:
        """The name it is imported by."""
        return ".".join(("worldsize", *self.path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
            ".__init__"
        )

    @property
    def functions(self) -> Iterator[Function]:
        """Every function and method, nested ones too."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))

    def where(self, node: ast.expr | ast.stmt) -> str:
        """The file and line of a node."""
        return f"{self.path.relative_to(ROOT).as_posix()}:{node.lineno}"


@cache
def package() -> tuple[Source, ...]:
    """Every module of the package."""
    return tuple(Source.read(path) for path in sorted(PACKAGE.rglob("*.py")))


@cache
def written_tests() -> tuple[Source, ...]:
    """Every file of tests, as it is written."""
    return tuple(Source.read(path) for path in sorted((ROOT / "tests").rglob("test_*.py")))


def code_lines(source: Source, node: Function) -> int:
    """The length of a function as the budgets count it."""
    first = node.body[0]
    has_docstring = ast.get_docstring(node) is not None and first.end_lineno is not None
    docstring = range(first.lineno, (first.end_lineno or 0) + 1) if has_docstring else range(0)
    lines = source.text.splitlines()
    return sum(
        bool(line := lines[number - 1].strip()) and not line.startswith("#")
        for number in range(node.lineno, (node.end_lineno or 0) + 1)
        if number not in docstring
    )


def imported(source: Source) -> Iterator[tuple[str, ast.stmt]]:
    """The top-level package of every absolute import, functions' own imports included."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).partition(".")[0], node


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_is_a_house() -> None:
    """The rules below look at files that exist."""
    assert len(package()) > 5
    assert len(written_tests()) > 3


def test_no_file_is_too_long() -> None:
    """No file of the package or the tests has more than 600 lines."""
    sizes = {source.path.name: source.text.count("\n") for source in chain(package(), written_tests())}
    assert {name: size for name, size in sizes.items() if size > MAX_FILE} == {}


def test_training_loop_is_small() -> None:
    """The training loop has under 200 lines."""
    assert (PACKAGE / "train" / "loop.py").read_text(encoding="utf-8").count("\n") < MAX_LOOP


def test_strategies_are_small() -> None:
    """Each of their classes has under 250 lines."""
    nodes = [
        (source, node) for source in package() if "strategies" in source.path.parts for node in ast.walk(source.tree)
    ]
    sizes = {
        source.where(node): (node.end_lineno or 0) - node.lineno
        for source, node in nodes
        if isinstance(node, ast.ClassDef)
    }
    assert {place: size for place, size in sizes.items() if size >= MAX_STRATEGY} == {}


def test_most_functions_are_short() -> None:
    """At least 85% of functions have at most 20 lines of code, and under 1% more than 60."""
    sizes = {source.where(node): code_lines(source, node) for source in package() for node in source.functions}
    longest = sorted(sizes.items(), key=lambda item: -item[1])[:10]
    assert sum(size <= SHORT for size in sizes.values()) >= SHORT_SHARE * len(sizes), longest
    assert sum(size > LONG for size in sizes.values()) < LONG_SHARE * len(sizes), longest


def test_comments_are_few() -> None:
    """Fewer than 8 comments per 100 lines; words to tools (noqa, type, fmt) do not count."""
    pragma = re.compile(r"#\s*(noqa|type:|fmt:|pragma|ruff:)")
    comments = {
        source.room: sum(
            token.type == tokenize.COMMENT and not pragma.match(token.string)
            for token in tokenize.generate_tokens(io.StringIO(source.text).readline)
        )
        for source in package()
    }
    lines = sum(source.text.count("\n") for source in package())
    assert 100 * sum(comments.values()) < MAX_COMMENTS_PER_100 * lines, comments


def test_modules_name_their_room() -> None:
    """Every module opens by naming its room; a package opens with its documentation."""
    openings = {source: ast.get_docstring(source.tree) or "" for source in package()}
    assert [
        source.room
        for source, opening in openings.items()
        if not (opening if source.path.name == "__init__.py" else opening.startswith("Room: "))
    ] == []


def test_environment_has_two_rooms() -> None:
    """Only runtime/env.py and launch/env.py touch the process environment."""
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    assert [
        source.where(node)
        for source in package()
        if source.room not in {"runtime/env.py", "launch/env.py"}
        for node in ast.walk(source.tree)
        if (isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os")
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names})
    ] == []


def test_subprocess_has_one_room() -> None:
    """Only launch/shell.py imports subprocess."""
    assert [
        source.where(node)
        for source in package()
        if source.room != "launch/shell.py"
        for name, node in imported(source)
        if name == "subprocess"
    ] == []


def test_engines_have_their_own_rooms() -> None:
    """Deepspeed, horovod, wandb and mlflow are each imported only in the file or folder of that name."""
    assert [
        source.where(node)
        for source in package()
        for name, node in imported(source)
        if name in ENGINES and name not in source.path.with_suffix("").parts
    ] == []


@pytest.mark.parametrize("room", ["train", "data", "checkpoint", "track"])
def test_rooms_do_not_ask_who_they_are(room: str) -> None:
    """Training, data, checkpoints and trackers never ask for the scheduler, the first rank, or a wrapper's class."""
    words = re.compile(r"SLURM_|\brank\s*[!=]=\s*0\b|is_main|isinstance\([^)]*(DDP|FSDP|DistributedDataParallel)")
    assert [
        f"{source.room}:{number}: {line.strip()}"
        for source in package()
        if source.room.startswith(f"{room}/")
        for number, line in enumerate(source.text.splitlines(), start=1)
        if words.search(line)
    ] == []


def test_nothing_is_left_for_later() -> None:
    """No reminder to finish something is left in the package."""
    words = re.compile(r"\b(TODO|FIXME|XXX)\b|NotImplementedError")
    assert [
        f"{source.room}:{number}"
        for source in package()
        for number, line in enumerate(source.text.splitlines(), start=1)
        if words.search(line)
    ] == []


def test_tests_say_their_fact() -> None:
    """Every test has a docstring: the fact it shows."""
    assert [
        source.where(node)
        for source in written_tests()
        for node in source.functions
        if node.name.startswith("test_") and not ast.get_docstring(node)
    ] == []


def test_nothing_of_one_machine_is_kept() -> None:
    """No file of the project holds a path of a build machine or the address of a package index."""
    words = re.compile(
        r"(^|[^A-Za-z0-9_.])/(work|farm)/|https?://[^ )\"]*/(simple|packages)/|index[-]url", re.MULTILINE
    )
    listed = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    paths = [path for name in names if name and (path := ROOT / name).is_file()]
    assert len(paths) > len(package())
    assert [path.name for path in paths if words.search(path.read_text(encoding="utf-8", errors="replace"))] == []


def test_every_requirement_is_pinned() -> None:
    """constraints.txt holds an exact version, and nothing else, for everything that pyproject.toml asks for."""
    import tomllib

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {line.partition("==")[0].lower() for line in lines if re.fullmatch(r"[\w.-]+==[\w.]+", line)}
    assert [line for line in lines if not line.startswith("#") and "==" not in line] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"].values()
    groups = project["dependency-groups"].values()
    asked = chain(project["build-system"]["requires"], project["project"]["dependencies"], *extras, *groups)
    names = {re.split(r"[^\w.-]", line)[0].lower() for line in asked if isinstance(line, str)}
    assert names - pins == set()


def test_import_worldsize_is_light() -> None:
    """`import worldsize` loads none of torch, numpy, pydantic, click, rich."""
    heavy = {"torch", "numpy", "pydantic", "click", "rich"}
    assert python(f"import sys, worldsize; print({heavy} & set(sys.modules))") == "set()\n"


def test_launch_half_never_loads_torch() -> None:
    """Importing all of launch and cli, and what they use of training, loads no torch."""
    modules = [source.module for source in package() if source.room.startswith(("launch/", "cli/"))]
    assert modules
    assert [name for name in TORCH_FREE if importlib.util.find_spec(name) is None] == []
    names = [*modules, *TORCH_FREE]
    code = f"import sys\nfrom importlib import import_module\nfor name in {names}: import_module(name)"
    assert python(f"{code}\nprint('torch' in sys.modules)") == "False\n"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)], ids=" ".join
)
def test_commands_never_load_torch(arguments: list[str]) -> None:
    """The command line and each of its commands answer without loading torch."""
    code = (
        f"import sys\nsys.argv = ['worldsize', *{arguments!r}]\nfrom worldsize.cli.main import main\n"
        "try: main()\nexcept SystemExit as end: code = end.code or 0\nelse: code = 0\n"
        "print('torch' in sys.modules, code)"
    )
    *answer, loaded = python(code).splitlines()
    assert any("worldsize" in line for line in answer)
    assert loaded == "False 0"


def test_a_preview_loads_only_what_it_shows() -> None:
    """A preview is there at once: it loads no torch, no reader of YAML, and nothing that talks to Slurm."""
    heavy = {"torch", "numpy", "rich", "ruamel.yaml", "difflib", "worldsize.launch.slurm.client"}
    words = ["worldsize", "submit", "train.py", "--nodes=2", "--gpus-per-node=4", "--time=2:00:00", "--preview"]
    code = (
        f"import os, sys\nsys.argv = {words!r}\nos.environ.update(HOME='', XDG_CONFIG_HOME='', WORLDSIZE_PROFILE='')\n"
        "from worldsize.cli.main import main\ntry: main()\nexcept SystemExit: pass\n"
        f"print({heavy!r} & set(sys.modules))"
    )
    *answer, loaded = python(code).splitlines()
    assert "#SBATCH --nodes=2" in answer
    assert loaded == "set()"
