"""Room: what a setting of a job or a site may look like, one function a kind: read, or refused with what to do."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from pydantic import BeforeValidator

from worldsize.errors import ConfigError, WorldError
from worldsize.launch import units
from worldsize.launch.given import nearest, refuse
from worldsize.runtime.hostlist import compress, expand

DEPENDENCIES = ("after", "afterany", "afterburstbuffer", "aftercorr", "afternotok", "afterok", "singleton")
MAILS = (
    "NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT", "TIME_LIMIT", "TIME_LIMIT_90",
    "TIME_LIMIT_80", "TIME_LIMIT_50", "ARRAY_TASKS",
)  # fmt: skip
Dependency = tuple[str, tuple[str, ...]]

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_JOB = re.compile(r"[0-9]+(?:_[0-9]+|_\*|\+[0-9]+)?")
_OPTION = re.compile(r"--[a-z][a-z0-9-]*(?:[= ].*)?")
_PATTERN = re.compile(r"%([0-9]*)(.?)")
_PATTERN_LETTERS = "%AaJjNnstux"
_TRUTHS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def by(read: Callable[..., Any], *arguments: Any) -> BeforeValidator:
    """A field whose value is what `read(value, *arguments)` makes of it."""

    def told(value: Any) -> Any:
        try:
            return read(value, *arguments)
        except (ConfigError, WorldError) as error:
            refuse(f"is refused: {error.what}", do=error.do or "see its description", found=error.found)

    return BeforeValidator(told)


def bare(value: Any) -> str:
    """Text of any characters but NUL; a number of a file is the text that stands there."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | PurePath):
        refuse("is no text", do="write text; true, false and the like in quotes")
    word = str(getattr(value, "written", value))
    if "\0" in word:
        refuse("holds a NUL character", do="leave it out")
    return word


def text(value: Any) -> str:
    """Text on one line."""
    word = bare(value)
    if _CONTROL.search(word):
        refuse("holds a line break or another control character", do="write it on one line")
    return word


def name(value: Any) -> str:
    """A job's name, which is a part of file names."""
    word = text(value)
    if "/" in word:
        refuse("has a / in it, which would be a folder where the name is part of a log's", do="write - or _ for it")
    return word


def choice(value: Any, *choices: str) -> str:
    """One word of several."""
    word = text(value)
    if word not in choices:
        refuse("is not known", do=nearest(word, choices))
    return word


def flag(value: Any) -> bool:
    """True or false, in the words of people too."""
    word = value if isinstance(value, bool) else _TRUTHS.get(text(value).lower())
    if word is None:
        refuse("is neither true nor false", do="write true or false")
    return word


def exclusive(value: Any) -> bool | str:
    """All of a node, or shared with jobs of the same user or label only."""
    return str(value) if value in ("user", "mcs") else flag(value)


def count(value: Any, least: int = 0, most: int = 2**31 - 1) -> int:
    """A whole number."""
    word = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(word, str) or not re.fullmatch(r"[+-]?[0-9]{1,12}", word):
        refuse("is no whole number", do="write one number, as in 4")
    if not least <= int(word) <= most:
        refuse(f"is below {least}" if int(word) < least else f"is above {most}", do="write another number")
    return int(word)


def number(value: Any, least: float = 0.0, most: float = math.inf) -> float:
    """A number: 3e-4, 0.1."""
    try:
        found = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        found = math.nan
    if math.isnan(found):
        refuse("is no number", do="write one number, as in 3e-4")
    if not least <= found <= most:
        refuse(f"is below {least:g}" if found < least else f"is above {most:g}", do="write another number")
    return found


def gpus(value: Any) -> int | tuple[int, ...]:
    """GPUs on each node: one number, or one for each node; equal ones are one number."""
    if isinstance(value, str) and ":" in value:
        refuse("names a kind of GPU", do=f"write gres: gpu:{value} instead")
    each = value.split(",") if isinstance(value, str) and "," in value else value
    if not isinstance(each, list | tuple):
        return count(each)
    numbers = tuple(count(number, 1) for number in each)
    if not numbers:
        refuse("is an empty list", do="write a number for each node")
    return numbers


def time(value: Any) -> str:
    """A time limit as days-hours:minutes:seconds."""
    return units.time_text(units.seconds(text(value)))


def memory(value: Any) -> str | None:
    """Memory as MiB; "all" of the node only in so many words, since 0 is often meant as "not set"."""
    word = text(value)
    mib = units.mebibytes(word)
    return "all" if word.lower() == "all" else units.memory_text(mib) if mib else None


def memory_part(value: Any) -> str | None:
    """Memory for each CPU or GPU as MiB."""
    if text(value).lower() == "all":
        refuse("cannot be all of the node", do="write mem: all")
    return memory(value)


def array(value: Any) -> str:
    """Array indices as Slurm writes them."""
    return str(units.array(text(value)))


def words(value: Any) -> tuple[str, ...]:
    """Lines of text; one by itself is a list of one."""
    return tuple(text(item) for item in listed(value))


def commands(value: Any) -> tuple[str, ...]:
    """Shell commands, of several lines too."""
    return tuple(bare(item) for item in listed(value))


def modules(value: Any) -> tuple[str, ...]:
    """Names of environment modules."""
    found = words(value)
    if any(re.search(r"\s", word) for word in found):
        refuse("has a blank in a name", do="write a list, one module each")
    return found


def names(value: Any) -> tuple[str, ...]:
    """Names of environment variables, never values."""
    found = words(value)
    if not all(_VARIABLE.fullmatch(word) for word in found):
        refuse("holds what is no name of a variable", do="write names alone: letters, digits and _")
    return found


