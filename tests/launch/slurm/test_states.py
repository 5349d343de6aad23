"""Parsing what Slurm prints, and who is believed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.launch.slurm import lines
from worldsize.errors import LaunchError
from worldsize.launch.slurm import states
from worldsize.launch.slurm.states import Asked, ExitRecord, JobFacts, Listing, State

NOW = 2_000_000.0
SUBMITTED = NOW - 1000
LATE = Listing(missing="sacct failed")


def entry(state: str, *, age: float = 1000, source: str = "squeue") -> JobFacts:
    """A job that was submitted `age` seconds ago."""
    return JobFacts("7", 7, state=state, submit=int(NOW - age), source=source)


def listing(*states_: str, source: str = "squeue") -> Listing:
    """A listing with one entry a state."""
    return Listing(tuple(entry(state, source=source) for state in states_))


NOBODY, RUNS, ENDED = listing(), listing("RUNNING"), listing("FAILED", source="sacct")
DEAF = Listing(missing="squeue cannot reach Slurm")
GOOD, BAD = ExitRecord(0), ExitRecord(1)
OLD = Listing((entry("COMPLETED", age=40 * 86400, source="sacct"),))


@pytest.mark.parametrize(
    ("queue", "accounting", "record", "expected"),
    [
        (RUNS, None, None, ("RUNNING", "squeue", False)),
        (RUNS, ENDED, BAD, ("RUNNING", "squeue", False)),
        (listing("COMPLETED"), RUNS, BAD, ("COMPLETED", "squeue", True)),
        (NOBODY, ENDED, None, ("FAILED", "sacct", True)),
        (NOBODY, ENDED, GOOD, ("FAILED", "sacct", True)),
        (NOBODY, listing("RUNNING", source="sacct"), None, ("UNKNOWN", "nobody", True)),
        (NOBODY, listing("RUNNING", source="sacct"), GOOD, ("COMPLETED", "record", True)),
        (NOBODY, listing("PENDING", source="sacct"), None, ("UNKNOWN", "nobody", True)),
        (NOBODY, LATE, GOOD, ("COMPLETED", "record", True)),
        (NOBODY, LATE, BAD, ("FAILED", "record", True)),
        (NOBODY, LATE, None, ("UNKNOWN", "nobody", True)),
        (NOBODY, NOBODY, None, ("UNKNOWN", "nobody", True)),
        (NOBODY, None, None, ("UNKNOWN", "nobody", True)),
        (DEAF, RUNS, None, ("UNKNOWN", "nobody", False)),
        (DEAF, LATE, None, ("UNKNOWN", "nobody", False)),
        (DEAF, ENDED, None, ("FAILED", "sacct", False)),
        (Listing(OLD.jobs), None, None, ("UNKNOWN", "nobody", True)),
        (NOBODY, OLD, None, ("UNKNOWN", "nobody", True)),
        (NOBODY, OLD, GOOD, ("COMPLETED", "record", True)),
    ],
)
def test_the_truth_table(
    queue: Listing, accounting: Listing | None, record: ExitRecord | None, expected: tuple[str, str, bool]
) -> None:
    """Squeue, then sacct, then the job's record, then UNKNOWN; running only if squeue says so; no recycled id (B034)."""
    state = states.merge(queue, accounting, record, asked=Asked("7", NOW, SUBMITTED))
    assert (state.name, state.source, state.final) == expected


def test_a_job_may_turn_up_late() -> None:
    """Right after it was submitted, a job that nobody lists is not given up (B034)."""
    state = states.merge(NOBODY, NOBODY, None, asked=Asked("7", NOW, NOW - 5))
    assert (state.name, state.final) == ("UNKNOWN", False)


def test_a_job_seen_a_moment_ago_is_not_given_up() -> None:
    """The grace counts from when it was last seen (B034)."""
    assert not states.merge(NOBODY, None, None, asked=Asked("7", NOW, SUBMITTED, seen=NOW - 60)).final


def test_what_is_missing_is_said() -> None:
    """Accounting that fails is told beside the state (B034)."""
    assert states.merge(NOBODY, LATE, GOOD, asked=Asked("7", NOW)).note == "sacct failed"


def test_late_accounting_is_said() -> None:
    """An entry of accounting that squeue has outrun is called late (B034)."""
    note = states.merge(NOBODY, RUNS, None, asked=Asked("7", NOW)).note
    assert note == "sacct still says RUNNING, squeue does not list it: accounting is late"


