"""Signals, grace, restarts: how a run is ended from outside, and when it starts again."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.launch.commands import finish, lines, run, script, start, until

if TYPE_CHECKING:
    from pathlib import Path

SAVES = """
asked = []
for name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP"):
    signal.signal(getattr(signal, name), lambda number, frame: asked.append(signal.Signals(number).name))
open(sys.argv[1] + "/up" + os.environ["RANK"], "w").close()
while not asked: time.sleep(0.01)
time.sleep(0.2)
print("saved after", *asked)
sys.exit(75)
"""

WAITS = """
open(sys.argv[1] + "/up" + os.environ["RANK"], "w").close()
time.sleep(600)
"""


def up(folder: Path, ranks: int = 2) -> None:
    """Wait until every rank is at work."""
    until(lambda: all((folder / f"up{rank}").exists() for rank in range(ranks)))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP"])
def test_a_signal_reaches_every_rank_and_75_comes_back(tmp_path: Path, name: str) -> None:
    """B041: sent to the command alone, it is every rank's; all save, and the code says "start again"."""
    process = start("-n", "2", script(tmp_path, SAVES), tmp_path)
    up(tmp_path)
    process.send_signal(getattr(signal, name))
    ended = finish(process)
    assert (ended.code, ended.out.count(f"saved after {name}")) == (75, 2)
    assert ended.err == "worldsize: stopped on request, everything committed; start it again to go on\n"


def test_a_stop_on_request_is_never_restarted(tmp_path: Path) -> None:
    """B041: code 75 ends the run whatever --max-restarts says."""
    path = script(tmp_path, "print('once'); sys.exit(75)")
    ended = run("--max-restarts", "5", path)
    assert (ended.code, ended.out) == (75, "once\n")


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129), ("SIGUSR1", 138)])
def test_a_program_without_handlers_just_ends(tmp_path: Path, name: str, code: int) -> None:
    """No failure is reported for ranks that end by the signal that was passed on, and nothing starts again."""
    process = start("-n", "2", "--max-restarts", "3", script(tmp_path, WAITS), tmp_path)
    up(tmp_path)
    process.send_signal(getattr(signal, name))
    ended = finish(process)
    assert (ended.code, ended.err) == (code, f"worldsize: stopped by {name}\n")


def test_the_grace_is_kept_and_ends(tmp_path: Path) -> None:
    """B043: a rank that ignores SIGTERM is killed when the grace of the command line is over, not before."""
    text = "signal.signal(15, signal.SIG_IGN)\n" + WAITS
    process = start("-n", "2", "--grace", "1s", script(tmp_path, text), tmp_path)
    up(tmp_path)
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert ended.code == 137
    assert "did not end within 1 s of the stop, and was killed" in ended.err
    assert 1 <= ended.took < 5


def test_a_slow_save_inside_the_grace_is_not_cut(tmp_path: Path) -> None:
    """B043: a save that takes longer than the peers of a failed rank get is finished."""
    text = SAVES.replace("time.sleep(0.2)", "time.sleep(1.5)")
    process = start("-n", "2", "--peer-grace", "100ms", "--grace", "30s", script(tmp_path, text), tmp_path)
    up(tmp_path)
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == 75


def test_a_second_signal_is_passed_on_too(tmp_path: Path) -> None:
    """B041: schedulers send SIGTERM more than once; the save goes on."""
    process = start("-n", "2", script(tmp_path, SAVES.replace("0.2", "1")), tmp_path)
    up(tmp_path)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert (ended.code, ended.out.count("saved after")) == (75, 2)


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    """A person who presses Ctrl-C twice does not wait for the grace."""
    text = "signal.signal(2, lambda *_: open(sys.argv[1] + '/asked', 'w').close())\n" + WAITS.replace("600", "60")
    process = start("-n", "1", script(tmp_path, f"{text}time.sleep(60)"), tmp_path)
    up(tmp_path, 1)
    process.send_signal(signal.SIGINT)
    until((tmp_path / "asked").exists)
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert (ended.code, ended.err) == (130, "worldsize: stopped by SIGINT\n")
    assert ended.took < 5


def test_a_rank_that_stops_alone_does_not_wait_for_ever_for_the_rest(tmp_path: Path) -> None:
    """B042: one rank leaves with 75, the other hangs: it has the grace, then the command ends."""
    text = "if os.environ['RANK'] == '1': sys.exit(75)\ntime.sleep(600)"
    ended = run("-n", "2", "--grace", "500ms", script(tmp_path, text))
    assert ended.took < 5
    assert "rank 0 of 2" in ended.err