_BASH = frozenset({
    "BASHOPTS", "BASHPID", "BASH_VERSINFO", "DIRSTACK", "EPOCHREALTIME", "EPOCHSECONDS", "EUID", "FUNCNAME", "GROUPS",
    "HISTCMD", "IFS", "LINENO", "OPTIND", "PIPESTATUS", "PPID", "PS4", "RANDOM", "SECONDS", "SHELLOPTS", "SRANDOM", "UID", "_",
})  # fmt: skip
"""A script that exports one of these would not hand on what it was given, or fail."""


def variables(value: Any) -> dict[str, str]:
    """Environment variables with their values."""
    if not isinstance(value, Mapping):
        refuse("is no mapping", do="write NAME: value, a line each")
    wrong = [key for key in value if not isinstance(key, str) or not _VARIABLE.fullmatch(key)]
    if wrong:
        refuse("has a name that no variable can have", found=repr(wrong[0]), do="use letters, digits and _")
    own = [key for key in value if key in _BASH]
    if own:
        refuse(f"has {own[0]}, which bash sets itself", do="set it in the program")
    empty = [key for key, item in value.items() if item is None]
    if empty:
        refuse(f"has no value for {empty[0]}", do='write "" for an empty one, or pass_env to take it from your shell')
    return {key: bare(item) for key, item in value.items()}


def program(value: Any) -> tuple[str, ...]:
    """The argv of a training."""
    if isinstance(value, str) and re.search(r"[\s'\"\\]", value):
        refuse("is one text", do="write a list, one argument each: [train.py, --lr, 1e-4]")
    argv = tuple(bare(item) for item in listed(value))
    if argv[:1] == ("-m",) and len(argv) == 1:
        refuse("has no module after -m", do="name it: [-m, package.train]")
    if argv and (not argv[0] or (argv[0].startswith("-") and argv[0] != "-m")):
        refuse("does not begin with a script", do="begin with a script, or with -m and a module", found=repr(argv[0]))
    return argv


def hosts(value: Any) -> str:
    """A host list in Slurm's grammar."""
    word = compress(words(value)) if isinstance(value, list | tuple) else text(value)
    if "/" in word:
        refuse("has a / in it: sbatch would read it as the name of a file", do="write the nodes: node[01-04,7]")
    expand(word)
    return word


def dependency(value: Any) -> tuple[Dependency, ...]:
    """What must have happened before: sbatch's text, a mapping, or a list of kinds with job ids."""
    if isinstance(value, str) and "?" in value:
        refuse("has a ? in it", do="all of them are waited for: write , between them, or name one")
    items = (
        value.split(",") if isinstance(value, str) else value.items() if isinstance(value, Mapping) else listed(value)
    )
    return tuple(_one_dependency(item) for item in items)


def mails(value: Any) -> str:
    """When Slurm writes a mail."""
    found = [word.strip().upper() for item in listed(value) for word in text(item).split(",")]
    unknown = next((word for word in found if word not in MAILS), None)
    if unknown is not None:
        refuse("names what Slurm sends no mail about", found=unknown, do=nearest(unknown, MAILS))
    return ",".join(found)


def log(value: Any) -> str:
    """The path of a log, with Slurm's % patterns in its last part alone: Slurm makes no folders."""
    word = text(value)
    folder, _, last = word.rpartition("/")
    if "%" in folder:
        refuse("has a % pattern in a folder, which Slurm would not make", do="use patterns in the file's name alone")
    if not last:
        refuse("names a folder", do="name a file in it: slurm-%j.out")
    wrong = next(
        (match[0] for match in _PATTERN.finditer(last) if match[2] not in _PATTERN_LETTERS or not match[2]), ""
    )
    if wrong or ("%" in last and "\\" in word):
        do = f"use %j, %A, %a, %x and others of {_PATTERN_LETTERS[1:]}; %% for a %; no \\ beside them"
        refuse("has a pattern that Slurm does not fill", found=wrong or word, do=do)
    return word


def options(value: Any) -> tuple[str, ...]:
    """Further options of sbatch as #SBATCH lines have them; a mapping of names to values is one too."""
    if isinstance(value, Mapping):
        value = [_option(str(key), item) for key, item in value.items() if item not in (None, False, "")]
    found = words(value)
    wrong = next((word for word in found if not _OPTION.fullmatch(word)), None)
    if wrong is not None:
        refuse("holds what is no long option", found=repr(wrong), do="write --name or --name=value, each by itself")
    return found


def skipped(value: Any) -> tuple[str, ...]:
    """Names of options, as sbatch writes them, without the --."""
    return tuple(word.removeprefix("--").replace("_", "-") for word in words(value))


def listed(value: Any) -> list[Any]:
    """The items of a list; text or a number by itself is one item."""
    if isinstance(value, Mapping | bool):
        refuse("is no list", do="write a list")
    return list(value) if isinstance(value, list | tuple) else [value]


def _option(key: str, value: Any) -> str:
    spelt = f"--{key.removeprefix('--').replace('_', '-')}"
    return spelt if value is True else f"{spelt}={shlex.quote(text(value))}"


def _one_dependency(item: Any) -> Dependency:
    kind, *jobs = item.strip().split(":") if isinstance(item, str) else listed(item)
    ids = tuple(text(job) for found in jobs for job in listed(found))
    if kind not in DEPENDENCIES:
        refuse("has a kind that Slurm does not know", found=repr(kind), do=nearest(str(kind), DEPENDENCIES))
    wrong = [job for job in ids if not _JOB.fullmatch(job)]
    if wrong or bool(ids) == (kind == "singleton"):
        found = f"{kind} {', '.join(wrong or ids)}".strip()
        refuse(
            "has no job ids as Slurm writes them",
            found=found,
            do="write afterok:123, afterok:123:124_7, or singleton",
        )
    return kind, ids
