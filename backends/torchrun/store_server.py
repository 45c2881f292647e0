"""The store of a group's control channel: where it listens, and the key of its messages.

The key is random, and travels over the process group itself, whose processes are trusted; it never
passes a store. The server listens on one address: on the loopback interface where all processes
are on one machine; otherwise on that of the interface that the group's connections use.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but hidden

from linop.backends.torchrun.signed_store import KEY
from linop.errors import BackendError

_ADDRESS = 256
"""Bytes of an address and a port as text, padded with spaces."""
_DIGEST = 16
_SIOCGIFADDR = 0x8915
_BACKLOG = 2048


def open_store(group: dist.ProcessGroup, limit: float) -> tuple[TCPStore, bytes]:
    """A store of the processes of a group over gloo, whose server is in the first one, and the key
    of its messages. Collective.

    Args:
        limit: longest wait, in seconds.

    Raises:
        BackendError: the server can listen nowhere.
    """
    first = dist.get_rank(group) == 0
    key = _from_first(group, secrets.token_bytes(KEY) if first else bytes(KEY))
    machines = _of_all(group, _machine())
    timeout = timedelta(seconds=limit)
    if not first:
        host, _, port = _from_first(group, bytes(_ADDRESS)).decode().strip().rpartition(" ")
        if not host:
            raise BackendError(_NOWHERE)
        return TCPStore(host, int(port), timeout=timeout, wait_for_workers=False), key
    listening = _listening(_loopback if len({*machines}) == 1 else _addresses)
    if listening is None:
        _from_first(group, bytes(_ADDRESS).replace(b"\0", b" "))
        raise BackendError(_NOWHERE)
    host, port = listening.getsockname()[:2]
    store = TCPStore(
        host,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    _from_first(group, f"{host} {port}".encode().ljust(_ADDRESS))
    return store, key


_NOWHERE = (
    "the control channel of backend 'torch' finds no address of worker 0's machine to listen on; "
    "set GLOO_SOCKET_IFNAME to the name of the interface between the machines, or MASTER_ADDR to "
    "an address of worker 0's"
)


def _from_first(group: Any, data: bytes) -> bytes:
    """The first process's bytes, of the same number on all. Collective."""
    said = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(said, group=group, group_src=0)
    return bytes(said.numpy().tobytes())


def _of_all(group: Any, data: bytes) -> list[bytes]:
    """All processes' bytes, of the same number on all. Collective."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    said = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(said, mine, group)
    return [bytes(one.numpy().tobytes()) for one in said]


def _machine() -> bytes:
    """Digest that processes share if they have one loopback interface."""
    words = [socket.gethostname()]
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        words = [boot, os.readlink("/proc/self/ns/net")]
    return hashlib.sha256("\n".join(words).encode()).digest()[:_DIGEST]


def _listening(addresses: Callable[[], Iterator[str]]) -> socket.socket | None:
    """A socket that listens on the first of some addresses that are this machine's."""
    for address in addresses():
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.socket(family, socket.SOCK_STREAM)
        try:
            server.bind((address, 0))
            server.listen(_BACKLOG)
        except OSError:
            server.close()
            continue
        return server
    return None


def _loopback() -> Iterator[str]:
    yield "127.0.0.1"
    yield "::1"


def _addresses() -> Iterator[str]:
    """Addresses of this machine by which others may reach it, the likeliest first; never that of
    all interfaces, nor the loopback one's."""
    found = (one for each in (_of_gloo, _of_master, _of_host) for one in each())
    return (one for one in found if one and not one.startswith(("127.", "::1", "0.0.0.0")))


def _of_gloo() -> Iterator[str]:
    """That of the interface that the user has chosen for gloo."""
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name:
            with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
                wanted = struct.pack("256s", name.encode()[:15])
                yield socket.inet_ntoa(fcntl.ioctl(one.fileno(), _SIOCGIFADDR, wanted)[20:24])


def _of_master() -> Iterator[str]:
    """That of the first process of the job, if it is here; else the one that reaches it."""
    master = os.environ.get("MASTER_ADDR")
    if not master:
        return
    with suppress(OSError):
        for family, kind, _, _, where in socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM):
            yield str(where[0])
            with suppress(OSError), socket.socket(family, kind) as one:
                one.connect(where)  # sends nothing
                yield str(one.getsockname()[0])


def _of_host() -> Iterator[str]:
    """Addresses of this machine's name, as gloo takes."""
    with suppress(OSError):
        for *_, where in socket.getaddrinfo(socket.gethostname(), 1, type=socket.SOCK_STREAM):
            yield str(where[0])
