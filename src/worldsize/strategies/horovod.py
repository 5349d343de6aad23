"""Room: Horovod. Knows its all-reduce and how its ranks meet; nothing of steps or checkpoints.

Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", arXiv:1802.05799.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from worldsize.errors import ConfigError, LayoutError, StepError, WorldError, WorldsizeError
from worldsize.runtime import env
from worldsize.strategies import building
from worldsize.strategies.base import brief
from worldsize.strategies.ranked import Ranked
from worldsize.strategies.routing import route
from worldsize.strategies.transform import transform

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from worldsize.runtime.session import Session
    from worldsize.strategies.base import Options, Padding, Setting
    from worldsize.world import World

_BUILD = "build it for this torch: make engines in the checkout of worldsize, or as docs/install.md says"
_OWN_RANKS = ("horovodrun", "env")
"""Started by these, variables that name a Horovod rank are this process's own, and no leftover of a farther launcher."""


class Horovod(Ranked):
    """A whole model on each rank; Horovod sums the gradients while the backward pass still runs."""

    name = "horovod"
    padding: ClassVar[Padding] = "one"
    rehearses: ClassVar[bool] = False

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        if self.grid.shares < self.grid.world:
            raise LayoutError(
                "strategy 'horovod' holds a whole model on each rank",
                found=f"tp={setting.sizes.tp}, pp={setting.sizes.pp}, cp={setting.sizes.cp}",
                do="leave these at 1, or choose another strategy",
            )
        self._hvd = join(setting.session)
        self._sums: dict[nn.Module, _Sum] = {}

    @property
    def averaged(self) -> int:
        """Gradients are summed and never divided."""
        return 1

    def lay(self, build: Callable[[], nn.Module], options: Options) -> nn.Module:
        """The model on the device, with a hook at each gradient."""
        model = building.whole(build, options, self.setting.precision, self.device)
        self.refuse_differences(model)
        _refuse_sparse(model)
        transform(model, options)
        if any(value.requires_grad for value in model.parameters()):
            self._sums[model] = _Sum(self._hvd, model, options, f"worldsize.{len(self._sums)}")
        return route(model, None, self.setting.precision, self.device)

    def exchange(self, model: nn.Module, *, last: bool) -> None:
        """Gradients are summed over ranks in the backward pass of the last micro-batch only."""
        super().exchange(model, last=last)
        if model in self._sums:
            self._sums[model].begin(last=last)

    def stand_by(self, model: nn.Module, *, last: bool) -> None:
        """Never exchanged: what this model's parameters get in another's turn is thrown away."""
        del last
        if model in self._sums:
            self._sums[model].begin(last=False)

    def sent(self, model: nn.Module) -> None:
        """After the last micro-batch's backward pass: waits until every gradient is the whole world's."""
        if model in self._sums:
            self._sums[model].end()

    def check_gradients(self, model: nn.Module) -> list[str]:
        """Parameters that got no gradient here, where that was not allowed."""
        entry = self._sums.get(model)
        if entry is None:
            return []
        entry.refuse_late()
        return entry.missing


class _Bucket:
    """Parameters whose gradients travel as one tensor."""

    def __init__(self, name: str, values: list[nn.Parameter]) -> None:
        self.name, self.values = name, values
        self.left, self.handle = len(values), None

    def send(self, hvd: Any) -> None:
        """Begin to sum: gradients become parts of one tensor, zero where there is none."""
        zeros = (torch.zeros_like(value) if value.grad is None else value.grad for value in self.values)
        flat = torch.cat([grad.detach().reshape(-1) for grad in zeros])
        for value, part in zip(self.values, flat.split([value.numel() for value in self.values]), strict=True):
            value.grad = part.view_as(value)
        self.handle = hvd.allreduce_async_(flat, name=self.name, op=hvd.Sum)

    def wait(self, hvd: Any) -> None:
        """Until the sum is there."""
        handle, self.left, self.handle = self.handle, len(self.values), None
        try:
            hvd.synchronize(handle)
        except hvd.HorovodInternalError as error:
            raise WorldsizeError(
                str(error).partition(". ")[0],
                found="another rank failed, ended, or waited too long",
                do="see what that rank says, and Horovod's own lines",
            ) from None


