"""What is waited for before Python ends."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

from worldsize.runtime.farewell import settle


def _at_work(name: str, came: threading.Event) -> threading.Thread:
    """A thread of that name which computes without Python's lock for a while, and then takes it."""

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        came.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)

    thread = threading.Thread(target=work)
    thread.start()
    came.wait()
    return thread


def test_a_thread_of_gloo_at_work_is_waited_for() -> None:
    """It may be about to let go of a tensor."""
    thread = _at_work("pt_gloo_runloop", threading.Event())
    settle()
    assert not thread.is_alive()


def test_other_threads_are_not_waited_for() -> None:
    """What a program does in threads of its own is its own affair."""
    thread = _at_work("another", threading.Event())
    settle()
    alive = thread.is_alive()
    thread.join()
    assert alive
