"""Room: which hosts, and how many ranks on each: --hosts, hostfiles of DeepSpeed and MPI, include and exclude. Pure.

A slot is one place for a rank. Filters name hosts, or single slots of a host, which are then its GPUs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from worldsize.errors import ConfigError, WorldError
from worldsize.runtime.hostlist import expand

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_ITEM = re.compile(
    r"(?P<name>(?:[\w.-]+@)?(?:\[[0-9A-Fa-f:.%\w]*:[^\]]*\]|\w(?:[\w.-]|\[[0-9,-]+\])*))(?::(?P<count>[0-9]+))?"
)
_SETTING = re.compile(r"(slots|max[_-]slots)=([0-9]+)")
_HOSTS_HELP = "write names with the ranks on each: a:4,b:4, or node[1-4]:8"
_FILE_HELP = "write a host a line: `a`, `a slots=4`, `a slots=4 max_slots=8` or `a:4`; # begins a comment"
_FILTER_HELP = "write a@b for hosts, a:0,2@b for single slots of one"


@dataclass(frozen=True, slots=True)
class Host:
    """One host.

    Attributes:
        name: as ssh is told; may begin with user@.
        slots: places for ranks; None: not said, see --nproc-per-node.
        chosen: a filter named them one by one: they are numbers of GPUs.
    """

    name: str
    slots: tuple[int, ...] | None = None
    chosen: bool = False


def listed(text: str) -> list[Host]:
    """The hosts of `a:4,b:4`; a host list of Slurm has the same ranks on each of its names.

    Raises:
        ConfigError: it is none, or names a host twice.
    """
    parts = re.findall(r"(?:\[[^\]]*\]|[^,\[])+|.", text.strip())
    items = [part.strip() for part in parts if part != ","]
    if not items or text.strip().startswith(",") or ",," in text:
        raise ConfigError(f"--hosts {text!r} names no hosts", do=_HOSTS_HELP)
    return _once([host for item in items for host in _hosts(item, f"--hosts {text!r}", _HOSTS_HELP)])


def filed(text: str, name: str) -> list[Host]:
    """The hosts of a hostfile: DeepSpeed's, Open MPI's, MPICH's, or a name a rank as batch systems write it.

    Args:
        text: what stands in it.
        name: the file, for errors.

    Raises:
        ConfigError: a line is none of these, or there is no host. The line is named.
    """
    found: list[Host] = []
    for number, raw in enumerate(text.splitlines(), 1):
        words = raw.partition("#")[0].split()
        if words:
            found += _line(words, f"{name}:{number}")
    if not found:
        raise ConfigError(f"{name} names no hosts", do=_FILE_HELP)
    return _once(_counted(found))


def chosen(hosts: list[Host], include: str | None, exclude: str | None) -> list[Host]:
    """What DeepSpeed's filters leave, in the order of `hosts`.

    Raises:
        ConfigError: both are given, one names what is not there, or nothing is left.
    """
    if include and exclude:
        raise ConfigError("--include and --exclude contradict each other", do="drop one of them")
    if not include and not exclude:
        return hosts
    asked = _filter(include or exclude or "", hosts)
    left = list(_included(hosts, asked) if include else _excluded(hosts, asked))
    if not left:
        raise ConfigError(f"--exclude {exclude} leaves no host", do="exclude less")
    return left


def _line(words: list[str], where: str) -> Iterator[Host]:
    settings = [_SETTING.fullmatch(word) for word in words[1:]]
    if not all(settings):
        raise ConfigError(f"{where} is not understood", found=" ".join(words), do=_FILE_HELP)
    values = {match[1].replace("-", "_"): int(match[2]) for match in settings if match}
    for host in _hosts(words[0], where, _FILE_HELP):
        count = values.get("slots", None if host.slots is None else len(host.slots))
        if count == 0 or (count is not None and count > values.get("max_slots", count)):
            raise ConfigError(f"{where} has no such number of slots", found=" ".join(words), do=_FILE_HELP)
        yield replace(host, slots=None if count is None else tuple(range(count)))


def _hosts(item: str, where: str, do: str) -> Iterator[Host]:
    found = _ITEM.fullmatch(item)
    count = found["count"] if found else None
    if not found or count == "0":
        raise ConfigError(f"{where} is not understood", found=item, do=do)
    slots = None if count is None else tuple(range(int(count)))
    try:
        names = [found["name"]] if ":" in found["name"] else expand(found["name"])
    except WorldError as error:
        raise ConfigError(f"{where} is not understood", found=item, do=do) from error
    yield from (Host(re.sub(r"\[(.*:.*)\]", r"\1", name), slots) for name in names)


def _counted(hosts: list[Host]) -> list[Host]:
    """A bare name that comes several times has a rank for each."""
    bare = [host.name for host in hosts if host.slots is None]
    if len(set(bare)) == len(bare):
        return hosts
    counts = {name: bare.count(name) for name in bare}
    first = {host.name: host for host in reversed(hosts)}
    rest = [host for host in hosts if host.slots is not None or host is first[host.name]]
    return [replace(host, slots=tuple(range(counts[host.name]))) if host.slots is None else host for host in rest]


def _once(hosts: list[Host]) -> list[Host]:
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ConfigError(f"host {twice} is named twice", do="name it once, with all its slots")
    return hosts


def _filter(text: str, hosts: list[Host]) -> dict[str, tuple[int, ...]]:
    """Host -> the slots that are named; none named: all."""
    known = {host.name: host for host in hosts}
    asked: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        name, colon, numbers = part.partition(":")
        if not name or name in asked or (colon and not re.fullmatch(r"[0-9]+(,[0-9]+)*", numbers)):
            raise ConfigError(f"the filter {text!r} is not understood", found=part, do=_FILTER_HELP)
        if name not in known:
            raise ConfigError(f"the filter {text!r} names a host that is not there", found=name, do=_FILTER_HELP)
        asked[name] = tuple(sorted({int(number) for number in numbers.split(",")})) if colon else ()
        _check_slots(asked[name], known[name], text)
    return asked


def _check_slots(asked: Iterable[int], host: Host, text: str) -> None:
    missing = [slot for slot in asked if host.slots is None or slot not in host.slots]
    if missing:
        has = "its slots are not counted" if host.slots is None else f"{len(host.slots)} slots, from 0"
        raise ConfigError(f"the filter {text!r} names slot {missing[0]} of {host.name}", found=has, do=_FILTER_HELP)


def _included(hosts: list[Host], asked: dict[str, tuple[int, ...]]) -> Iterator[Host]:
    for host in hosts:
        if host.name in asked:
            slots = asked[host.name]
            yield replace(host, slots=slots, chosen=True) if slots else host


def _excluded(hosts: list[Host], asked: dict[str, tuple[int, ...]]) -> Iterator[Host]:
    for host in hosts:
        if host.name not in asked:
            yield host
        elif rest := tuple(slot for slot in host.slots or () if asked[host.name] and slot not in asked[host.name]):
            yield replace(host, slots=rest, chosen=True)
