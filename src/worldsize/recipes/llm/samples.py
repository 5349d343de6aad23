"""Room: records to tokens: what a line of a data file may be, and which of its tokens are to be learnt. Knows a tokenizer.

A line is text to go on from, a prompt with its completion, or the messages of a chat. Prompts and completions become tokens
each by itself, as they will when the model is asked; a chat is rendered whole by the tokenizer's template, and what the
assistant says, with the mark that ends it, is found in the rendered text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from worldsize.data.jsonl import Lines
from worldsize.data.tokens import Document
from worldsize.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

LossOver = Literal["completion", "all"]
_AT_ONCE = 1000
"""Records that the tokenizer gets together: it works on them with several threads."""
_KINDS = {"text": ("text",), "prompt": ("prompt", "completion"), "chat": ("messages",)}


def kind_of(path: Path) -> str:
    """What the lines of a file are: "text", "prompt" or "chat", by its first record. Raises DataError where that is none."""
    with path.open("rb") as stream:
        for line in stream:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                for kind, keys in _KINDS.items():
                    if set(keys) <= record.keys():
                        return kind
    wanted = " or ".join(" and ".join(keys) for keys in _KINDS.values())
    raise DataError(f"{path} has no line that can be trained on", do=f"give each line {wanted}")


def problem(record: Any, kind: str) -> str | None:
    """What is wrong with a record of that kind, or None."""
    if not isinstance(record, dict):
        return f"a {type(record).__name__} where an object is needed"
    for key in _KINDS[kind]:
        if key not in record:
            return f"no {key!r}, only {', '.join(map(repr, list(record)[:6])) or 'an empty object'}"
    if kind == "chat":
        return _problem_of_chat(record["messages"])
    odd = next((key for key in _KINDS[kind] if not isinstance(record[key], str)), None)
    if odd is not None:
        return f"{odd!r} is {_named(record[odd])} and no text"
    return next((said for key in _KINDS[kind] if (said := _broken(repr(key), record[key]))), None)


def _problem_of_chat(messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return f"'messages' is {_named(messages)} and no list of messages"
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            return f"message {number} has no role and content that are texts"
        if said := _broken(f"message {number}", message["content"]):
            return said
    if not any(message["role"] == "assistant" for message in messages):
        return "no message is the assistant's, so there is nothing to learn"
    return None


def _broken(what: str, text: str) -> str | None:
    r"""JSON can say half of a pair of UTF-16 (\ud83d), as of texts that were cut; no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{what} has half of a character, at {error.start + 1}"
    return None


