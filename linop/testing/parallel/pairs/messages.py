"""Messages between ranks outside of every function with a backward of its own, as stages of
pipelines send them: an activation goes forward, and its gradient comes back. Each is a pair, of a
move and the move that came back, found by what was sent."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from linop.testing.parallel.pairs.in_place import Outside
from linop.testing.parallel.recording.records import Call, Collective, Lifted, Moved, Tensor
from linop.testing.parallel.twins.locations import Locations

Ends = tuple[Collective, Collective]
"""A message where it is sent, and where it is received."""


def messages(locations: Locations) -> Iterator[Outside]:
    """Messages of activations whose gradients came back in messages."""
    every = _messages(locations)
    if not every:
        return
    least = locations.values.least
    known = {rank: _by_value(record.tensors) for rank, record in locations.ranks.items()}
    for (source, target), ends in every.items():
        left = every.get((target, source), [])[:]
        for sent, got in ends:
            value = _key(sent.value)
            given = known[source].get(value, [])
            made = [one for one in known[target].get(value, []) if _arrived(one)]
            if not given or not made:
                continue
            gradient = made[0].gradient
            assert gradient is not None
            for back in left:
                came = back[0].value
                if came is not None and came.size == gradient.size:
                    if (np.abs(came - gradient.ravel()) <= least).all():
                        left.remove(back)
                        yield _pair(source, target, (sent, got), back, given[-1], made[0])
                        break


def _messages(locations: Locations) -> dict[tuple[int, int], list[Ends]]:
    """By source and target: the k-th of a tag that is sent is the k-th that is received."""
    ends: dict[tuple[int, int, int], dict[str, list[Collective]]] = {}
    for record in locations.ranks.values():
        for one in record.collectives:
            if one.inside >= 0 or one.backward_of >= 0 or one.name not in ("send", "receive"):
                continue
            way = (record.rank, one.peer) if one.name == "send" else (one.peer, record.rank)
            both = ends.setdefault((*way, one.tag), {"send": [], "receive": []})
            both[one.name].append(one)
    found: dict[tuple[int, int], list[Ends]] = defaultdict(list)
    for (source, target, _), both in ends.items():
        if len(both["send"]) == len(both["receive"]):
            found[source, target] += zip(both["send"], both["receive"], strict=True)
    return found


def _by_value(tensors: Sequence[Tensor]) -> dict[bytes, list[Tensor]]:
    """The tensors of a rank that can have gradients, by their values."""
    found: dict[bytes, list[Tensor]] = defaultdict(list)
    for one in tensors:
        if one.differentiable and (key := _key(one.value)):
            found[key].append(one)
    return found


def _key(value: np.ndarray | None) -> bytes:
    """A digest of numbers, equal for equal ones; empty if there are none but zeros."""
    if value is None or value.dtype.kind not in "fc" or not value.any():
        return b""
    wide = np.complex128 if value.dtype.kind == "c" else np.float64
    return hashlib.blake2b((value.ravel().astype(wide) + 0.0).tobytes(), digest_size=16).digest()


def _arrived(tensor: Tensor) -> bool:
    return tensor.gradient is not None and bool(tensor.gradient.any())


def _pair(
    source: int, target: int, there: Ends, back: Ends, given: Tensor, made: Tensor
) -> Outside:
    """A message, and that which came back, as a function would be."""
    (sent, got), (returned, came) = there, back
    n = 0 if sent.value is None else sent.value.size
    old, new = np.arange(1, n + 1), np.arange(n + 1, 2 * n + 1)
    return Outside(
        {
            source: Call(-1, "send", "", "", sent.line, sent.text, [given.number], []),
            target: Call(-1, "recv", "", "", got.line, got.text, [], [made.number]),
        },
        {
            source: Lifted(-1, False, [old], [], [Moved(sent.number, [old], [])]),
            target: Lifted(-1, False, [], [new], [Moved(got.number, [], [new])]),
        },
        {
            source: Lifted(-1, True, [], [new], [Moved(came.number, [], [new])]),
            target: Lifted(-1, True, [old], [], [Moved(returned.number, [old], [])]),
        },
    )
