"""Room: a model's folder from the Hugging Face hub, where that was asked for. Nothing else here opens a connection."""

from __future__ import annotations

from pathlib import Path

from worldsize.errors import ConfigError
from worldsize.recipes.llm.data import TOKENIZER

_WANTED = ["*.json", "*.safetensors", *TOKENIZER]


def local(place: Path, *, download: bool) -> Path:
    """The folder itself; or where a repository of that name lies once it was fetched.

    Ranks of one node share the hub's cache, which locks each file while one of them fetches it.

    Args:
        place: a folder; or OWNER/NAME or OWNER/NAME@REVISION.
        download: whether what is no folder may be fetched.

    Raises:
        ConfigError: it cannot be fetched.
    """
    if not download or place.exists():
        return place
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    name, _, revision = place.as_posix().partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=_WANTED))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise ConfigError(
            f"{place} is no folder, and cannot be fetched from the Hugging Face hub",
            found=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no more'}",
            do="give a folder, or fetch it where there is a network",
        ) from error