def _named(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


@dataclass(frozen=True, slots=True)
class Encoder:
    """Records to tokens.

    Attributes:
        tokenizer: of transformers.
        over: what is learnt of prompts and chats.
    """

    tokenizer: Any
    over: LossOver = "completion"

    def documents(self, lines: Lines, kind: str) -> Iterator[Document]:
        """The documents of a file, in its order."""
        encode = {"text": self._texts, "prompt": self._prompts, "chat": self._chats}[kind]
        rows = iter(lines)
        while batch := list(islice(rows, _AT_ONCE)):
            numbers, records = zip(*batch, strict=True)
            made = encode(records)
            for number in numbers:
                try:
                    tokens, learnt = next(made)
                except DataError as error:
                    raise DataError(
                        f"{lines.path}:{number}:1: {error.what}", found=error.found, do=error.do
                    ) from error
                yield Document(tokens, learnt, number)

    def _texts(self, records: Iterable[dict[str, Any]]) -> Iterator[tuple[list[int], list[bool] | None]]:
        for tokens in self._encoded([record["text"] for record in records], special=True):
            yield self._ended(tokens), None

    def _prompts(self, records: Iterable[dict[str, Any]]) -> Iterator[tuple[list[int], list[bool] | None]]:
        records = list(records)
        prompts = self._encoded([record["prompt"] for record in records], special=True)
        completions = self._encoded([record["completion"] for record in records], special=False)
        for before, after in zip(prompts, completions, strict=True):
            prompt, completion = self._open(before), self._ended(after)
            learnt = [self.over == "all"] * len(prompt) + [True] * len(completion)
            yield prompt + completion, learnt

    def _chats(self, records: Iterable[dict[str, Any]]) -> Iterator[tuple[list[int], list[bool] | None]]:
        for record in records:
            text, spans = self._rendered(record["messages"])
            found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            places = found["offset_mapping"]
            yield list(found["input_ids"]), [self.over == "all" or _inside(place, spans) for place in places]

    def _encoded(self, texts: list[str], *, special: bool) -> list[list[int]]:
        found: list[list[int]] = self.tokenizer(texts, add_special_tokens=special)["input_ids"]
        return found

    def _open(self, tokens: list[int]) -> list[int]:
        """Without an end token that the tokenizer may have put there: the completion follows."""
        end = self.tokenizer.eos_token_id
        return tokens[:-1] if len(tokens) > 1 and tokens[-1] == end else tokens

    def _ended(self, tokens: list[int]) -> list[int]:
        """With the end token, so that it is learnt."""
        end = self.tokenizer.eos_token_id
        return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]

    def _rendered(self, messages: list[dict[str, str]]) -> tuple[str, list[tuple[int, int]]]:
        """A chat as text, and where the assistant speaks in it."""
        spans: list[tuple[int, int]] = []
        whole = templated(self.tokenizer, messages)
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before, after = self._around(messages, index)
                if before and after.startswith(before) and whole.startswith(after):
                    spans.append((len(before), len(after)))
                else:
                    spans.append(self._found(whole, message["content"].strip(), _past(whole, messages[:index])))
        return whole, spans

    def _around(self, messages: list[dict[str, str]], index: int) -> tuple[str, str]:
        """The text up to a message, and with it; empty where the template takes no such part of a chat, as none at all."""
        try:
            before = templated(self.tokenizer, messages[:index], open_=True) if index else ""
            return before, templated(self.tokenizer, messages[: index + 1])
        except DataError:
            return "", ""

    def _found(self, whole: str, content: str, begin: int) -> tuple[int, int]:
        """Where a template says earlier messages otherwise once others follow: the content as it stands there, and its end."""
        start = whole.find(content, begin)
        if start < 0:
            raise DataError(
                "the chat template changes what the assistant says, so that it cannot be found again",
                found=repr(content[:40]),
                do="render the chats yourself, and give prompt and completion",
            )
        stop = start + len(content)
        marks = [mark for mark in self.tokenizer.all_special_tokens if whole.startswith(mark, stop)]
        return start, stop + max(map(len, marks), default=0)


def templated(tokenizer: Any, messages: list[dict[str, str]], *, open_: bool = False) -> str:
    """Messages as the tokenizer's template says them; `open_`: up to where the assistant begins to speak.

    Raises:
        DataError: there is no template, or it does not take them.
    """
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=open_)
    except (TemplateError, ValueError, TypeError, LookupError) as error:
        raise DataError(
            "the tokenizer's chat template does not take these messages", found=str(error),
            do="give another --tokenizer, or plain prompts and completions",
        ) from error  # fmt: skip
    return text


def _past(whole: str, earlier: list[dict[str, str]]) -> int:
    """Up to where earlier messages reach in the whole text, so that what they say is not taken for the one after them."""
    reached = 0
    for content in (message["content"].strip() for message in earlier):
        place = whole.find(content, reached)
        reached = reached if place < 0 else place + len(content)
    return reached


def _inside(place: tuple[int, int], spans: list[tuple[int, int]]) -> bool:
    return any(start <= place[0] and place[1] <= stop and place[0] < place[1] for start, stop in spans)


def lines(path: Path, bad: Literal["error", "skip"]) -> tuple[Lines, str]:
    """The records of a file, and their kind."""
    kind = kind_of(path)
    return Lines(path, lambda record: problem(record, kind), bad), kind
