"""Room: attention of a decoder: what each position may see, and the kernel that computes it. No weights.

A position sees itself and what comes before it: within its document where several lie in one row, within its layer's window.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from worldsize.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

KERNELS = ("auto", "sdpa", "flash", "cudnn", "math", "flex")
_NARROWEST = 16
"""The smallest size of a head for flex_attention on CUDA."""


class Kernel(Protocol):
    """One way to compute attention."""

    @property
    def name(self) -> str:
        """What a person calls it."""
        ...

    def view(self, length: int, documents: Tensor | None, device: torch.device) -> View:
        """What is the same in all layers of one pass."""
        ...


class View(Protocol):
    """What the positions of one batch may see, ready for a kernel."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float | None) -> Tensor:
        """Attention of (samples, heads, length, size); keys and values may have fewer heads, each for a group of queries."""
        ...


def kernel(name: str, device: torch.device, size: int) -> Kernel:
    """The kernel of that name for heads of that size; "auto": the fastest that this device has.

    Raises:
        ConfigError: there is none of that name, or not for this device or size.
    """
    if name not in KERNELS:
        raise ConfigError(f"attention {name!r} is not known", do=f"choose one of {', '.join(KERNELS)}")
    cuda = device.type == "cuda"
    if name in ("flash", "cudnn", "flex") and not cuda:
        raise ConfigError(f"attention={name} needs CUDA", found=device.type, do="leave it at auto")
    if name == "flex":
        if size < _NARROWEST:
            raise ConfigError(
                f"attention=flex needs heads of at least {_NARROWEST}",
                found=f"head_dim {size}",
                do="leave it at auto",
            )
        return Flexible()
    if name == "auto":
        return Scaled("sdpa", packed=Flexible() if cuda and size >= _NARROWEST else None)
    # It takes no masks.
    return Scaled(name, packed=Flexible() if name == "flash" and size >= _NARROWEST else None)


class Heads(NamedTuple):
    """How many there are, and of what size."""

    queries: int
    keys: int
    size: int


def told(
    kernel: Kernel, heads: Heads, device: torch.device, dtype: torch.dtype, *, packed: bool, masked: bool = False
) -> str:
    """Which kernel computes rows on this device: of torch's own the one that it chooses for such heads.

    Args:
        kernel: what was chosen by name.
        heads: of one rank.
        device: where.
        dtype: of what goes in.
        packed: rows hold several documents.
        masked: rows of one need a mask too, for windows or for positions that lie apart.

    Raises:
        ConfigError: that one does not.
    """
    if not isinstance(kernel, Scaled) or (packed and kernel.packed is not None):
        return Flexible.name
    query, key = (
        torch.empty(1, count, _SHOWN, heads.size, device=device, dtype=dtype, requires_grad=True)
        for count in (heads.queries, heads.keys)
    )
    mask = torch.ones(1, 1, _SHOWN, _SHOWN, dtype=torch.bool, device=device) if packed or masked else None
    chosen = _choice(_BACKENDS.get(kernel.name), query, key, mask)
    if chosen == SDPBackend.ERROR:
        raise ConfigError(
            f"attention={kernel.name} does not compute these heads",
            found=f"{heads.queries} of {heads.size} for {heads.keys}, {dtype} on {device.type}"
            f"{', with a mask' * (mask is not None)}",
            do="leave it at auto",
        )
    name = chosen.name.removesuffix("_ATTENTION").lower()
    return kernel.name if kernel.name == name else f"{kernel.name} ({name})"


def _choice(backends: list[SDPBackend] | None, query: Tensor, key: Tensor, mask: Tensor | None) -> SDPBackend:
    """What torch takes of these, or of all; ERROR where none of them can."""
    try:
        with sdpa_kernel(backends) if backends else nullcontext():
            found: int = torch._fused_sdp_choice(  # noqa: SLF001 - torch says it nowhere else
                query, key, key, mask, is_causal=mask is None, enable_gqa=query.shape[1] != key.shape[1]
            )
    except RuntimeError:  # "No available kernel", after warnings that say why
        return SDPBackend.ERROR
    return SDPBackend(found)


_SHOWN = 128
"""Positions of the rows that torch is shown to choose."""
_BACKENDS = {
    "math": [SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
}


@dataclass(frozen=True)
class Scaled:
    """torch's scaled_dot_product_attention, which chooses by device and dtype unless one of its backends is named.

    Attributes:
        name: sdpa, or a backend.
        packed: the kernel for rows of several documents and for windows, where masks would be large.
    """

    name: str
    packed: Flexible | None = None

    def view(self, length: int, documents: Tensor | None, device: torch.device) -> View:
        """A mask where the plain causal one does not say it."""
        if documents is not None and self.packed is not None:
            return self.packed.view(length, documents, device)
        return Masked(self.name, length, documents, device)


class Masked:
    """One pass through scaled_dot_product_attention.

    Attributes:
        whole: the mask of layers without a window, where it is more than causal.
    """

    def __init__(self, name: str, length: int, documents: Tensor | None, device: torch.device) -> None:
        # All is made here: layers that are compiled cannot keep anything between them. No dataclass: FSDP would take it apart.
        self.name, self.length, self._device = name, length, device
        self.whole: Tensor | None = None
        if documents is not None:
            self.whole = (documents[:, None, :, None] == documents[:, None, None, :]) & self._causal

    def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float | None) -> Tensor:
        """See `View`."""
        narrow = window is not None and window < self.length
        mask = self._mask(window if narrow else None)
        backends = _BACKENDS.get(self.name)
        with sdpa_kernel(backends) if backends else nullcontext():
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )  # fmt: skip

    def _mask(self, window: int | None) -> Tensor | None:
        if window is None:
            return self.whole
        near = self._distances < window
        return near & (self._causal if self.whole is None else self.whole)

    @property
    def _distances(self) -> Tensor:
        at = torch.arange(self.length, device=self._device)
        return at[:, None] - at

    @property
    def _causal(self) -> Tensor:
        return self._distances >= 0


@dataclass(frozen=True)
class Flexible:
    """torch's compiled flex_attention (Dong et al., 2024): no mask in memory, and blocks that see nothing are skipped."""

    name: str = "flex"

    def view(self, length: int, documents: Tensor | None, device: torch.device) -> View:
        """Which blocks of positions see which."""
        return Blocks(length, documents, device)


class Blocks:
    """One pass through flex_attention."""

    def __init__(self, length: int, documents: Tensor | None, device: torch.device) -> None:
        self._length, self._documents, self._device = length, documents, device
        self._masks: dict[int | None, Any] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float | None) -> Tensor:
        """See `View`."""
        window = window if window is not None and window < self._length else None
        if window not in self._masks:
            self._masks[window] = self._made(window)
        output: Tensor = _flex()(
            query, key, value, block_mask=self._masks[window], scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return output

    def _made(self, window: int | None) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        documents, samples = self._documents, None if self._documents is None else len(self._documents)

        def sees(sample: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            found = query >= key
            if window is not None:
                found = found & (query - key < window)
            if documents is not None:
                found = found & (documents[sample, query] == documents[sample, key])
            return found

        return create_block_mask(sees, samples, None, self._length, self._length, device=self._device)


_compiled: list[Callable[..., Any]] = []


def _flex() -> Callable[..., Any]:
    """Compiled once: uncompiled it would hold all scores."""
    if not _compiled:
        from torch.nn.attention.flex_attention import flex_attention

        _compiled.append(torch.compile(flex_attention))
    return _compiled[0]
