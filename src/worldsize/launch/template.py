"""Room: what the command line of a template may name, and its filling. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

PLACES = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")
"""Each in braces."""


def fill(word: str, values: Mapping[str, object]) -> str:
    """Only known places are filled: other braces are the command's own."""
    for name, value in values.items():
        word = word.replace("{" + name + "}", str(value))
    return word
