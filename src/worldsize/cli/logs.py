"""Room: `worldsize logs`: what jobs printed, and print."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from worldsize.errors import ConfigError
from worldsize.launch.slurm import logs, states
from worldsize.launch.slurm.known import Desk
from worldsize.launch.slurm.watch import Pace, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worldsize.launch.slurm.known import Known

_PIECE_S, _QUIET_S = 0.1, 2.0


class _Rank(click.ParamType[int]):
    name = "rank"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """A number, or `logs.ALL`."""
        text = str(value)
        if text == "all":
            return logs.ALL
        return int(text) if text.isdigit() else self.fail(f"{text!r} is neither a rank nor 'all'", param, ctx)


@click.command()
@click.argument("job", metavar="JOB")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended, and end with its exit code.")
@click.option(
    "--rank", "ranks", type=_Rank(), multiple=True, metavar="R|all", help="What this rank printed; several times."
)
@click.option("--attempt", type=click.IntRange(0), help="Only this attempt; with --rank, this start of the ranks.")
@click.option("--clusters", "-M", "cluster", help="Another cluster than the job's own, or the default one.")
def command(job: str, *, follow: bool, ranks: tuple[int, ...], attempt: int | None, cluster: str | None) -> None:
    """Show what a job prints: all of it, or what single ranks print. Lines say where they are from if that may differ."""
    desk = Desk.here(cluster)
    members = desk.find([job])
    merged = logs.Merged(_out)

    def more(jobs: Sequence[Known]) -> None:
        merged.add(logs.select(jobs, ranks, attempt))

    more(members)
    try:
        if follow:
            sys.exit(_follow(Watch(desk, [job]), merged, more))
        merged.finish()
    except BrokenPipeError:  # who reads has seen enough
        _silence()
        return
    if not merged.shown:
        raise _nothing(members, ranks, attempt)


def _follow(watch: Watch, merged: logs.Merged, more: Callable[[Sequence[Known]], None]) -> int:
    """Until all are over; their exit code."""
    pace = Pace(_PIECE_S, _QUIET_S)
    while not watch.over:
        if time.monotonic() >= watch.due:
            for known in watch.look():
                if not known.ended:
                    click.echo(f"worldsize: {known.job} is {states.words(known.state)}", err=True)
            more(watch.jobs)
        wait = pace.after(news=merged.pump())
        if not watch.over:
            time.sleep(wait)
    merged.finish()
    for known in watch.jobs:
        click.echo(f"worldsize: {known.job} is {states.words(known.state)}", err=True)
    return watch.code


def _out(data: bytes) -> None:
    click.echo(data, nl=False)


def _silence() -> None:
    """Nobody reads: what the interpreter would flush at its end goes nowhere."""
    sys.stdout = open("/dev/null", "w", encoding="utf-8")  # noqa: PTH123, SIM115 - open until the end


def _nothing(members: Sequence[Known], ranks: Sequence[int], attempt: int | None) -> ConfigError:
    names = ", ".join(known.job for known in members[:3])
    paths = [source.path for known in members for source in logs.of_job(known)]
    if ranks:
        kept = sorted({path.name for known in members for path in logs.attempts(known)}, key=int)
        found = f"attempts {', '.join(kept)}" if kept else "no files of single ranks"
        do = "leave --rank out: the job's log has all of them" if not kept else "see another --rank or --attempt"
        return ConfigError(f"job {names} printed nothing as this rank", found=found, do=do)
    if not paths:
        return ConfigError(f"nobody says where job {names} prints to", do="look into its working folder")
    if attempt is not None:
        return ConfigError(
            f"job {names} printed nothing in attempt {attempt}", found=str(paths[0]), do="leave --attempt out"
        )
    if all(known.waits for known in members):
        return ConfigError(
            f"job {names} has printed nothing yet", found="it waits", do=f"worldsize why {members[0].job}"
        )
    return ConfigError(
        f"job {names} has printed nothing", found=f"log {paths[0]}", do="worldsize status shows where it is"
    )
