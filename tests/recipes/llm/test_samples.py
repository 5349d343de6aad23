from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.recipes.llm import folders
from worldsize.errors import DataError
from worldsize.recipes.llm import generate, samples

if TYPE_CHECKING:
    from pathlib import Path

END, START = 2, 1
CHAT = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "cd"},
    {"role": "user", "content": "e"},
    {"role": "assistant", "content": "cd"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token a byte."""
    return folders.tokenizer()


def documents(tokenizer: Any, path: Path, over: samples.LossOver = "completion") -> list[tuple[str, str]]:
    """Each sample as text, and what of it is learnt."""
    lines, kind = samples.lines(path, "error")
    found = []
    for tokens, learnt, _ in samples.Encoder(tokenizer, over).documents(lines, kind):
        marks = learnt if learnt is not None else [True] * len(tokens)
        kept = [number for number, mark in zip(tokens, marks, strict=True) if mark]
        found.append((tokenizer.decode(tokens), tokenizer.decode(kept)))
    return found


def test_text_ends_and_all_of_it_is_learnt(tokenizer: Any, tmp_path: Path) -> None:
    """The end token with it, once."""
    path = folders.lines(tmp_path / "d.jsonl", [{"text": "abc"}, {"text": "de</s>"}])
    assert documents(tokenizer, path) == [("abc</s>", "abc</s>"), ("de</s>", "de</s>")]


def test_a_completion_and_its_end_are_learnt(tokenizer: Any, tmp_path: Path) -> None:
    """The prompt is not; or it is, where that is asked for."""
    path = folders.lines(tmp_path / "d.jsonl", [{"prompt": "a?", "completion": " b"}])
    assert documents(tokenizer, path) == [("a? b</s>", " b</s>")]
    assert documents(tokenizer, path, "all") == [("a? b</s>", "a? b</s>")]


def test_of_a_chat_what_the_assistant_says(tokenizer: Any, tmp_path: Path) -> None:
    """Each of its turns with the mark that ends it, and nothing of the others, though they say the same."""
    path = folders.lines(tmp_path / "d.jsonl", [{"messages": CHAT}])
    whole = "<|user|>ab</s><|assistant|>cd</s><|user|>e</s><|assistant|>cd</s>"
    assert documents(tokenizer, path) == [(whole, "cd</s>cd</s>")]
    assert documents(tokenizer, path, "all") == [(whole, whole)]


def test_a_template_that_says_earlier_messages_otherwise(tmp_path: Path) -> None:
    """What the assistant said is found where it stands then."""
    said = "{% if not loop.last %}[{{ m['content'] }}</s>{% else %}<{{ m['content'] }}</s>{% endif %}"
    path = folders.lines(tmp_path / "d.jsonl", [{"messages": CHAT}])
    changed = folders.tokenizer()
    changed.chat_template = f"{{% for m in messages %}}{said}{{% endfor %}}"
    assert documents(changed, path) == [("[ab</s>[cd</s>[e</s><cd</s>", "cd</s>cd</s>")]


THINKING = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if loop.last and m['role'] == 'assistant' %}<think>{% endif %}"
    "{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_what_the_user_said_before_is_not_taken_for_the_answer(tmp_path: Path) -> None:
    """The same words stand in the question, in a template that says earlier answers otherwise (as Qwen 3's)."""
    said = [
        ("user", "is it 4?"),
        ("assistant", "4"),
        ("user", "say yes"),
        ("assistant", "yes"),
        ("user", "5?"),
        ("assistant", "5"),
    ]
    path = folders.lines(tmp_path / "d.jsonl", [{"messages": [{"role": who, "content": what} for who, what in said]}])
    changed = folders.tokenizer()
    changed.chat_template = THINKING
    assert documents(changed, path)[0][1] == "4</s>yes</s><think>5</s>"
    changed.chat_template = THINKING.replace("loop.last", "not loop.last")
    assert documents(changed, path)[0][1] == "4</s>yes</s>5</s>"


def test_a_chat_that_the_assistant_begins(tokenizer: Any, tmp_path: Path) -> None:
    """What the template puts before its first word is not learnt."""
    path = folders.lines(tmp_path / "d.jsonl", [{"messages": CHAT[1:]}])
    assert documents(tokenizer, path) == [("<|assistant|>cd</s><|user|>e</s><|assistant|>cd</s>", "cd</s>cd</s>")]


def test_a_template_that_takes_whole_chats_only(tmp_path: Path) -> None:
    """It is asked for parts of a chat too, and what it says of these need not stop a chat that it takes."""
    path = folders.lines(tmp_path / "d.jsonl", [{"messages": [{"role": "system", "content": "s"}, *CHAT[1:]]}])
    strict = folders.tokenizer()
    user = "messages | selectattr('role', 'equalto', 'user') | list"
    strict.chat_template = f"{{% if not {user} %}}{{{{ raise_exception('no user') }}}}{{% endif %}}{folders.TEMPLATE}"
    assert documents(strict, path)[0][1] == "cd</s>cd</s>"


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (None, "chat_template is not set"),
        ("{{ raise_exception('no twins') }}", "no twins"),
        ("{{ messages[0]['name']['first'] }}", "has no attribute 'name'"),
        ("{% if messages[1]['content'] == 'cd' %}said otherwise{% endif %}", "Found: 'cd'"),
    ],
)
def test_a_chat_that_the_template_does_not_take_is_said_with_its_line(
    tmp_path: Path, template: str | None, found: str
) -> None:
    """And in one line, of files as of a prompt."""
    path = folders.lines(tmp_path / "d.jsonl", [{"messages": CHAT}])
    path.write_text("\n" + path.read_text())
    other = folders.tokenizer()
    other.chat_template = template
    with pytest.raises(DataError, match=rf"d\.jsonl:2:1: the .*template.*{found}"):
        documents(other, path)