class _Sum:
    """The gradients of one model on their way.

    Every rank sends the same buckets in each step, whatever its own micro-batches used: Horovod waits for all ranks.
    What a bucket holds never depends on time, so that the order of summation is the same in every run.
    """

    def __init__(self, hvd: Any, model: nn.Module, options: Options, name: str) -> None:
        self._hvd, self._name = hvd, name
        self._trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
        self._allow = options.unused_parameters == "allow"
        # Two sets of collectives on one device must not run at once: SyncBatchNorm has its own in the backward pass.
        self._early = not any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        self._buckets = [
            _Bucket(f"{name}.{number}", values)
            for number, values in enumerate(_cut(list(self._trained.values())[::-1], options.bucket_mb * 2**20))
        ]
        self._of = {value: bucket for bucket in self._buckets for value in bucket.values}
        self._arrived: set[nn.Parameter] = set()
        self._sending = self._ended = self._late = False
        self.missing: list[str] = []
        for value in self._of:
            value.register_post_accumulate_grad_hook(self._arrive)

    def begin(self, *, last: bool) -> None:
        """A micro-batch begins."""
        self._sending, self._ended, self._late = last, False, False
        self._arrived.clear()

    def end(self) -> None:
        """A backward pass has ended. Raises StepError where it was the second one of the last micro-batch."""
        self.refuse_late()
        if not self._sending:
            return
        self._sending, self._ended = False, True
        unused = [key for key, value in self._trained.items() if value.grad is None]
        used = self._count(set(unused)) if self._allow else None
        for bucket in self._buckets:
            if bucket.handle is None:
                bucket.send(self._hvd)
        for bucket in self._buckets:
            bucket.wait(self._hvd)
        self.missing = [] if self._allow else unused
        if used is not None:
            counts = self._hvd.synchronize(used).tolist()
            for value, count in zip(self._trained.values(), counts, strict=True):
                value.grad = value.grad if count else None

    def refuse_late(self) -> None:
        """Raises StepError where gradients came that this step's exchange no longer takes along."""
        if self._late:
            raise StepError(
                "gradients came past the exchange between ranks: each of them would keep its own",
                found="a second backward pass in the step's last micro-batch",
                do="add losses up before one step.backward",
            )

    def _arrive(self, value: Tensor) -> None:
        assert isinstance(value, nn.Parameter)
        self._late |= self._ended or value in self._arrived
        if not self._sending or self._late:
            return
        self._arrived.add(value)
        bucket = self._of[value]
        bucket.left -= 1
        if self._early and not bucket.left:
            bucket.send(self._hvd)

    def _count(self, unused: set[str]) -> int:
        """Begin to count on how many ranks each parameter got a gradient: what none uses shall keep none."""
        mine = torch.tensor([key not in unused for key in self._trained], dtype=torch.int32)
        handle: int = self._hvd.allreduce_async_(mine, name=f"{self._name}.used", op=self._hvd.Sum)
        return handle


def _refuse_sparse(model: nn.Module) -> None:
    sparse = [name for name, module in model.named_modules() if getattr(module, "sparse", False) is True]
    if sparse:
        raise LayoutError(
            "strategy 'horovod' sums dense gradients",
            found=f"sparse=True in {brief(sparse)}",
            do="choose sparse=False",
        )


def _cut(values: list[nn.Parameter], most: float) -> list[list[nn.Parameter]]:
    """Neighbours of one dtype, up to so many bytes together."""
    found: list[list[nn.Parameter]] = []
    size = math.inf
    for value in values:
        size += value.nbytes
        if size > most or value.dtype is not found[-1][0].dtype:
            found.append([])
            size = value.nbytes
        found[-1].append(value)
    return found


# --- how its ranks meet


def join(session: Session) -> Any:
    """Horovod's module for torch, with its ranks connected. Collective.

    Raises:
        ConfigError: it is not installed, or built without what this training needs.
        WorldError: its ranks do not meet, or count otherwise than ours.
    """
    hvd, problem = _library(session.device.type)
    problem = problem or _not_built(hvd, env.read())
    problem = next((said for said in session.comm.gather(problem) if said), None)
    if problem is not None:
        raise ConfigError(f"Horovod {problem}", do=_BUILD)
    if not hvd.is_initialized():
        _start(hvd, session)
    world = session.world
    seen = session.comm.gather((world.rank, world.size, hvd.rank(), hvd.size()))
    wrong = next(((rank, size, *its) for rank, size, *its in seen if [rank, size] != its), None)
    if wrong:
        raise WorldError(
            f"Horovod and the launcher ({world.launcher}) count ranks differently",
            found="rank {} of {} by the launcher, rank {} of {} by Horovod".format(*wrong),
            do="start with one launcher alone, or set HOROVOD_CONTROLLER=gloo where Horovod's MPI is not that of mpirun",
        )
    return hvd


