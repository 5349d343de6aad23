"""Room: `worldsize doctor`: which hosts, how long, and what to print of the findings."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from worldsize.cli.options import SECONDS
from worldsize.errors import EXIT_FAILED, ConfigError
from worldsize.launch import env
from worldsize.launch.ssh import hosts, remote
from worldsize.runtime.hostlist import expand
from worldsize.tools.doctor import preflight
from worldsize.tools.doctor.finding import problems, report
from worldsize.tools.doctor.start import Way, inside
from worldsize.tools.doctor.visit import Ask, visit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from worldsize.tools.doctor.finding import Finding

_HELP = """Look at the hosts before a training begins, or where it is slow: what is wrong, which host, what to do.

\b
    worldsize doctor                        # this host
    worldsize doctor --hosts a,b            # over ssh
    worldsize doctor --nodes 4 --srun-args "-p gpu --gpus-per-node 8"

Inside a Slurm job it looks at all nodes of the job. What follows a `--` is the command that is Python on the hosts.

Exit code: 0 without a problem, 1 with one (warnings are none), 2 when nothing was started.
"""


@click.command(help=_HELP)
@click.option("-N", "--nodes", type=click.IntRange(1), help="As many nodes of Slurm, through srun.")
@click.option("--hosts", "named", metavar="HOST,...", help="These hosts, over ssh.")
@click.option("--hostfile", type=click.Path(path_type=Path), help="The same from a file, one a line.")
@click.option("--srun-args", default="", metavar="WORDS", help="Further options of srun: '-p gpu --gpus-per-node 8'.")
@click.option("--ssh-args", default="", metavar="WORDS", help="Further options of ssh: '-F file -p 2222'.")
@click.option("--remote-shell", type=click.Choice(remote.SHELLS), default="ssh", show_default=True)
@click.option("--run-dir", type=click.Path(path_type=Path), help="The folder for runs. [default: the working folder]")
@click.option("--quick", is_flag=True, help="Shorter measurements, and no torch unless there are GPUs.")
@click.option("--torch/--no-torch", default=None, help="Measure collectives too. [default: where torch is]")
@click.option("--start-timeout", type=SECONDS, default="10m", show_default=True, help="To wait for the hosts.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("--preflight", nargs=3, hidden=True, metavar="FOLDER JOB ATTEMPT")
@click.option("--need", type=click.IntRange(1), default=1, hidden=True)
@click.option("--nodelist", default="", hidden=True)
@click.option("--exclude", default="", hidden=True)
@click.argument("python", nargs=-1, type=click.UNPROCESSED, metavar="[-- PYTHON...]")
def command(python: tuple[str, ...], **options: Any) -> None:
    """Start the agents, examine, judge, print."""
    environ = env.read()
    way = _way(options, python or (sys.executable,), environ)
    run_dir = str((options["run_dir"] or Path()).absolute())
    ask = Ask(run_dir, options["run_dir"] is not None, options["quick"], options["torch"], options["start_timeout"])
    findings = visit(way, ask, environ, lambda line: click.echo(f"worldsize: {line}", err=True))
    if options["preflight"]:
        _preflight(way, options, findings)
        return
    if options["as_json"]:
        told = {"findings": [finding.to_json() for finding in findings], "problems": len(problems(findings))}
        click.echo(json.dumps(told))
    for line in () if options["as_json"] else report(findings):
        click.echo(line)
    sys.exit(EXIT_FAILED if problems(findings) else 0)


def _preflight(way: Way, options: Mapping[str, Any], findings: Sequence[Finding]) -> None:
    """The findings go to the job's log, what follows to its script."""
    folder, job, attempt = options["preflight"]
    request = preflight.Request(
        Path(folder), job, attempt, options["need"], way.count, options["nodelist"], options["exclude"]
    )
    answer = preflight.decide(request, findings)
    preflight.record(request, answer, findings)
    for line in report(findings):
        click.echo(line, err=True)
    click.echo(f"worldsize: preflight: {answer.why}", err=True)
    click.echo(answer.text)


def _way(options: Mapping[str, Any], python: tuple[str, ...], environ: Mapping[str, str]) -> Way:
    listed = _listed(options)
    if listed and options["nodes"]:
        raise ConfigError("--nodes and hosts contradict each other", do="drop one: srun or ssh")
    if not listed and (options["ssh_args"] or options["remote_shell"] != "ssh"):
        raise ConfigError("--ssh-args and --remote-shell without hosts", do="name them: --hosts a,b")
    if listed:
        ssh = ("--remote-shell", options["remote_shell"], *_option("--ssh-args", options["ssh_args"]))
        return Way(python, hosts=tuple(host.name for host in listed), ssh=ssh)
    joined = inside(environ)
    if options["srun_args"] and not (options["nodes"] or joined):
        raise ConfigError("--srun-args without nodes", do="say how many: --nodes 4")
    if joined is not None and (options["nodes"] or 0) > joined:
        raise ConfigError(
            "--nodes is more than this job has", found=f"{options['nodes']}, job has {joined}", do="leave it out"
        )
    nodes = options["nodes"] or joined
    return Way(
        python,
        nodes=nodes,
        srun=tuple(shlex.split(options["srun_args"])),
        names=tuple(expand(environ.get("SLURM_JOB_NODELIST", ""))) if joined and joined == nodes else (),
        inside=joined is not None,
    )


def _listed(options: Mapping[str, Any]) -> list[hosts.Host]:
    if options["named"] and options["hostfile"]:
        raise ConfigError("--hosts and --hostfile contradict each other", do="drop one of them")
    if options["hostfile"]:
        return hosts.filed(_text(options["hostfile"]), str(options["hostfile"]))
    return hosts.listed(options["named"]) if options["named"] else []


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the hostfile cannot be read", found=str(error), do="see --hostfile") from error


def _option(name: str, value: str) -> tuple[str, ...]:
    return (f"{name}={value}",) if value else ()
