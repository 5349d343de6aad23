"""Room: the world as one frozen value. Read once by `runtime.env.detect`, then passed down."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class World:
    """Which process this is among how many, and how the others are reached.

    Invariants (checked on construction): `0 <= rank < size`, `0 <= local_rank < local_size <= size`,
    `0 <= node < nodes <= size`.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    nodes: int = 1
    launcher: str = "none"
    """What started this process: none, worldsize, torchrun, horovodrun, slurm, openmpi, pmi, or env (variables set by hand)."""
    master_addr: str | None = None
    master_port: int | None = None
    run_id: str | None = None
    """The launcher's name for this start (torchrun's run id, Slurm's job id), where there is one."""
    restart: int = 0
    """How often the launcher has restarted these processes."""

    def __post_init__(self) -> None:
        pairs = ((self.rank, self.size), (self.local_rank, self.local_size), (self.node, self.nodes))
        for index, count in pairs:
            assert 0 <= index < count <= self.size, (index, count, self.size)

    @property
    def alone(self) -> bool:
        """True where there is nobody to talk to."""
        return self.size == 1
