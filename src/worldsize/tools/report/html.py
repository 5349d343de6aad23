"""Room: pieces of HTML, and the one way in which a number comes onto the page: by its place in the page's JSON."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from worldsize.tools.report import words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

BETWEEN = "|"
"""Divides the parts of a place."""


class Facts:
    """What the page knows.

    Args:
        body: plain values, as they stand in the page's JSON.
    """

    def __init__(self, body: Any) -> None:
        self.body = body

    def get(self, *place: str | int) -> Any:
        """The value there."""
        found = self.body
        for part in BETWEEN.join(map(str, place)).split(BETWEEN):
            found = found[int(part)] if isinstance(found, list) else found[part]
        return found

    def show(self, place: str, kind: str) -> str:
        """The value there, as people read it."""
        value = escape(words.word(self.get(place), kind))
        return f'<span data-is="{escape(place, quote=True)}" data-as="{kind}">{value}</span>'

    def under(self, root: str) -> Callable[[str, str], str]:
        """`show` for places under a place."""
        return lambda place, kind: self.show(f"{root}{BETWEEN}{place}", kind)


def card(title: str, body: str, note: str = "", *, level: int = 2, name: str = "") -> str:
    """A section with its heading."""
    told = f'<p class="soft">{escape(note)}</p>' if note else ""
    label = f' id="{name}"' if name else ""
    return f'<section class="card"{label}><h{level}>{escape(title)}</h{level}>{told}{body}</section>'


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, text: Sequence[int] = ()) -> str:
    """A table whose cells are HTML already; `text` are the columns of words."""
    kinds = ["text" if number in text else "" for number in range(len(heads))]
    head = "".join(
        f'<th scope="col" class="{kind}">{escape(each)}</th>' for each, kind in zip(heads, kinds, strict=True)
    )
    body = "".join(f"<tr>{_cells(row, kinds)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption, quote=True)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def folded(summary: str, body: str) -> str:
    """Shown when it is asked for."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def keys(entries: Iterable[tuple[str, str, str]]) -> str:
    """What colours mean: (words, CSS variable, class)."""
    items = "".join(
        f'<li><i class="{kind}" style="--k:var({color})"></i>{escape(text)}</li>' for text, color, kind in entries
    )
    return f'<ul class="keys">{items}</ul>'


def _cells(row: Sequence[str], kinds: Sequence[str]) -> str:
    first = f'<th scope="row">{row[0]}</th>'
    return first + "".join(f'<td class="{kind}">{cell}</td>' for cell, kind in zip(row[1:], kinds[1:], strict=True))
