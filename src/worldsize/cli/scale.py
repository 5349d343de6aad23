"""Room: `worldsize scale`: the same program on more and more ranks, here or in a queue, and what each of them brought."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from worldsize.cli.table import table
from worldsize.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worldsize.tools.scale.measure import Place, Size

_HELP = """Measure how SCRIPT's speed grows with its ranks.

\b
    worldsize scale train.py --ranks 1,2,4 --strategies ddp,fsdp
    worldsize scale train.py --nodes 1,2,4 -c job.yaml
    worldsize scale train.py --ranks 1,2,4,8 --weak

The global batch is the program's own on any number of ranks, so it is the same training; with --weak it grows with them.
Writes scale.csv and scale.svg beside the trials.
"""


@click.command(help=_HELP)
@click.option("--ranks", help="How many here: 1,2,4.")
@click.option("--nodes", help="How many of a Slurm queue: 1,2,4; what else the job needs is in the file of -c.")
@click.option("-c", "--config", type=click.Path(path_type=Path), help="The job (YAML), for --nodes.")
@click.option("--profile", "site", type=click.Path(path_type=Path), help="The site profile, for --nodes.")
@click.option("--strategies", default="", help="ddp,fsdp: each on each size. [default: the program's own]")
@click.option(
    "--duration", default="100st", show_default=True, help="Of a trial: 200st, 1ep. Its first quarter is left out."
)
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True, help="How often all is measured.")
@click.option("--weak", is_flag=True, help="The global batch grows with the ranks.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("scale"), show_default=True, help="A new folder."
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(script: str, args: tuple[str, ...], out: Path, *, repeats: int, weak: bool, **asked: Any) -> None:
    """Run the trials, say each point when it is there, then all of them together."""
    from worldsize.config import Duration
    from worldsize.tools.scale import measure, points, show

    if out.exists():
        raise ConfigError(f"{out} is there already", do="give another --out, or remove it")
    given = {name: _counts(name, asked[name]) for name in ("ranks", "nodes") if asked[name]}
    if len(given) != 1:
        raise ConfigError(
            "where shall it be measured?", found=", ".join(given) or "neither", do="give --ranks or --nodes"
        )
    place, sizes = (
        _here(script, args, out, given["ranks"])
        if "ranks" in given
        else _queue(script, args, out, given["nodes"], asked)
    )
    duration = str(Duration.parse(asked["duration"]))
    strategies = tuple(name.strip() for name in asked["strategies"].split(",") if name.strip()) or ("",)
    wanted = measure.Asked(sizes, strategies, repeats, weak, {"WORLDSIZE_DURATION": duration})
    found = []
    for point in measure.points_of(place, wanted):
        found.append(point)
        click.echo(
            f"worldsize: {point.strategy or 'own'} on {point.ranks}: {point.step[1] * 1e3:.4g} ms a step", err=True
        )
    rows = points.compared(found)
    (out / "scale.csv").write_text(show.as_csv(rows), encoding="utf-8")
    (out / "scale.svg").write_text(show.picture(rows, f"{Path(script).name}"), encoding="utf-8")
    shown = show.cells(rows)
    for line in table(shown, "l" + "r" * (len(shown[0]) - 1)):
        click.echo(line)
    click.echo(f"worldsize: {out / 'scale.csv'} and {out / 'scale.svg'}", err=True)


def _counts(name: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--{name} {text}", do="give numbers from 1 up, with commas between: 1,2,4")
    return sorted({int(word) for word in words})


def _here(script: str, args: Sequence[str], out: Path, counts: list[int]) -> tuple[Place, list[Size]]:
    from worldsize.tools.scale.measure import Here, Size
    from worldsize.tools.trial import Program

    out.mkdir(parents=True)
    return Here(Program(script, args, out)), [Size(1, count) for count in counts]


def _queue(
    script: str, args: Sequence[str], out: Path, counts: list[int], asked: dict[str, Any]
) -> tuple[Place, list[Size]]:
    from worldsize.launch import env, profile, yamlfile
    from worldsize.launch.spec import JobSpec
    from worldsize.tools.scale.measure import Queue, Size

    values: dict[str, Any] = yamlfile.load(asked["config"]) if asked["config"] else {}
    spec = JobSpec.of({**values, "nodes": counts[0], "program": (script, *args)})
    out.mkdir(parents=True)
    place = Queue(
        spec, profile.find(env.read(), asked["site"]), out.resolve(), lambda text: click.echo(text, err=True)
    )
    return place, [Size(count, count * spec.ranks_per_node) for count in counts]
