"""Models from the Hugging Face hub: fetched where that is asked for, and never otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils._paths import filter_repo_objects

from worldsize.errors import ConfigError
from worldsize.recipes.llm import hub


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str | None]]:
    """What the hub is asked for; it has everything."""
    found: list[tuple[str, str | None]] = []

    def fetched(name: str, revision: str | None = None, **_: Any) -> str:
        found.append((name, revision))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    return found


def test_nothing_is_fetched_unless_asked_for(asked: list[Any]) -> None:
    """What is no folder is said to be none, later."""
    assert hub.local(Path("owner/name"), download=False) == Path("owner/name")
    assert not asked


def test_a_folder_is_taken_as_it_is(asked: list[Any], tmp_path: Path) -> None:
    """Also where fetching is allowed."""
    assert hub.local(tmp_path, download=True) == tmp_path
    assert not asked


@pytest.mark.parametrize(("said", "wanted"), [("a/b", ("a/b", None)), ("a/b@main", ("a/b", "main"))])
def test_a_repository_is_fetched(asked: list[Any], tmp_path: Path, said: str, wanted: tuple[str, str | None]) -> None:
    """Of a revision, where one is named."""
    assert hub.local(Path(said), download=True) == tmp_path
    assert asked == [wanted]


@pytest.mark.parametrize("weights", [True, False])
def test_only_what_is_needed_is_fetched(monkeypatch: pytest.MonkeyPatch, weights: bool) -> None:
    """No second form of the same weights, and none at all for a tokenizer or a model that is made anew."""
    there = [
        "config.json", "tokenizer.json", "additional_chat_templates/rag.jinja", "README.md", "pytorch_model.bin",
        "model-00001-of-00002.safetensors", "model.safetensors.index.json",
        "consolidated.safetensors", "original/model.safetensors", "onnx/config.json",
    ]  # fmt: skip
    found: list[str] = []

    def fetched(_name: str, allow_patterns: list[str], **_: Any) -> str:
        found.extend(filter_repo_objects(there, allow_patterns=allow_patterns))
        return "."

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    hub.local(Path("a/b"), download=True, weights=weights)
    assert found == [*there[:3], *(there[5:7] if weights else ())]


def test_what_fails_in_another_library_is_said_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a proxy that denies."""

    def fetched(*_: Any, **__: Any) -> str:
        raise RuntimeError("403 Forbidden")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    with pytest.raises(ConfigError, match=r"cannot be fetched from the Hugging Face hub\. Found: RuntimeError: 403"):
        hub.local(Path("a/b"), download=True)


def test_what_cannot_be_fetched_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a line, as on a node without a network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"owner/none is no folder, and cannot be fetched"):
        hub.local(Path("owner/none"), download=True)
