"""Room: torch's DistributedDataParallel. Knows its buckets and switches; nothing of steps or checkpoints.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import inspect
import re
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from worldsize.errors import StepError
from worldsize.strategies import building
from worldsize.strategies.base import Options, Padding, Setting, brief
from worldsize.strategies.ranked import Ranked
from worldsize.strategies.routing import route
from worldsize.strategies.transform import blocks, transform

if TYPE_CHECKING:
    from collections.abc import Callable

_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else None
)


class DDP(Ranked):
    """A whole model on each rank; gradients summed in buckets while the backward pass still runs."""

    name = "ddp"
    padding: ClassVar[Padding] = "one"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._entries: dict[nn.Module, _Entry] = {}

    def lay(self, build: Callable[[], nn.Module], options: Options) -> nn.Module:
        """The model on the device, with its gradients exchanged through a wrapper that nobody sees."""
        model = building.whole(build, options, self.setting.precision, self.device)
        self.refuse_differences(model)
        transform(model, options)
        if options.compile and blocks(model):
            _compile_blocks_whole()
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return route(model, None, self.setting.precision, self.device)
        self._entries[model] = entry = _Entry(_wrap(model, options))
        return route(model, entry, self.setting.precision, self.device)

    def exchange(self, model: nn.Module, *, last: bool) -> None:
        """Gradients are summed over ranks in the backward pass of the last micro-batch only."""
        super().exchange(model, last=last)
        if model in self._entries:
            self._entries[model].begin(last=last and not self.rehearsing)

    def stand_by(self, model: nn.Module, *, last: bool) -> None:
        """Never exchanged: what this model's parameters get in another's turn is thrown away."""
        del last
        if model in self._entries:
            self._entries[model].begin(last=False)

    def sent(self, model: nn.Module) -> None:
        """Whether the backward pass that just ended was exchanged as a whole, in the last micro-batch."""
        if model in self._entries:
            self._entries[model].sent()

    def check_gradients(self, model: nn.Module) -> list[str]:
        """A parameter without gradient leaves its whole bucket unsummed."""
        entry = self._entries.get(model)
        if entry is None:
            return []
        missing = self.without_gradient(model)
        if missing and not entry.wrapper.find_unused_parameters:
            return missing
        entry.refuse_unreduced()
        return []


class _Door(nn.Module):
    """What DistributedDataParallel wraps: any method of the user's model, by name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self._kind = model, type(model)

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._kind, method)(self.model, *args, **kwargs)


class _Entry:
    """The way into one model, which knows whether what went in was exchanged on its way back.

    The wrapper exchanges the first backward pass after a forward pass through it, and no other: gradients that come
    from a bypass, or from a second backward pass, would stay this rank's own.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self.wrapper = wrapper
        self._names = {name.removeprefix("model."): value for name, value in wrapper.module.named_parameters()}
        self._trained = [value for value in self._names.values() if value.requires_grad]
        self._last = self._reduced = False
        self._entered = 0
        self._seen: list[tuple[int, int]] = []

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.wrapper.module(method, *args, **kwargs)
        self._entered += 1
        return self.wrapper(method, *args, **kwargs)

    def begin(self, *, last: bool) -> None:
        """A micro-batch begins."""
        self.wrapper.require_backward_grad_sync = self._last = last
        self._entered, self._reduced = 0, False
        if last:
            self._seen = self._marks()

    def sent(self) -> None:
        """A backward pass has ended.

        Raises:
            StepError: it gave gradients that were not summed over ranks.
        """
        if not self._last:
            return
        now = self._marks()
        if now == self._seen:
            return
        if not self._entered:
            raise StepError(
                "gradients came past the exchange between ranks: each of them would keep its own",
                found="a backward pass without a call of the model before it",
                do="call the model itself or a public method of it, and add losses up before one backward",
            )
        self._refuse_unfinished()
        self._seen, self._entered, self._reduced = now, 0, True

    def refuse_unreduced(self) -> None:
        """Raises StepError where earlier micro-batches left gradients that the last one did not exchange."""
        if not self._reduced and any(value.grad is not None for value in self._trained):
            raise StepError(
                "the last micro-batch's backward pass did not reach the model, so that its gradients were not exchanged",
                do="let every micro-batch's loss depend on the model's output, with weight 0 where it shall not count",
            )

    def _marks(self) -> list[tuple[int, int]]:
        grads = [value.grad for value in self._trained]
        return [(id(grad), grad._version) if grad is not None else (0, 0) for grad in grads]  # noqa: SLF001

    def _refuse_unfinished(self) -> None:
        try:
            self.wrapper.reducer._check_reducer_finalized()  # noqa: SLF001 - forward asks the same, one step too late
        except RuntimeError as error:
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            names = [name for name, value in self._names.items() if value.requires_grad]
            missing = [names[int(index)] for index in found[1].split()] if found else []
            raise StepError(
                "parameters got no gradient in the step's last micro-batch, where gradients are exchanged",
                found=brief(missing) or "unknown ones",
                do="use them, freeze them before run.model, or run.model(..., unused_parameters='allow')",
            ) from None


def _compile_blocks_whole() -> None:
    """Torch's compiler cuts what it compiles inside of the wrapper at each bucket, for a whole model's gradients to come early.

    Blocks come one by one anyway, and what lies between pieces is held for the backward pass: a decoder of 10^9 parameters took
    58 GB where one rank alone took 46, and 5 of these 12 were the buckets. Small buckets ended it by an assertion.
    """
    import torch._dynamo.config as compiler

    compiler.optimize_ddp = False


def _wrap(model: nn.Module, options: Options) -> DistributedDataParallel:
    # Running statistics are composed exactly, see batchnorm: the wrapper's own broadcast of buffers is off.
    buffers: dict[str, Any] = {_BUFFERS or "broadcast_buffers": False}
    wrapper = DistributedDataParallel(
        _Door(model),
        init_sync=False,
        find_unused_parameters=options.unused_parameters == "allow",
        gradient_as_bucket_view=True,
        bucket_cap_mb=options.bucket_mb,
        **buffers,
    )
    _fix_buckets(wrapper)
    return wrapper


def _fix_buckets(wrapper: DistributedDataParallel) -> None:
    """Make the wrapper choose its buckets now, by one backward pass that counts for nothing.

    It would otherwise choose them anew after its first step, from the order in which gradients came. That changes the
    order of summation on three and more ranks (1e-8), and a resumed run, whose first step is another one, would
    differ by it from the run it continues. Nodes made in the order of definition run backward from the last one.
    """
    trained = [parameter for parameter in wrapper.parameters() if parameter.requires_grad]
    parts = [parameter.flatten()[:1].sum() * 0.0 for parameter in trained]
    with warnings.catch_warnings():
        # In the other mode, which keeps its first buckets, it says once that nothing is unused. That is spent here.
        warnings.filterwarnings("ignore", message="find_unused_parameters=True")
        wrapper.reducer.prepare_for_forward()
        wrapper.reducer.prepare_for_backward(parts if wrapper.find_unused_parameters else [])
    torch.autograd.backward(parts)
    wrapper.reducer._rebuild_buckets()  # noqa: SLF001 - forward would call it, one step too late
    for parameter in trained:
        parameter.grad = None
