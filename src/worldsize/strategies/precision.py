"""Room: what a precision's name means in dtypes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worldsize.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of a training.

    Attributes:
        name: fp32, fp64, bf16 or fp16.
        parameters: dtype of parameters, gradients and optimizer state.
        autocast: dtype that forward passes compute in where it differs (torch.autocast's rules), else None.
        scaled: whether losses are scaled up so that small gradients survive (fp16).
    """

    name: str
    parameters: torch.dtype
    autocast: torch.dtype | None = None
    scaled: bool = False

    @classmethod
    def of(cls, name: str) -> Precision:
        """The precision of that name. Raises ConfigError on another one."""
        if name not in _KNOWN:
            raise ConfigError(f"precision {name!r} is not known", do=f"choose one of {', '.join(_KNOWN)}")
        return _KNOWN[name]

    @property
    def inputs(self) -> torch.dtype | None:
        """What floating-point inputs are cast to, or None to leave them."""
        return self.parameters if self.parameters is not torch.float32 else None


_KNOWN = {
    "fp32": Precision("fp32", torch.float32),
    "fp64": Precision("fp64", torch.float64),
    "bf16": Precision("bf16", torch.float32, torch.bfloat16),
    "fp16": Precision("fp16", torch.float32, torch.float16, scaled=True),
}
