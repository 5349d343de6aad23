"""Room: the options of `worldsize run` for several hosts over ssh, and what they make of a command line."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from worldsize.errors import ConfigError
from worldsize.launch import env
from worldsize.launch.ssh import hosts, remote
from worldsize.launch.ssh.run import Start, run
from worldsize.runtime.network import split_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

OPTIONS: tuple[Callable[[Callable[..., None]], Callable[..., None]], ...] = (
    click.option("--hosts", metavar="HOST[:N],...", help="Start on these hosts over ssh, N ranks on each."),
    click.option(
        "--hostfile", type=click.Path(path_type=Path), help="The same from a file: `host slots=N`, `host:N`."
    ),
    click.option(
        "--include", metavar="HOST[:SLOT,...]@...", help="Only these hosts of them, or slots (GPUs) of a host."
    ),
    click.option("--exclude", metavar="HOST[:SLOT,...]@...", help="All but these."),
    click.option("--remote-shell", type=click.Choice(remote.SHELLS), default="ssh", show_default=True),
    click.option("--ssh-args", default="", metavar="WORDS", help="Further options of ssh: '-F file -p 2222'."),
    click.option("--python", metavar="PATH", help="The interpreter on the hosts. [default: as here]"),
    click.option(
        "--env", "variables", multiple=True, metavar="NAME[=VALUE]", help="A variable for the ranks on hosts."
    ),
)
_NAMES = ("hosts", "hostfile", "include", "exclude", "remote_shell", "ssh_args", "python", "variables")
_FOLLOW = (
    "nproc_per_node",
    "nnodes",
    "node_rank",
    "rdzv_endpoint",
    "rdzv_id",
    "rdzv_backend",
    "master_addr",
    "master_port",
)
_CONTRADICT = ("nnodes", "node_rank", "standalone", "rdzv_id")


def asked(options: Mapping[str, Any]) -> bool:
    """Whether other hosts are meant.

    Raises:
        ConfigError: options say how to reach hosts, and none are named.
    """
    if options["hosts"] and options["hostfile"]:
        raise ConfigError("--hosts and --hostfile contradict each other", do="drop one of them")
    named = bool(options["hosts"] or options["hostfile"])
    alone = [name for name in ("include", "exclude", "python", "ssh_args", "variables") if options[name]]
    if alone and not named:
        flag = "--env" if alone[0] == "variables" else f"--{alone[0].replace('_', '-')}"
        raise ConfigError(f"{flag} without hosts", do="name them: --hosts a,b or --hostfile FILE")
    return named


def start(ctx: click.Context) -> int:
    """Start on the hosts that the command line names; the exit code."""
    options = ctx.params
    found = hosts.chosen(_hosts(options), options["include"], options["exclude"])
    _check(ctx, found)
    environ = env.read()
    address, port = _endpoint(options)
    return run(
        Start(
            hosts=tuple(found),
            way=remote.Way(
                tool=options["remote_shell"],
                python=options["python"] or sys.executable,
                folder=str(Path.cwd()),
                options=tuple(shlex.split(options["ssh_args"])),
                path=environ.get("PYTHONPATH"),
            ),
            words=(*_again(ctx), "--", *options["words"]),
            ranks=options["nproc_per_node"],
            env=_variables(options, environ),
            address=address,
            port=port,
            grace=options["grace"],
            limit=options["rdzv_timeout"],
        )
    )


def _hosts(options: Mapping[str, Any]) -> list[hosts.Host]:
    if options["hosts"]:
        return hosts.listed(options["hosts"])
    try:
        return hosts.filed(options["hostfile"].read_text(encoding="utf-8"), str(options["hostfile"]))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the hostfile cannot be read", found=str(error), do="see --hostfile") from error


def _check(ctx: click.Context, found: list[hosts.Host]) -> None:
    wrong = next((name for name in _CONTRADICT if _given(ctx, name)), None)
    if wrong:
        raise ConfigError(f"--{wrong.replace('_', '-')} is not yours to say with hosts", do="leave it out")
    said = next((host for host in found if host.slots is not None), None)
    if said and said.slots and _given(ctx, "nproc_per_node"):
        raise ConfigError(
            "--nproc-per-node and the slots of a host contradict each other",
            found=f"{ctx.params['nproc_per_node']} and {said.name}:{len(said.slots)}",
            do="drop one of them",
        )


def _given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _again(ctx: click.Context) -> Iterator[str]:
    """The options that were given and mean the same on every host."""
    for option in ctx.command.params:
        name, value = option.name or "", ctx.params.get(option.name or "")
        if not isinstance(option, click.Option) or name in (*_NAMES, *_FOLLOW) or not _given(ctx, name):
            continue
        if option.is_flag:
            yield option.opts[0] if value else option.secondary_opts[0]
        elif option.expose_value:
            yield f"{max(option.opts, key=len)}={value}"


def _endpoint(options: Mapping[str, Any]) -> tuple[str | None, int | None]:
    if options["rdzv_endpoint"]:
        host, port = split_endpoint(options["rdzv_endpoint"], 0)
        return host, port or None
    return (options["master_addr"] or "").strip("[]") or None, options["master_port"]


def _variables(options: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """What goes over: by its beginning, or because it is named; a name alone takes its value from here."""
    found = {name: value for name, value in environ.items() if name.startswith(remote.PASSED) or name == "PYTHONPATH"}
    for word in options["variables"]:
        name, equals, value = word.partition("=")
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) or not (equals or name in environ):
            raise ConfigError(f"--env {name} names no variable that is set here", do="write NAME=VALUE, or set it")
        if not equals and options["remote_shell"] == "pdsh":
            raise ConfigError(
                f"--env {name}: pdsh shows its value to all users of a host", do="use ssh, or give NAME=VALUE"
            )
        found[name] = value if equals else environ[name]
    return found
