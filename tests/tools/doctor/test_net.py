"""Clocks, names and streams of bytes."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.launch import ports
from worldsize.tools.doctor import net
from worldsize.tools.doctor.hub import estimate
from worldsize.tools.doctor.wire import Door

TRIPS = st.tuples(st.floats(0, 1e9), st.floats(0, 10), st.floats(0, 10))


@given(st.floats(-1e6, 1e6), st.lists(TRIPS, min_size=1, max_size=8))
def test_a_clock_is_known_to_half_a_round_trip(offset: float, trips: list[tuple[float, float, float]]) -> None:
    """Whatever the clocks, and however unlike the way there and the way back."""
    samples = [(began, began + there + offset, began + there + back) for began, there, back in trips]
    found, sure = estimate(samples)
    assert abs(found - offset) <= sure + 1e-6
    assert sure == pytest.approx(min(there + back for _, there, back in trips) / 2, abs=1e-6)


def test_a_stream_is_measured() -> None:
    """Bytes a second, and a round trip."""
    meter = net.Meter("word")
    rate, trip = net.measure("127.0.0.1", meter.port, "word", 0.1)
    assert rate > 1e6
    assert 0 < trip < 1


def test_a_meter_answers_nobody_else() -> None:
    """Who does not know the word gets nothing."""
    meter = net.Meter("word")
    with pytest.raises(OSError, match=r"hung up|reset|Broken pipe"):
        net.measure("127.0.0.1", meter.port, "another", 0.1)


def test_dialling_tells_what_is_shut() -> None:
    """Open ports are not listed."""
    kept = ports.reserve()
    (port,) = opened = net.listen([0])
    del port
    with kept, opened[0] as server:
        there, shut = server.getsockname()[1], kept.getsockname()[1]
        found = net.dial([("a", "127.0.0.1", there), ("b", "127.0.0.1", shut)], 2.0)
    assert [(host, port) for host, port, _ in found] == [("b", shut)]


def test_names_are_resolved_together() -> None:
    """Known and unknown ones."""
    found = net.resolve(["localhost", "no-such-host.invalid"], 10.0)
    assert set(found["localhost"] or ()) & {"127.0.0.1", "::1"}
    assert not found["no-such-host.invalid"]


@given(st.lists(st.ip_addresses().map(str), min_size=1, max_size=4), st.integers(1, 65535))
def test_a_door_survives_the_journey(addresses: list[str], port: int) -> None:
    """IPv6 too."""
    door = Door("w0rd", tuple(addresses), port)
    assert Door.of(door.text) == door


def test_an_agent_behind_loopback_is_reached_from_outside() -> None:
    """One that reached the doctor over a real address is reached there."""
    assert net.own_address("10.1.2.3") == "10.1.2.3"
    assert socket.inet_aton(net.own_address("127.0.0.1"))
