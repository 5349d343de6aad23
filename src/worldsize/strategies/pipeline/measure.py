"""Room: what the parts of a chain cost: the time of their forward passes, measured once and agreed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from worldsize.errors import ConfigError
from worldsize.runtime.comm import decide
from worldsize.runtime.seeds import reseeded
from worldsize.strategies.pipeline.chain import Staged, chain

if TYPE_CHECKING:
    from torch import nn

    from worldsize.strategies.base import Options, Setting

_TIMES = 3


def costs(model: nn.Module, options: Options, setting: Setting) -> dict[str, float] | None:
    """Seconds of each part's forward pass, by path; None where the balance is by parameters. Collective.

    Raises:
        ConfigError: there is nothing to measure, or nothing to measure with.
    """
    if options.balance == "parameters" or options.split is not None or isinstance(model, Staged):
        return None
    if options.sample is None or options.init == "meta":
        raise ConfigError(
            "balance='time' measures a forward pass of the whole model",
            found="init='meta'" if options.init == "meta" else "no sample",
            do="give run.model(..., sample=a batch of inputs) and init='here', or say where stages begin (split=)",
        )
    return decide(setting.session.comm, lambda: _measured(model, options.sample, setting))


def _measured(model: nn.Module, sample: Any, setting: Setting) -> dict[str, float]:
    device = setting.session.device
    args = sample if isinstance(sample, tuple) else (sample,)
    dtype = setting.precision.inputs
    args = tuple(value.to(device, dtype if value.is_floating_point() else None) for value in args)
    before = {name: value.clone() for name, value in model.named_buffers()}
    watches = [_Watch(path, part, device) for path, part in chain(model)]
    with torch.no_grad(), reseeded(0, device):
        for _ in range(_TIMES):
            model(*args)
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    for watch in watches:
        watch.remove()
    return {watch.path: watch.best for watch in watches}


class _Watch:
    """Brings one part to the device for its pass, and stops the time there."""

    def __init__(self, path: str, part: nn.Module, device: torch.device) -> None:
        self.path, self.best = path, 0.0
        self._device, self._began = device, 0.0
        self._home = next(iter(part.parameters()), torch.empty(0)).device
        self._hooks = [part.register_forward_pre_hook(self._before), part.register_forward_hook(self._after)]

    def remove(self) -> None:
        """Leave the part as it was."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, part: nn.Module, _args: Any) -> None:
        part.to(self._device)
        _settled(self._device)
        self._began = time.perf_counter()

    def _after(self, part: nn.Module, _args: Any, _output: Any) -> None:
        _settled(self._device)
        now = time.perf_counter() - self._began
        self.best = min(self.best or now, now)
        part.to(self._home)


def _settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
