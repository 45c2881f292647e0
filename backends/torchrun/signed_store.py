"""Control messages in a `torch.distributed.TCPStore`, which anybody who reaches its port can read,
write, list and delete.

So each message is written with a code that only workers can compute (HMAC-SHA256), of its name and
its data: a message that somebody else wrote, or copied to another name, is refused. The key never
passes the store. Names are used once. A worker remembers the messages that it has written, until
their receivers say that they have them: one that has vanished was deleted by somebody else.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from linop.backends.together.messages import decoded, encoded
from linop.errors import BackendError

LONGEST = 20 * 24 * 3600.0
"""Seconds of the longest wait that torch's sockets can be given."""
KEY = 32
"""Bytes of a key."""
_CODE = 32
_GONE = 16
"""Names of messages that were deleted here last, which must not come back."""


class TamperedError(BackendError):
    """Somebody who is no worker has written to the store, or deleted messages in it."""


class SignedStore:
    """A worker's messages in a store.

    Args:
        store: a connection, used by one thread at a time.
        key: the same `KEY` bytes on all workers, known to nobody else.
        lost: called when the server has ended.
    """

    def __init__(self, store: Any, key: bytes, lost: Callable[[], None]) -> None:
        self._store = store
        self._key = key
        self._lost = lost
        # The store's answer where there is no message, which nobody else can write there.
        self._nothing = secrets.token_hex(KEY)
        # A connection serves one thread at a time. The server may look up the name of each.
        self._uses = threading.Lock()
        self.log: Any = store.clone()
        self.log.set_timeout(timedelta(seconds=LONGEST))
        self._written: dict[str, str] = {}
        """Messages that are not received yet, each with the name of the receipt."""
        self._kept: dict[str, bytes] = {}
        """Messages that stay, and their bytes, if somebody else could have a right to the name."""
        self._gone: deque[str] = deque(maxlen=_GONE)

    # Codes

    def seal(self, name: str, item: object) -> bytes:
        data = encoded(item)
        return self._code(name, data) + data

    def opened(self, name: str, sealed: bytes) -> Any:
        """The item of a message.

        Raises:
            TamperedError: no worker has written it under this name.
        """
        code, data = sealed[:_CODE], sealed[_CODE:]
        if not hmac.compare_digest(code, self._code(name, data)):
            tampered(f"message {name!r} is none that a worker has written there")
        return decoded(data)

    def _code(self, name: str, data: bytes) -> bytes:
        head = name.encode()
        return hmac.digest(self._key, len(head).to_bytes(4, "little") + head + data, "sha256")

    # Messages

    def put(self, name: str, item: object, receipt: str = "") -> None:
        """Write a message.

        Args:
            receipt: name of the message by which its receiver says that it has it; without one it
                stays until it is deleted here.
        """
        sealed = self.seal(name, item)
        with self._used():
            if receipt:
                self._written[name] = receipt
            else:
                self._kept[name] = b""
            self._store.set(name, sealed)

    def look(self, name: str) -> tuple[Any] | None:
        """The item of a message, in a tuple; None if there is none."""
        with self._used():
            sealed = self._peek(name)
        return None if sealed is None else (self.opened(name, sealed),)

    def take(self, name: str, receipt: str, number: int) -> tuple[Any] | None:
        """The item of a message, in a tuple, which is deleted; None if there is none.

        Args:
            receipt: the message that says so to the sender, with the number of messages until now.
        """
        found = self.look(name)
        if found is not None:
            with self._used():
                self._store.set(receipt, self.seal(receipt, number))
                self._delete(name)
        return found

    def all_of(self, names: list[str]) -> list[Any] | None:
        """The items of several messages; None while one of them is not there."""
        with self._used():
            if not self._store.check(names):
                return None
            sealed = self._store.multi_get(names)
        return [self.opened(name, one) for name, one in zip(names, sealed, strict=True)]

    def has(self, name: str) -> bool:
        with self._used():
            there: bool = self._store.check([name])
        return there

    def delete(self, name: str) -> None:
        """Delete a message of this worker's that stayed."""
        with self._used():
            if self._kept.pop(name, None) is not None:
                self._delete(name)

    def append(self, series: str, number: int, item: object) -> None:
        """Write a message under the first number from the given one on that is free in a series,
        whose messages stay. `following` reads it."""
        # The answer is what stands there, and equal items would be taken for one another.
        marked = (secrets.token_hex(8), item)
        with self._used():
            while True:
                name = f"{series}/{number}"
                sealed = self.seal(name, marked)
                self._kept[name] = sealed
                # Written if there is none, in one step of the server's.
                if self._store.compare_set(name, "", sealed) == sealed:
                    return
                del self._kept[name]
                number += 1

    def following(self, series: str, number: int) -> Any:
        """Wait for the item of that number in a series; for one thread.

        Raises:
            TamperedError: no worker has written it.
            torch.distributed.DistError: the server has ended, or `LONGEST` is over.
        """
        name = f"{series}/{number}"
        _, item = self.opened(name, self.log.get(name))
        return item

    def _peek(self, name: str) -> bytes | None:
        # One round trip, and no wait for a message that somebody deletes just now.
        found: bytes = self._store.compare_set(name, self._nothing, self._nothing)
        return None if found == self._nothing.encode() else found

    def _delete(self, name: str) -> None:
        self._store.delete_key(name)
        self._gone.append(name)

    # What others do with them

    def audit(self) -> None:
        """Check that messages which this worker has written are there, or received, and that those
        which it has deleted are not.

        Raises:
            TamperedError: somebody else has deleted, replaced or repeated one.
        """
        with self._used():
            kept, written = dict(self._kept), dict(self._written)
            for name, sealed in kept.items():
                if not (self._peek(name) == sealed if sealed else self._store.check([name])):
                    tampered(f"message {name!r} was deleted, or replaced")
            if written and not self._store.check([*written]):
                self._check_received(written)
            for name in self._gone:
                if self._store.check([name]):
                    tampered(f"message {name!r}, which was received, was written again")

    def _check_received(self, written: dict[str, str]) -> None:
        there = {name: self._store.check([name]) for name in written}
        # Receivers write the receipt before they delete a message: those of deleted ones are here.
        receipts = {receipt: self._peek(receipt) for receipt in dict.fromkeys(written.values())}
        for name, receipt in written.items():
            sealed = receipts[receipt]
            until = 0 if sealed is None else self.opened(receipt, sealed)
            if int(name.rpartition("/")[2]) <= until:
                del self._written[name]
            elif not there[name]:
                tampered(f"message {name!r} was deleted before it was received")

    @contextmanager
    def _used(self) -> Iterator[None]:
        """Context of a use of the store, by one thread; its loss is an error of linop."""
        try:
            with self._uses:
                yield
        except dist.DistError as error:
            self._lost()
            text = str(error).partition("\n")[0]
            raise BackendError(
                f"worker 0, which keeps the control channel of backend 'torch', has ended ({text})"
            ) from None

    def forked(self, gone: Any) -> tuple[Any, Any]:
        """Replace the connections, which are the parent's; returns them."""
        mine = self._store, self.log
        self._uses = threading.Lock()
        self._store = self.log = gone
        return mine


def tampered(words: str) -> NoReturn:
    raise TamperedError(
        f"the control channel of backend 'torch' was tampered with: {words}. Somebody who is no "
        f"worker of this job reaches the port of its store (see the page on security); nothing "
        f"that was received since can be trusted"
    )