def test_nohup_stays_nohup(tmp_path: Path) -> None:
    """A hang-up that the command was told to ignore ends nothing."""
    path = script(tmp_path, WAITS.replace("600", "1") + "print('done')")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(path, tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    up(tmp_path, 1)
    process.send_signal(signal.SIGHUP)
    ended = finish(process)
    assert (ended.code, ended.out) == (0, "done\n")


def test_real_failures_during_a_stop_are_said(tmp_path: Path) -> None:
    """A save that fails after SIGTERM (disk full) is a failure with its own words, not "stopped"."""
    text = SAVES.replace("sys.exit(75)", "raise OSError(28, 'No space left on device')")
    process = start("-n", "2", script(tmp_path, text), tmp_path)
    up(tmp_path)
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert ended.code == 1
    assert "OSError: [Errno 28] No space left on device" in ended.err.splitlines()[-1]


COUNTS = """
n = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", n)
"""


def test_failures_restart_up_to_the_limit(tmp_path: Path) -> None:
    """Torchrun's rule: --max-restarts 2 makes three attempts; each has its own log, port and count."""
    path = script(tmp_path, COUNTS + "print(os.environ['MASTER_PORT'], file=sys.stderr)\nsys.exit(4)")
    ended = run("--max-restarts", "2", "--log-dir", tmp_path / "logs", path)
    assert (ended.code, ended.out) == (4, "attempt 0\nattempt 1\nattempt 2\n")
    assert [len(lines(tmp_path / f"logs/attempts/{n}/rank-0000.log")) for n in range(3)] == [2, 2, 2]
    assert "(starting again, 2 of 2)" in ended.err
    assert "2 of 2 restarts used" in ended.err.splitlines()[-1]


def test_a_restart_that_succeeds_is_a_success(tmp_path: Path) -> None:
    """The code of the last attempt is ours."""
    ended = run("-n", "2", "--max-restarts", "2", script(tmp_path, COUNTS + "sys.exit(n == 0)"))
    assert ended.code == 0
    assert ended.out.count("attempt 1") == 2


def test_no_restart_without_new_commits(tmp_path: Path) -> None:
    """A program that reports commits goes on while they grow, and no longer."""
    text = "import worldsize.runtime.report as report\nn = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
    text += "report.committed('here', [10, 20, 20, 30][n])\nsys.exit(4)"
    ended = run("--max-restarts", "9", "--log-dir", tmp_path / "logs", script(tmp_path, text))
    assert ended.code == 4
    assert sorted(path.name for path in (tmp_path / "logs/attempts").iterdir()) == ["0", "1", "2"]
    assert "not started again: nothing was committed since step 20" in ended.err.splitlines()[-1]


def test_a_restart_waits_as_long_as_asked_and_can_be_stopped(tmp_path: Path) -> None:
    """--restart-delay waits between attempts; Ctrl-C ends the waiting."""
    process = start(
        "--max-restarts", "1", "--restart-delay", "10m", "--log-dir", tmp_path, script(tmp_path, "sys.exit(1)")
    )
    assert process.stderr is not None
    assert "starting again" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.code == 130
    assert not (tmp_path / "attempts/1").exists()


def test_the_rank_that_was_killed_is_named_and_not_the_one_that_would_not_end(tmp_path: Path) -> None:
    """SIGKILL of rank 1 from outside while rank 0 ignores SIGTERM: the line says what happened to rank 1."""
    text = "signal.signal(15, signal.SIG_IGN)\nopen(sys.argv[1] + '/up' + os.environ['RANK'], 'w').close()\n"
    text += "while len(os.listdir(sys.argv[1])) < 3: time.sleep(0.01)\n"
    text += "os.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else time.sleep(600)"
    ended = run("-n", "2", "--peer-grace", "300ms", script(tmp_path, text), tmp_path)
    assert ended.code == 137
    assert "rank 1 of 2" in ended.err
    assert "failed: killed by SIGKILL: the kernel's out-of-memory killer or a person" in ended.err
    assert "--grace" not in ended.err


def test_peers_of_a_program_that_commits_end_soon(tmp_path: Path) -> None:
    """Nothing they do can be committed without the failed rank: they get half a second, not the peer grace."""
    text = "import worldsize.runtime.report as report\nreport.committed('here', 1)\n"
    text += "signal.signal(15, signal.SIG_IGN)\nif os.environ['RANK'] == '1': time.sleep(0.5); sys.exit(4)\n"
    text += "time.sleep(600)"
    ended = run("-n", "2", "--peer-grace", "30s", script(tmp_path, text))
    assert (ended.code, ended.took < 10) == (4, True)
