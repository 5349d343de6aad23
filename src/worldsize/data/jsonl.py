"""Room: files of JSON lines, checked whole before anything is trained on them. No torch.

What is wrong is said with file, line and column, as editors understand it, and all of the file is looked at before it is said.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from worldsize.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

Check = Callable[[Any], "str | None"]
"""What is wrong with a record, or None."""
_SHOWN = 5
_EXCERPT = 60


@dataclass(slots=True)
class Lines:
    """The records of a file, one a line; blank lines count for nothing.

    Attributes:
        path: the file.
        check: looks at each record.
        bad: "error" refuses a file with lines that are no records; "skip" leaves them out.
        skipped: their numbers, once the file was read.
    """

    path: Path
    check: Check
    bad: Literal["error", "skip"] = "error"
    skipped: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Line numbers, from 1, and records.

        Raises:
            DataError: after the last line, with the first of those that are wrong; or the file is empty or cannot be read.
        """
        wrong: list[str] = []
        count = 0
        for number, line in self._lines():
            record, problem = self._record(number, line)
            if problem is None:
                count += 1
                yield number, record
            else:
                wrong.append(problem)
                self.skipped.append(number)
        if wrong and self.bad == "error":
            raise self._refused(wrong)
        if not count:
            found = f"{len(wrong)} lines, all wrong, such as {wrong[0]}" if wrong else "no lines"
            raise DataError(f"{self.path} has no samples", found=found)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self.path.open("rb") as stream:
                for number, line in enumerate(stream, 1):
                    # Some editors mark their files as UTF-8 by three bytes, which are no part of the first line.
                    text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                    if text.strip():
                        yield number, text
        except OSError as error:
            raise DataError(f"{self.path} cannot be read", found=error.strerror or str(error)) from error

    def _record(self, number: int, line: bytes) -> tuple[Any, str | None]:
        try:
            record = json.loads(line.decode().rstrip("\r\n"))
        except UnicodeDecodeError as error:
            return None, f"{self.path}:{number}:{error.start + 1}: not UTF-8: byte {line[error.start]:#04x}"
        except json.JSONDecodeError as error:
            return None, f"{self.path}:{number}:{error.colno}: {error.msg}: …{_excerpt(error.doc, error.pos)}"
        except (ValueError, RecursionError) as error:
            # Numbers of thousands of digits, lists within lists without end.
            return None, f"{self.path}:{number}:1: {error}"
        problem = self.check(record)
        return record, None if problem is None else f"{self.path}:{number}:1: {problem}"

    def _refused(self, wrong: list[str]) -> DataError:
        more = f"; and {len(wrong) - _SHOWN:,} more" if len(wrong) > _SHOWN else ""
        lines = f"{len(wrong)} lines are" if len(wrong) > 1 else "a line is"
        return DataError(
            f"{lines} not as they must be" if len(wrong) > 1 else f"{lines} not as it must be",
            found="; ".join(wrong[:_SHOWN]) + more,
            do="mend the file, or leave such lines out: bad_lines=skip",
        )


def _excerpt(text: str, at: int) -> str:
    """What stands around a place."""
    return text[max(0, at - _EXCERPT // 2) : at + _EXCERPT // 2].strip()
