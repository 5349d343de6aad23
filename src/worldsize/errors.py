"""Room: every error a user can meet, and the exit codes that go with them.

An error says three things: what is wrong, what was found, and what to do. `str(error)` is that, on one line, so
that a launcher, a log and a report can show it without a traceback.
"""

from __future__ import annotations

EXIT_FAILED = 1
"""The program failed; the one line says why."""

EXIT_USAGE = 2
"""What was asked for cannot be done; nothing was started."""

EXIT_STOPPED = 75
"""Stopped on request with everything committed: start again to go on (EX_TEMPFAIL of sysexits.h)."""


class WorldsizeError(Exception):
    """Base of every error that is the user's to mend.

    Args:
        what: what is wrong, naming the setting or the file.
        found: the value or values that were found, where they help.
        do: what to do about it.
    """

    exit_code = EXIT_FAILED

    def __init__(self, what: str, *, found: str | None = None, do: str | None = None) -> None:
        super().__init__(what)
        self.what, self.found, self.do = what, found, do

    def __str__(self) -> str:
        found = f" Found: {self.found}." if self.found else ""
        do = f" Do: {self.do}." if self.do else ""
        end = "" if self.what.endswith(("?", "!", ".")) else "."
        return " ".join(f"{self.what}{end}{found}{do}".splitlines())

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.found, self.do)


def _rebuild(kind: type[WorldsizeError], what: str, found: str | None, do: str | None) -> WorldsizeError:
    return kind(what, found=found, do=do)


class ConfigError(WorldsizeError):
    """A setting is wrong, unknown, or contradicts another one."""

    exit_code = EXIT_USAGE


class WorldError(WorldsizeError):
    """The environment (launcher, ranks, devices, addresses) is partial or contradicts itself."""

    exit_code = EXIT_USAGE


class LayoutError(WorldsizeError):
    """This model, batch or checkpoint cannot be laid over these ranks."""

    exit_code = EXIT_USAGE


class DataError(WorldsizeError):
    """The dataset or loader cannot be served exactly."""


class StepError(WorldsizeError):
    """The training loop used a step in a way that would train something else than was meant."""


class StallError(WorldsizeError):
    """No step is made any more."""


class OutOfMemoryError(WorldsizeError):
    """A device, or the host, has not the memory that the training asked for."""


class CheckpointError(WorldsizeError):
    """A checkpoint is damaged, foreign, or does not belong to this training."""


class OwnershipError(CheckpointError):
    """Another live process owns the run folder, or took it over."""


class LaunchError(WorldsizeError):
    """Processes could not be started, or one of them failed."""


class NotStartedError(LaunchError):
    """Nothing was started: the port, the program or the place is not as it was said."""

    exit_code = EXIT_USAGE


class TrackError(WorldsizeError):
    """A tracker that is required does not work."""


class MissingExtraError(WorldsizeError):
    """An optional package is not installed."""

    exit_code = EXIT_USAGE

    @classmethod
    def of(cls, package: str, extra: str) -> MissingExtraError:
        """The error for `package`, which comes with `worldsize[extra]`."""
        return cls(f"{package} is not installed", do=f"pip install 'worldsize[{extra}]'")
