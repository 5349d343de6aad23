"""Room: horovodrun's key-value store, in which rank 0 says where it listens: horovodrun itself tells no such port. No torch."""

from __future__ import annotations

import time
from dataclasses import replace
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING

from worldsize.errors import WorldError
from worldsize.runtime import network

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from worldsize.world import World

_PATH = "/worldsize/master"
_PAUSE_S, _REQUEST_S = 0.05, 10


def meet(world: World, environ: Mapping[str, str], listen: Callable[[str], int], limit: float) -> World:
    """The world with where rank 0 listens.

    Args:
        world: as horovodrun says it.
        environ: names the store.
        listen: begins to listen at an address of this host, on rank 0, and returns the port.
        limit: seconds to wait for rank 0's word.

    Raises:
        WorldError: the store does not answer, or rank 0 says nothing.
    """
    address, port = environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    began = time.monotonic()
    try:
        if world.rank == 0:
            own = "127.0.0.1" if world.nodes == 1 else network.source_towards(address) or address
            endpoint = network.join_endpoint(own, listen(own))
            _ask(address, port, "PUT", endpoint)
        else:
            while not (endpoint := _ask(address, port, "GET")) and time.monotonic() < began + limit:
                time.sleep(_PAUSE_S)
    except (OSError, HTTPException) as error:
        raise _silent(world, address, port, f"horovodrun's store does not answer: {error}") from None
    if not endpoint:
        raise _silent(world, address, port, f"rank 0 did not come within {limit:.0f} s")
    host, number = network.split_endpoint(endpoint)
    return replace(world, master_addr=host, master_port=number)


def _ask(address: str, port: int, method: str, body: str | None = None) -> str:
    """What the store says; nothing where it knows nothing. No proxy stands between ranks."""
    connection = HTTPConnection(address, port, timeout=_REQUEST_S)
    try:
        connection.request(method, _PATH, body)
        answer = connection.getresponse()
        text = answer.read().decode()
        return text if answer.status == HTTPStatus.OK else ""
    finally:
        connection.close()


def _silent(world: World, address: str, port: int, why: str) -> WorldError:
    return WorldError(
        f"rank {world.rank} of horovodrun does not learn where rank 0 listens",
        found=f"{why} (HOROVOD_GLOO_RENDEZVOUS_ADDR={address}, HOROVOD_GLOO_RENDEZVOUS_PORT={port})",
        do="see whether horovodrun and rank 0 still run, or set MASTER_ADDR and MASTER_PORT",
    )
