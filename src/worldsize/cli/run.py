"""Room: `worldsize run`: torchrun's options and ours, to a plan. The program's arguments pass through untouched."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from worldsize.cli import hosts
from worldsize.cli.options import SECONDS, debug, debugged
from worldsize.cli.words import OursFirst
from worldsize.errors import ConfigError
from worldsize.launch import env, local, program
from worldsize.launch.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable

_STATIC_PORT = 29500
_CHANGING_RESTARTS = 3

_HELP = """Start SCRIPT on every rank, with torchrun's environment, watch it, and end with its exit code.

Everything after SCRIPT is the program's, byte for byte:

\b
    worldsize run --nproc-per-node 2 train.py --lr 1e-3

Options may also stand after the script, if a `--` ends them; what follows the `--` is the program's:

\b
    worldsize run train.py --nproc-per-node 2 -- --lr 1e-3

So a program that takes a `--` itself is written with one before the script: `worldsize run -- train.py a -- b`.
Options are torchrun's where it has them; `-` and `_` are alike. On several nodes give the same command on each, with
its own --node-rank and node 0's address in --rdzv-endpoint ([::1]:29400 with IPv6); or name them here, and they are
reached by ssh:

\b
    worldsize run train.py --hosts a:4,b:4 -- --lr 1e-3