def _library(device: str) -> tuple[Any, str | None]:
    """Horovod's module, and what is wrong with it."""
    try:
        from horovod import torch as hvd
    except ModuleNotFoundError as error:
        return None, f"cannot be imported: {error}"
    except ImportError as error:
        return None, f"is built for another torch than {torch.__version__}: {str(error).splitlines()[0]}"
    if not hasattr(hvd, "init"):
        return None, "is built without PyTorch"
    if not (hvd.gloo_built() or hvd.mpi_built()):
        return None, "is built with neither gloo nor MPI, so that its ranks cannot meet"
    if device == "cuda" and not hvd.nccl_built():
        return None, "is built without NCCL, and this training runs on GPUs"
    return hvd, None


def _not_built(hvd: Any, environ: Mapping[str, str]) -> str | None:
    """What this build lacks of the controller that is asked for: Horovod's start would be a crash without a word."""
    asked = environ.get("HOROVOD_CONTROLLER", "").lower()
    if {"": True, "gloo": hvd.gloo_built(), "mpi": hvd.mpi_built()}.get(asked, False):
        return None
    return f"is built without what HOROVOD_CONTROLLER={asked} asks for (where that is unset, ranks meet as this build can)"


def _start(hvd: Any, session: Session) -> None:
    environ, world = env.read(), session.world
    if environ.get("HOROVOD_ELASTIC", "0") not in ("", "0"):
        raise ConfigError(
            "horovodrun's elastic mode changes the world without us",
            do="start without --min-np, --max-np and --host-discovery-script; worldsize run restarts failed ranks",
        )
    patience = str(max(int(session.timeout.total_seconds()), 61))
    # Horovod would join tensors as they come: the order of summation, and the last bit, would be another in each run.
    values = {"HOROVOD_FUSION_THRESHOLD": "0"}
    values |= dict.fromkeys(("HOROVOD_GLOO_TIMEOUT_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"), patience)
    values = {name: value for name, value in values.items() if name not in environ}
    server = None
    if not _has_ranks(hvd, world, environ):
        server, meeting = _rendezvous(session, environ)
        values |= meeting
    try:
        with env.lent(values):
            hvd.init()
        session.comm.barrier()
    except (RuntimeError, ValueError) as error:
        raise WorldError("Horovod's ranks did not meet", found=str(error), do="see its own lines above") from None
    finally:
        if server is not None:
            server.stop()
            server._httpd.server_close()  # noqa: SLF001 - it leaves its port open


def _has_ranks(hvd: Any, world: World, environ: Mapping[str, str]) -> bool:
    """Whether Horovod learns of its ranks from the launcher: horovodrun, or an MPI that it was built for."""
    controller = environ.get("HOROVOD_CONTROLLER", "").lower()
    if environ.get("HOROVOD_RANK") and world.launcher in _OWN_RANKS:
        return True
    return bool(controller == "mpi" or (not controller and world.launcher in ("openmpi", "pmi") and hvd.mpi_built()))


def _rendezvous(session: Session, environ: Mapping[str, str]) -> tuple[Any, dict[str, str]]:
    """What horovodrun would do: a server on rank 0's host, and every rank's place. Collective."""
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousServer

    world, server, port = session.world, None, 0
    places = session.comm.gather((world.node, world.local_rank, world.local_size))
    slots = []
    for rank, (node, local_rank, local_size) in enumerate(places):
        across = sorted(at for at, local, _ in places if local == local_rank)
        slots.append(
            SlotInfo(f"node{node}", rank, local_rank, across.index(node), world.size, local_size, len(across))
        )
    if world.rank == 0:
        server = RendezvousServer()
        port = server.start()
        server.init(slots)
    return server, {
        **{f"HOROVOD_{name.upper()}": str(value) for name, value in vars(slots[world.rank]).items()},
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": world.master_addr if world.nodes > 1 and world.master_addr else "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(session.comm.broadcast(port)),
        "HOROVOD_GLOO_IFACE": environ.get("GLOO_SOCKET_IFNAME", "lo" if world.nodes == 1 else ""),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
