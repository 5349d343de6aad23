"""A command line as a shell would split it, and what only a shell could read."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.errors import ConfigError
from worldsize.launch.builder.commandline import words


@given(st.lists(st.text()))
def test_what_a_shell_would_quote_comes_back(found: list[str]) -> None:
    """For any words."""
    assert words(shlex.join(found)) == tuple(found)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("a \\\n  b\n", ["a", "b"]),
        ("""x="it's" '{"a": 1}'""", ["x=it's", '{"a": 1}']),
        (r'"\$HOME \"q\" \n \\" a\ b', [r'$HOME "q" \n \\'[:-1], "a b"]),
        ("'' \"\" [1,2] {a,b} #x", ["", "", "[1,2]", "{a,b}", "#x"]),
    ],
)
def test_quotes_and_backslashes_mean_what_they_mean_in_a_shell(line: str, found: list[str]) -> None:
    """Continued lines, both kinds of quotes, brackets and braces."""
    assert list(words(line)) == found


@pytest.mark.parametrize(
    "line", ["a $HOME", 'a "$HOME"', 'a "`date`"', "a; b", "a > b", "a *", "a ~/b", '"it\'s" $x "it\'s"']
)
def test_what_a_shell_would_expand_or_obey_is_refused(line: str) -> None:
    """It would reach the program as it is written."""
    with pytest.raises(ConfigError, match="would need a shell"):
        words(line)


@pytest.mark.parametrize("line", ["a 'b", 'a "b', "a\\"])
def test_an_open_quote_is_refused(line: str) -> None:
    """With the line."""
    with pytest.raises(ConfigError, match="not closed"):
        words(line)