Exit code: that of the first failing rank, 128 + n after signal n; 75 when the ranks stopped on request with
everything committed (start again to go on); 2 when nothing was started.
"""


_OPTIONS: tuple[Callable[[Callable[..., None]], Callable[..., None]], ...] = (
    click.option(
        "-n",
        "--nproc-per-node",
        default="1",
        metavar="[MIN:]N|auto|gpu|cpu",
        show_default=True,
        help="Ranks here; with MIN goes on with fewer where a slot fails again and again.",
    ),
    click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m."),
    click.option("--no-python", is_flag=True, help="Execute SCRIPT as it is."),
    click.option("--strategy", help="How the model lies over the ranks, for a Run or Trainer."),
    click.option("--tp", type=click.IntRange(1), help="Tensor parallel: over how many ranks each layer is split."),
    click.option(
        "--pp", type=click.IntRange(1), help="Pipeline parallel: over how many ranks the model's stages lie."
    ),
    click.option("--schedule", help="Under --pp: gpipe, 1f1b, interleaved1f1b, ... See docs/strategies.md."),
    click.option(
        "--cp", type=click.IntRange(1), help="Context parallel: over how many ranks each sequence is split."
    ),
    click.option(
        "--replicas", type=click.IntRange(1), help="Under hsdp: copies of the shards; one a host otherwise."
    ),
    click.option("--precision", help="fp64, fp32, bf16 or fp16, for a Run or Trainer."),
    click.option("--track", metavar="NAME,...", help="tensorboard, mlflow, wandb: where a Run's numbers go too."),
    click.option(
        "--stall", metavar="WORDS", help="What a stuck Run does: wait, requeue, off; times. See docs/watchdog.md."
    ),
    click.option("--nonfinite", help="What a Run does about NaN: stop, skip, rewind, ignore. See docs/watchdog.md."),
    click.option(
        "--deepspeed-config", metavar="FILE", help="DeepSpeed's JSON, for the strategies deepspeed and zero0-3."
    ),
    click.option(
        "--profile", metavar="FIRST:STOP", help="torch's profiler on these steps of a Run. See docs/see.md."
    ),
    debug,
    click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="What ranks compute on."),
    click.option("--log-dir", type=click.Path(path_type=Path), help="Keep attempts/<n>/rank-<k>.log here."),
    click.option("--grace", type=SECONDS, default="30s", show_default=True, help="From a stop signal to SIGKILL."),
    click.option(
        "--peer-grace",
        type=SECONDS,
        default="5s",
        show_default=True,
        help="The same after a rank failed; at most 0.5s if commits are reported.",
    ),
    click.option(
        "--max-restarts",
        type=click.IntRange(0),
        help="After failures. [default: 0; with MIN 3, anew with each commit]",
    ),
    click.option("--restart-delay", type=SECONDS, default="0s", show_default=True, help="Before each restart."),
    click.option(
        "--spare/--no-spare",
        default=True,
        show_default=True,
        help="With --max-restarts: an idle interpreter that ranks are forked from, unless SCRIPT sets variables; 0.3 GB.",
    ),
    click.option(
        "--nnodes",
        default="1",
        metavar="[MIN:]N",
        show_default=True,
        help="Machines; with MIN they may come and go while it runs.",
    ),
    click.option(
        "--last-call",
        type=SECONDS,
        default="30s",
        show_default=True,
        help="With MIN: how long a number of machines waits for one more.",
    ),
    click.option(
        "--slot-retries",
        type=click.IntRange(0),
        default=1,
        show_default=True,
        help="With MIN ranks: how often a slot may fail without a commit and stay.",
    ),
    click.option("--node-rank", type=click.IntRange(0), help="This machine's number."),
    click.option("--rdzv-endpoint", metavar="HOST:PORT", help="Where the machines meet: on node 0."),
    click.option("--rdzv-id", help="A name for this start, equal on all machines."),
    click.option("--rdzv-timeout", type=SECONDS, default="10m", show_default=True, help="To wait for all machines."),
    click.option("--rdzv-backend", type=click.Choice(["static", "c10d"]), help="Either: there is one way to meet."),
    click.option("--master-addr", help="As --rdzv-endpoint, with --master-port."),
    click.option("--master-port", type=click.IntRange(1, 65535), help="On one machine: the port of rank 0's store."),
    click.option("--standalone", is_flag=True, help="One machine: the default."),
    click.option(
        "--one-console", is_flag=True, help="All machines write to one console: only the first says the end."
    ),
    *hosts.OPTIONS,
    click.option("--role", default="default", hidden=True),
    click.option("--monitor-interval", hidden=True, expose_value=False),
    click.option("-r", "--redirects", hidden=True, expose_value=False),
    click.option("-t", "--tee", hidden=True, expose_value=False),
)


def _with_options(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.command(cls=OursFirst, help=_HELP, context_settings={"allow_interspersed_args": False})
@_with_options
@click.argument("words", nargs=-1, type=click.UNPROCESSED, required=True, metavar="SCRIPT [ARGS]...")
@click.pass_context
def command(ctx: click.Context, /, words: tuple[str, ...], **options: Any) -> None:
    """Plan, run, exit with its code."""
    if hosts.asked(options):
        sys.exit(hosts.start(ctx))
    sys.exit(local.run(plan(words[0], words[1:], options)))


def plan(script: str, args: tuple[str, ...], options: dict[str, Any]) -> Plan:
    """What the options ask for.

    Raises:
        ConfigError: they contradict each other, or ask for what is not there.
    """
    least, nodes = _range(options["nnodes"])
    fewest, ranks = _ranks(options)
    endpoint = _endpoint(options) if nodes > 1 else None
    if nodes > 1 and (options["standalone"] or endpoint is None):
        raise ConfigError(
            f"{nodes} nodes need an endpoint where they meet", do="give node 0's address: --rdzv-endpoint host:29400"
        )
    if options["node_rank"] is not None and options["node_rank"] >= nodes:
        raise ConfigError(f"--node-rank {options['node_rank']} of {nodes} nodes", do="count from 0 to --nnodes - 1")
    return Plan(
        argv=program.argv(script, args, module=options["module"], python=not options["no_python"]),
        nproc=ranks,
        least_nproc=fewest,
        nodes=nodes,
        least=least,
        node=options["node_rank"],
        endpoint=endpoint,
        master_port=options["master_port"] if nodes == 1 and not options["standalone"] else None,
        run_id=options["rdzv_id"],
        max_restarts=_restarts(options["max_restarts"], changes=least is not None or fewest is not None),
        options=_for_ranks(options),
        **{name: options[name] for name in _AS_THEY_ARE},
    )


_AS_THEY_ARE = (
    "one_console",
    "role",
    "restart_delay",
    "last_call",
    "slot_retries",
    "spare",
    "grace",
    "peer_grace",
    "rdzv_timeout",
    "log_dir",
)


def _for_ranks(options: dict[str, Any]) -> dict[str, str]:
    names = (
        "strategy", "tp", "pp", "cp", "schedule", "replicas", "precision", "deepspeed_config", "device", "stall", "nonfinite",
        "track",
    )  # fmt: skip
    ours = {f"WORLDSIZE_{name.upper()}": str(options[name]) for name in names if options[name] is not None}
    if options["profile"] is not None:
        ours["WORLDSIZE_PROFILE_STEPS"] = str(options["profile"])
    return ours | debugged(options["debug"])


def _range(text: str) -> tuple[int | None, int]:
    """MIN and N of --nnodes; no MIN where the number stays."""
    least, colon, most = text.rpartition(":")
    counts = [int(word) for word in (least, most) if word.isascii() and word.isdigit()]
    if len(counts) != 1 + bool(colon) or not 1 <= counts[0] <= counts[-1]:
        raise ConfigError(
            "--nnodes is not a number of machines", found=text, do="give a number, or MIN:MAX from 1 on"
        )
    return counts[0] if counts[0] < counts[-1] else None, counts[-1]


def _ranks(options: dict[str, Any]) -> tuple[int | None, int]:
    """MIN and N of --nproc-per-node."""
    fewest, colon, most = options["nproc_per_node"].rpartition(":")
    count = program.ranks(most, env.read(), options["device"])
    if not colon:
        return None, count
    if not (fewest.isascii() and fewest.isdigit() and 1 <= int(fewest) <= count):
        raise ConfigError(
            "--nproc-per-node MIN:N begins with no number of ranks up to N",
            found=f"{options['nproc_per_node']}, with {count} ranks here",
            do=f"give a MIN of 1 to {count}",
        )
    return int(fewest) if int(fewest) < count else None, count


def _restarts(asked: int | None, *, changes: bool) -> int:
    """Where the world may change it is meant to go on."""
    return asked if asked is not None else _CHANGING_RESTARTS if changes else 0


def _endpoint(options: dict[str, Any]) -> tuple[str, int] | None:
    from worldsize.runtime.network import split_endpoint

    if options["rdzv_endpoint"]:
        return split_endpoint(options["rdzv_endpoint"], _STATIC_PORT)
    if options["master_addr"]:
        return options["master_addr"].strip("[]"), options["master_port"] or _STATIC_PORT
    return None
