"""Two workers' control channels over one store, while somebody else uses it: a message is received
as it was sent, or all uses of the channel are errors, on both."""

from __future__ import annotations

import importlib.util
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch.distributed as dist

from linop.backends.torchrun.signed_store import KEY, TamperedError
from linop.backends.torchrun.store_channel import Alarm, StoreChannel
from linop.errors import BackendError

SOON = 240.0
"""Seconds in which something has to be seen, at most. The server stands still while it looks up the
name of a new connection: 5 s at a time, where a server of names does not answer."""
LIMIT = timedelta(seconds=SOON)
"""Longest time of one use of the store; then it is said to be lost."""

pytestmark = pytest.mark.timeout(4 * SOON)


@cache
def connections() -> list[Any]:
    """The server of a store, and two connections to it."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, False)
    more = [dist.TCPStore("127.0.0.1", server.port, None, False, LIMIT, False) for _ in range(2)]
    return [server, *more]


class Two:
    """Two channels, and a connection of somebody else's."""

    def __init__(self, keys: tuple[bytes, bytes]) -> None:
        *stores, self.other = connections()
        for name in self.other.list_keys():  # of the example before
            self.other.delete_key(name)
        self.interrupted: list[list[Alarm]] = [[], []]
        self.channels = [
            StoreChannel(store, key, w, 2, self.interrupted[w].append)
            for w, (store, key) in enumerate(zip(stores, keys, strict=True))
        ]


@contextmanager
def two(same: bool = True) -> Iterator[Two]:
    key = secrets.token_bytes(KEY)
    pair = Two((key, key if same else secrets.token_bytes(KEY)))
    try:
        yield pair
    finally:
        for w in (1, 0):
            try:
                pair.channels[w].end(True)
            except BackendError:
                pass
        for channel in pair.channels:
            channel.stay(True, SOON)


def until(found: Callable[[], Any]) -> Any:
    end = time.monotonic() + SOON
    while (one := found()) is None and time.monotonic() < end:
        time.sleep(1e-3)
    return one


def both_are_told(pair: Two) -> bool | None:
    """True once every use of either channel is an error; None before."""
    told = 0
    for channel in pair.channels:
        try:
            channel._audited = 0.0
            channel.audit()
            channel.missing()
        except TamperedError:
            told += 1
    return told == 2 or None


ITEMS = st.recursive(
    st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3), max_leaves=5
)
KINDS = st.sampled_from(["say", "note", "meet", "tell"])


def sent(pair: Two, kind: str, item: Any) -> Callable[[], Any]:
    """Send an item from worker 0 to worker 1; returns a function that looks for it there."""
    here, there = pair.channels
    if kind == "say":
        here.say(1, item)
        return lambda: (there.heard(0) or (None,))[0]
    if kind == "note":
        here.note(1, item)
        return lambda: (there.noted([0]) or (0, None))[1]
    if kind == "tell":
        here.tell(Alarm(BackendError(repr(item)), 0, 7))
        return lambda: str(there.alarms.popleft().error) if there.alarms else None
    here.meet(item)
    everyones = there.meet(None)
    return lambda: (everyones() or [None])[0]


@given(st.lists(st.tuples(KINDS, ITEMS), min_size=1, max_size=6))
def test_messages_arrive_in_order(said: list[tuple[str, Any]]) -> None:
    with two() as pair:
        for kind, item in said:
            found = until(sent(pair, kind, item))
            tampered = [channel.tampered for channel in pair.channels]
            assert found == (repr(item) if kind == "tell" else item), (kind, tampered)
            for channel in pair.channels:
                channel._audited = 0.0
                channel.audit()


@given(KINDS, ITEMS, st.integers(2, 4))
def test_as_many_equal_messages_arrive_as_were_sent(kind: str, item: Any, times: int) -> None:
    with two() as pair:
        looks = []
        for _ in range(times if kind != "meet" else 1):
            pair.channels[0]._next = 1  # as if it had not read what it has told
            looks.append(sent(pair, kind, item))
        for look in looks:
            assert until(look) == (repr(item) if kind == "tell" else item)


@given(
    st.sampled_from(["forge", "short", "flip", "swap", "delete", "again"]),
    KINDS,
    ITEMS,
    ITEMS,
    st.data(),
)
def test_what_somebody_else_does_is_an_error_on_both(
    attack: str, kind: str, first: Any, second: Any, data: st.DataObject
) -> None:
    with two() as pair:
        other = pair.other
        if attack == "again" and kind not in ("say", "note"):
            kind = "say"
        looks = [sent(pair, kind, first)]
        if kind == "meet":
            assert until(looks[0]) == first
        looks.append(sent(pair, kind, second))
        time.sleep(0.01)
        names = [n for n in other.list_keys() if not n.startswith(("received", "init"))]
        name = max(n for n in names if "/1" in n or "/2" in n)
        value = other.compare_set(name, "?", "?")
        if attack == "forge":
            other.set(name, data.draw(st.binary(max_size=80)))
        elif attack == "short":
            other.set(name, data.draw(st.sampled_from([b"", b"?"])))
        elif attack == "flip":
            at = data.draw(st.integers(0, len(value) - 1))
            other.set(name, value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :])
        elif attack == "swap":
            # A right message, under another name.
            other.set(
                name, other.compare_set(min(names), "?", "?") if len(names) > 1 else b"x" * 40
            )
        elif attack == "delete":
            other.delete_key(name)
        else:
            assert [until(look) for look in looks] == [first, second]
            other.set(name, value)
        if attack in ("forge", "short", "flip", "swap") and kind == "tell":
            # Both have read the log by now; what they would read next is forged.
            other.set(f"log/{pair.channels[0]._next}", value)
        for look in looks:
            try:
                found = look()
            except TamperedError:
                break
            assert found in (None, first, second, repr(first), repr(second))
        assert until(lambda: both_are_told(pair)), (attack, kind, name)
        for channel in pair.channels:
            with pytest.raises(TamperedError, match="was tampered with"):
                channel.say(1 - channel.worker, None)
        assert all(pair.interrupted)


def test_a_worker_with_another_key_is_nobody() -> None:
    with two(same=False) as pair:
        pair.channels[0].say(1, "x")
        with pytest.raises(TamperedError):
            pair.channels[1].heard(0)