def test_the_record_of_an_earlier_submission_is_not_taken() -> None:
    """A record that was written before the job was submitted is another job's."""
    record = ExitRecord(0, time=NOW - 86400)
    assert states.merge(NOBODY, None, record, asked=Asked("7", NOW, SUBMITTED)).name == "UNKNOWN"


def test_the_newest_incarnation_counts() -> None:
    """Of a requeued job, accounting has the failed and the next incarnation; the next one is the job."""
    kept = Listing(tuple(lines.accounting()))
    state = states.merge(Listing(), kept, None, asked=Asked("1", NOW))
    assert (state.name, state.facts and state.facts.submit) == ("CANCELLED", 1795842168)


def test_a_record_of_another_attempt_is_not_of_this_one() -> None:
    """The restart count tells attempts apart."""
    facts = replace(entry("FAILED"), restarts=2)
    assert not ExitRecord(75, restarts=1).of(facts)


def test_a_record_without_a_code_is_no_end() -> None:
    """A job that has only said how far it got may run on."""
    assert states.merge(NOBODY, LATE, ExitRecord(step=40), asked=Asked("7", NOW, SUBMITTED)).name == "UNKNOWN"


def test_a_record_is_not_the_last_word_while_squeue_is_deaf() -> None:
    """A job that failed or stopped may be in the queue again; one that completed is not."""
    asked = Asked("7", NOW, SUBMITTED)
    assert [states.merge(DEAF, LATE, record, asked=asked).final for record in (ExitRecord(75), GOOD)] == [False, True]


def test_members_are_known_by_their_records() -> None:
    """Those that Slurm has forgotten, beside those that it lists, in their order (B034)."""
    facts = replace(entry("RUNNING"), job="7_10", array=7, task=10)
    found = states.gather(Asked("7", NOW, SUBMITTED), Listing((facts,)), None, {"7_2": GOOD, "77_3": BAD})
    assert {job: state.name for job, state in found.items()} == {"7_2": "COMPLETED", "7_10": "RUNNING"}
    assert list(found) == ["7_2", "7_10"]


def test_names_and_comments_may_hold_anything() -> None:
    """Blanks, bars and line breaks in a name or comment move no field."""
    found = next(facts for facts in lines.accounting() if facts.job == "2")
    assert (found.name, found.comment, found.limit) == ("name with | and  spaces", "two\nlines\x1e", 1800)


def test_a_running_job() -> None:
    """Every field that squeue gives has its place."""
    found = lines.queue()["17" if "17" in lines.queue() else "16+1"]
    assert (found.job, found.number, found.nodes, found.node_list) == ("16+1", 17, 2, "node[3-4]")
    assert (found.restarts, found.start, found.end, found.limit) == (1, 1795842385, None, None)


def test_a_member_of_an_array_has_its_own_number() -> None:
    """12_1 is number 20 to Slurm."""
    found = lines.queue()["12_1"]
    assert (found.array, found.task, found.number) == (12, 1, 20)


def test_the_log_of_a_member_is_named() -> None:
    """The patterns in the path are filled in."""
    assert lines.queue()["12_1"].stdout == "/home/ana/digits/log.20"


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("log-%A_%a.out", "log-12_3.out"),
        ("%x.%j", "digits.15"),
        ("%6j", "000015"),
        ("100%%-%u", "100%-ana"),
        ("%N-%j", "%N-15"),
    ],
)
def test_patterns_of_logs(pattern: str, path: str) -> None:
    """Slurm's patterns become what Slurm made of them; those that differ from node to node stay."""
    facts = JobFacts("12_3", 15, "digits", "ana", array=12, task=3)
    assert states.path(pattern, facts) == path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("user-error", ("FAILED", 3, 0)),
        ("killed", ("FAILED", 0, 9)),
        ("stopped", ("FAILED", 75, 0)),
        ("fine", ("COMPLETED", 0, 0)),
        ("limit", ("TIMEOUT", 0, 15)),
        ("cancelled", ("CANCELLED", 0, 15)),
    ],
)
def test_how_jobs_ended(name: str, expected: tuple[str, int, int]) -> None:
    """Squeue's wait status is an exit code and a signal."""
    facts = lines.over()[name]
    assert (facts.state, facts.exit_code, facts.signal) == expected


