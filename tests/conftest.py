"""Room: what this machine can run of the tests. What it cannot is skipped with its reason and listed at the end.

A test that is marked `slurm` may use a real cluster of namespaced nodes (`slurm`, or `slurm_accounted` with sacct). It
is made once by each process of pytest-xdist that comes to need it (a second, 80 MB; with accounting 5 s, 200 MB), with its
own folder, addresses and namespaces, so processes never wait for each other's nodes.

With `CI=true` on a Debian system as root, only missing GPUs excuse a test: any other skipped test fails the session,
and so does a session in which no test ran.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
from collections import defaultdict
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from worldsize.testing.slurm import Cluster

CI = bool(os.environ.get("CI"))
EXCUSED = "gpu"

# Several ranks share a few cores; torch reads this when it is first imported, here and in every started rank.
os.environ.setdefault("OMP_NUM_THREADS", "1")
hypothesis.settings.register_profile(
    "house",
    deadline=None,
    derandomize=CI,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("house")


@cache
def cuda_devices() -> int:
    """How many CUDA devices torch sees here."""
    import torch

    return torch.cuda.device_count()


@cache
def netns_refusal() -> str | None:
    """Why no network namespace can be made here, or None."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or not shutil.which("ip"):
        return "needs root and iproute2 for network namespaces"
    name = f"worldsize-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"needs network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


def _gpu(mark: pytest.Mark) -> str | None:
    wanted: int = mark.kwargs.get("count", mark.args[0] if mark.args else 1)
    found = cuda_devices()
    return f"needs {wanted} CUDA devices, {found} here" if found < wanted else None


def _netns(_: pytest.Mark) -> str | None:
    return netns_refusal()


@cache
def slurm_refusal(*, accounting: bool) -> str | None:
    """Why no Slurm cluster with nodes of their own can be started here, or None."""
    from worldsize.testing.slurm import needs

    env = needs.environment(os.environ)
    missing = needs.packages(env, accounting=accounting, ssh=True)
    if missing:
        return f"needs a Slurm cluster: no {', '.join(sorted(missing))}"
    refusal = needs.no_namespaces(env)
    return f"needs namespaces for Slurm's nodes: {refusal}" if refusal else None


def _slurm(mark: pytest.Mark) -> str | None:
    return slurm_refusal(accounting=mark.kwargs.get("accounting", False))


def _container(_: pytest.Mark) -> str | None:
    return None if shutil.which("ch-run") else "needs a container runtime: no ch-run"


def _horovod(_: pytest.Mark) -> str | None:
    return None if importlib.util.find_spec("horovod") else "needs Horovod (make engines)"


def _mpirun(_: pytest.Mark) -> str | None:
    return None if shutil.which("mpirun") else "needs mpirun to start ranks"


def _browser(_: pytest.Mark) -> str | None:
    return None if shutil.which("chromium") else "needs chromium to look at a page"


NEEDS: dict[str, Callable[[pytest.Mark], str | None]] = {
    "gpu": _gpu, "netns": _netns, "slurm": _slurm, "container": _container, "horovod": _horovod, "mpirun": _mpirun,
    "browser": _browser,
}  # fmt: skip
"""Marker -> what this machine lacks for it."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs more than this machine has, before its fixtures are made."""
    for name, missing in NEEDS.items():
        for mark in item.iter_markers(name):
            if reason := missing(mark):
                pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def _heard() -> Iterator[None]:
    """The suite may have been started by nohup or in a shell's background: what tests start would ignore these too."""
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGHUP, hang_up)
    signal.signal(signal.SIGINT, interrupt)


@pytest.fixture(scope="session")
def _slurm_session() -> Iterator[Cluster]:
    from worldsize.testing.slurm import Cluster

    with Cluster(nodes=4, gpus=4, ssh=True) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def _slurm_accounted_session() -> Iterator[Cluster]:
    from worldsize.testing.slurm import Cluster

    with Cluster(nodes=4, gpus=4, ssh=True, accounting=True) as cluster:
        yield cluster


@pytest.fixture
def slurm(_slurm_session: Cluster) -> Iterator[Cluster]:
    """Four idle nodes with four pretended GPUs each. What a test does to them is undone after it."""
    yield _slurm_session
    _slurm_session.restore()


@pytest.fixture
def slurm_accounted(_slurm_accounted_session: Cluster) -> Iterator[Cluster]:
    """As `slurm`, with sacct: for tests marked `slurm(accounting=True)`."""
    yield _slurm_accounted_session
    _slurm_accounted_session.restore()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 1 MB."""
    from worldsize.testing.faults import tmpfs

    with ExitStack() as stack:
        try:
            folder = stack.enter_context(tmpfs(tmp_path / "small", 1 << 20))
        except OSError:
            pytest.skip("needs the right to mount a file system")
        yield folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of pairs of layouts, where they ran; list what did not run here, by reason."""
    _pairs(terminalreporter)
    tests = defaultdict(list)
    for report in terminalreporter.getreports("skipped"):
        tests[_reason(report)].append(report.nodeid)
    if not tests:
        return
    terminalreporter.section("not run on this machine")
    for reason, names in sorted(tests.items()):
        terminalreporter.write_line(f"{reason} ({len(names)}):")
        for name in sorted(names):
            terminalreporter.write_line(f"    {name}")


def _pairs(reporter: pytest.TerminalReporter) -> None:
    """A line for each layout that read, a column for each that wrote: the largest relative difference of a loss."""
    reports = [report for kind in ("passed", "failed") for report in reporter.getreports(kind)]
    found = dict(value for report in reports for name, value in report.user_properties if name == "pairs")
    if not found:
        return
    reporter.section("every layout with what every layout wrote")
    writers = list(next(iter(found.values())))
    reporter.write_line(f"| read by, written by | {' | '.join(map(str, range(1, len(writers) + 1)))} |")
    reporter.write_line(f"|---|{'---|' * len(writers)}")
    for number, reader in enumerate((each for each in writers if each in found), 1):
        cells = [f"{found[reader][writer]:.0e}" if found[reader][writer] else "0" for writer in writers]
        reporter.write_line(f"| {number} {reader} | {' | '.join(cells)} |")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """On a machine that should run all but the GPU tests, fail where it did not."""
    reporter: pytest.TerminalReporter | None = session.config.pluginmanager.get_plugin("terminalreporter")
    on_a_worker = hasattr(session.config, "workerinput")
    if exitstatus != pytest.ExitCode.OK or reporter is None or on_a_worker or not CI:
        return
    if not reporter.getreports("passed"):
        reporter.write_line("\nno test ran", red=True)
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
    elif _should_run_all() and (names := _unexcused(reporter.getreports("skipped"))):
        reporter.write_line(f"\nshould have run on this machine: {', '.join(names)}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _should_run_all() -> bool:
    return os.geteuid() == 0 and Path("/etc/debian_version").exists()


def _unexcused(skipped: Iterable[pytest.TestReport | pytest.CollectReport]) -> list[str]:
    return [report.nodeid for report in skipped if EXCUSED not in getattr(report, "keywords", ())]


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits for minutes begins first: at the end nobody else would have anything to do meanwhile."""
    items.sort(key=lambda item: item.get_closest_marker("waits") is None)
