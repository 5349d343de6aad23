"""Room: a model's folder from the Hugging Face hub, where that was asked for. Nothing else here opens a connection."""

from __future__ import annotations

from pathlib import Path

from worldsize.errors import ConfigError
from worldsize.recipes.llm.data import TOKENIZER

_CONFIG = ["config.json", "generation_config.json"]
_WEIGHTS = ["model*.safetensors", "model.safetensors.index.json"]
"""As transformers names them: beside them some repositories have the same weights once more in another form."""


def local(place: Path, *, download: bool, weights: bool = True) -> Path:
    """The folder itself; or where a repository of that name lies once it was fetched.

    Ranks of one node share the hub's cache, which locks each file while one of them fetches it.

    Args:
        place: a folder; or OWNER/NAME or OWNER/NAME@REVISION.
        download: whether what is no folder may be fetched.
        weights: whether the model's own are needed, beside its configuration and its tokenizer.

    Raises:
        ConfigError: it cannot be fetched.
    """
    if not download or place.exists():
        return place
    from huggingface_hub import snapshot_download

    name, _, revision = place.as_posix().partition("@")
    wanted = [*_CONFIG, *TOKENIZER, *(_WEIGHTS if weights else ())]
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=wanted))
    except Exception as error:  # of the hub's, of whatever it speaks HTTP with, of the disk: none is a fault of ours
        raise ConfigError(
            f"{place} is no folder, and cannot be fetched from the Hugging Face hub",
            found=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no more'}",
            do="give a folder, or fetch it where there is a network",
        ) from error