@pytest.mark.parametrize("job", ["18", "21", "22"])
def test_both_commands_tell_the_same_end(job: str) -> None:
    """Squeue and sacct agree on state, exit code and signal."""
    first = next(facts for facts in states.parse_queue(lines.text("-over.squeue")) if facts.job == job)
    second = next(facts for facts in lines.accounting() if facts.job == job)
    assert (first.state, first.exit_code, first.signal) == (second.state, second.exit_code, second.signal)


def test_who_cancelled_is_kept() -> None:
    """Sacct's "CANCELLED by 0" is a state and a user."""
    found = next(facts for facts in lines.accounting() if facts.job == "28")
    assert (found.state, found.cancelled_by) == ("CANCELLED", "0")


def test_parts_have_the_id_of_the_whole() -> None:
    """Sacct's 16+1 is part 1 of 16."""
    found = next(facts for facts in lines.accounting() if facts.job == "16+1")
    assert (found.het, found.part, found.number) == (16, 1, 17)


def test_every_member_of_an_array_has_a_state() -> None:
    """Asking for an array gives its members in order."""
    found = states.gather(Asked("12", NOW), Listing(tuple(lines.queue().values())), None)
    assert list(found) == ["12_0", "12_1", "12_2", "12_3", "12_4", "12_5"]


def test_the_members_are_counted() -> None:
    """One line for an array."""
    found = states.gather(Asked("12", NOW), Listing(tuple(lines.queue().values())), None)
    assert sorted(states.summary(found.values()).split(", ")) == ["2 running", "4 pending"]


def test_one_member_can_be_asked_for() -> None:
    """12_3 is not 12_0."""
    found = states.gather(Asked("12_3", NOW), Listing(tuple(lines.queue().values())), None)
    assert [(name, state.name) for name, state in found.items()] == [("12_3", "PENDING")]


def test_the_parts_of_a_heterogeneous_job() -> None:
    """Asking for it gives all its parts."""
    found = states.gather(Asked("16", NOW), Listing(tuple(lines.queue().values())), None)
    assert list(found) == ["16+0", "16+1"]


def test_a_job_that_nobody_knows_has_a_state_too() -> None:
    """UNKNOWN, under the id that was asked for."""
    assert states.gather(Asked("99", NOW), NOBODY, None)["99"].name == "UNKNOWN"


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ("12_2", "pending: the array runs as many members at once as it was told"),
        ("33", "pending: a node it asks for is not available"),
        ("25", "pending: waiting for jobs of higher priority"),
        ("29", "pending: waiting for a job that will never end as asked"),
        ("34", "pending: held by an administrator"),
        ("30", "pending: a limit of the QOS"),
        ("5", "pending: asks for more time than the partition allows"),
        ("16+0", "running: on node1, restarted 1 times"),
    ],
)
def test_states_in_words(job: str, expected: str) -> None:
    """What Slurm says in one word becomes a sentence."""
    facts = lines.queue()[job]
    assert states.words(State(job, facts.state, "squeue", final=False, facts=facts)) == expected


def test_every_recorded_reason_has_words() -> None:
    """No reason that a real cluster gave is shown as Slurm's own word."""
    assert [
        facts.reason for facts in lines.queue().values() if states.reason_words(facts.reason) == facts.reason != ""
    ] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1-02:03:04", 93784),
        ("30:00", 1800),
        ("1:40:00", 6000),
        ("10", 600),
        ("2-12", 216000),
        ("365-00:00:00", 31536000),
        ("infinite", None),
        ("UNLIMITED", None),
        ("NONE", None),
    ],
)
def test_durations(text: str, expected: int | None) -> None:
    """Slurm's grammar for time (B020)."""
    assert states.seconds(text) == expected


def test_half_an_answer_is_refused() -> None:
    """A format that this version of Slurm does not know is an error, not a wrong job."""
    with pytest.raises(LaunchError, match="no records of 33"):
        states.parse_queue("1\x1f2\x1f")


def test_the_name_of_a_cluster_is_no_job() -> None:
    """With several clusters Slurm prints the cluster's name first."""
    assert states.parse_queue("CLUSTER: lab\n" + lines.text("-over.squeue")) == list(
        states.parse_queue(lines.text("-over.squeue"))
    )


@pytest.mark.parametrize("text", ["12", "12_3", "16+1"])
def test_ids(text: str) -> None:
    """These are ids."""
    assert states.is_id(text)


@pytest.mark.parametrize("text", ["", "12_", "12_[1-3]", "a", "1 2", "-1", "12;x"])
def test_not_ids(text: str) -> None:
    """These are not."""
    assert not states.is_id(text)