def test_a_prompt_that_the_template_does_not_take_is_said() -> None:
    """As `worldsize llm generate --chat` asks for it."""
    other = folders.tokenizer()
    other.chat_template = None
    with pytest.raises(DataError, match="chat_template is not set"):
        generate.encoded(other, "a", chat=True)


@pytest.mark.parametrize(
    ("records", "found"),
    [
        ([{"prompt": "x", "completion": "y"}, {"prompt": "x"}], ":2:1: no 'completion', only 'prompt'"),
        (
            [{"prompt": "x", "completion": "y"}, {"prompt": None, "completion": "y"}],
            ":2:1: 'prompt' is null and no text",
        ),
        ([{"text": "x"}, ["x"]], ":2:1: a list where an object is needed"),
        ([{"text": "x"}, {"txt": "x"}], ":2:1: no 'text', only 'txt'"),
        ([{"text": "x"}, {"text": "x\ud83d"}], ":2:1: 'text' has half of a character, at 2"),
        ([{"prompt": "x", "completion": "\udc00"}], ":1:1: 'completion' has half of a character, at 1"),
        (
            [{"messages": [{"role": "assistant", "content": "a\ud83d"}]}],
            ":1:1: message 1 has half of a character, at 2",
        ),
        ([{"messages": CHAT}, {"messages": []}], "'messages' is a list and no list of messages"),
        ([{"messages": CHAT}, {"messages": [{"role": "user"}]}], "message 1 has no role and content"),
        ([{"messages": CHAT}, {"messages": CHAT[:1]}], "nothing to learn"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, records: list[Any], found: str) -> None:
    """And with the keys that are there (B079)."""
    lines, _ = samples.lines(folders.lines(tmp_path / "d.jsonl", records), "error")
    with pytest.raises(DataError) as caught:
        list(lines)
    assert found in str(caught.value)


def test_a_file_of_something_else_is_said(tmp_path: Path) -> None:
    """With what a line may be."""
    with pytest.raises(DataError, match="text or prompt and completion or messages"):
        samples.kind_of(folders.lines(tmp_path / "d.jsonl", [{"input": "x"}]))
