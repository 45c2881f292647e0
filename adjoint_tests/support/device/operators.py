"""Operators on regions in main memory and on a device, and what plans on one take and give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import linop
from linop import LinearOperator, Region, Space
from linop.backends import Backend, BoundPlan
from linop.backends.device.device_arrays import DeviceArrays
from support.contracts.plans import LARGE, OPERATORS, SMALL, argument, arrays_of, each
from support.operators.properties import same_arrays

# Operators on regions in both memories


def offloaded(workers: int, size: int = SMALL) -> LinearOperator:
    """Everything goes to main memory; and back."""
    return linop.offload(linop.TensorSpace((size * workers, 2), linop.Partition((workers,))))


def beside(workers: int, size: int = SMALL) -> LinearOperator:
    """Each worker has a region in either memory; rows and columns of both are copied, added and
    added in multiples, there and here, on one worker and from the last one to the first."""
    space = Space([Region(f"{n}{w}", (size, 4), w, m) for w in range(workers) for n, m in KINDS])
    op = linop.identity(space)
    for v, w in [*zip(range(workers), range(workers), strict=True), (workers - 1, 0)]:
        for one, other in (("a", "h"), ("h", "a"), ("h", "h")):
            x, y = space[f"{one}{v}"], space[f"{other}{w}"]
            op = op + linop.add(space, x[:, :2], y[:, 2:]) - 2 * linop.add(space, x[:2], y[-2:])
    copied = [
        linop.copy(space, space[f"{n}0"][:, :1], space[f"{m}0"][:, 3:]) for n, m in ("ah", "ha")
    ]
    return copied[0] @ op @ copied[1] @ op


KINDS = (("a", "default"), ("h", "host"))


def computed(workers: int) -> LinearOperator:
    """Local maps in main memory, on the device, and from one to the other."""
    rng = np.random.default_rng(5)
    mine = []
    for w in range(workers):
        x, y, z = (
            Region(n, (3, 2), w, m)
            for n, m in ((f"x{w}", "host"), (f"y{w}", "host"), (f"z{w}", "device"))
        )
        A, B, C = (rng.integers(-2, 3, (6, 6)).astype(float) for _ in range(3))
        mine.append(
            linop.local_operators.matrix(C, z, z)
            @ linop.local_operators.matrix(B, y, z)
            @ linop.local_operators.matrix(A, x, y)
        )
    return linop.direct_sum(*mine)


def between(workers: int) -> LinearOperator:
    """A part of what was copied to the host returns to the device, after a local map of others that
    waits for nothing."""
    mine = []
    for w in range(workers):
        a, h, z = (Region(f"{n}{w}", (SMALL, 4), w, m) for n, m in (*KINDS, ("z", "default")))
        space = Space([a, h, z])
        there, back = linop.copy(space, a, h), linop.add(space, h[:, :2], a[:, 2:])
        beside = linop.direct_sum(
            linop.identity(Space([a, h])),
            linop.local_operators.diagonal(np.full((SMALL, 4), 3.0), z),
        )
        mine.append(back @ beside @ there)
    return linop.direct_sum(*mine)


def apart(workers: int, rows: int) -> LinearOperator:
    """Messages between regions in main memory."""
    X = linop.TensorSpace((rows * workers, 3), linop.Partition((workers,)), memory="host")
    H = linop.halo_exchange(X, (3, 1), padding=(1, 0))
    return linop.offload(X, "device") @ H.H @ H


def columns(workers: int, memory: str = "default") -> LinearOperator:
    """Halos of columns: boxes that are small, and not contiguous, in two messages or one."""
    X = linop.TensorSpace((6, 4 * workers), linop.Partition((1, workers)), memory=memory)
    return linop.halo_exchange(X, (1, 3), padding=(0, 1))


def meeting(workers: int) -> LinearOperator:
    """Boxes of one region are added to boxes of another that have an element in common."""
    space = Space([Region(f"{n}{w}", 4, w) for w in range(workers) for n in "ab"])
    op = linop.identity(space)
    for w in range(workers):
        a, b = space[f"a{w}"], space[f"b{w}"]
        op = op + linop.add(space, a[:3], b[:3]) - linop.identity(space)
        op = op + linop.add(space, a[:3], b[1:]) - linop.identity(space)
    return op


def turned(workers: int, side: int = 200) -> LinearOperator:
    """Rows to columns: boxes that are large, and not contiguous
    (`linop.backends.device.fused_copies`)."""
    X = linop.TensorSpace((side * workers, side * workers), linop.Partition((workers, 1)))
    return linop.repartition(X, linop.Partition((1, workers)))


def packed(workers: int) -> LinearOperator:
    """Columns out of long rows: boxes of long runs, in items of 16 bytes, and of 8."""
    mine = []
    for w in range(workers):
        x = Region(f"x{w}", (90, 800), w)
        space, parts = Space(x), []
        for k, begin in enumerate((2, 401)):
            y = Region(f"y{w}.{k}", (90, 398), w)
            space, part = (
                Space([*space.regions, y]),
                linop.copy(space, x[:, begin : begin + 398], y),
            )
            parts.append(part)
        mine.append(linop.deallocate(space, x) @ parts[1] @ parts[0])
    return linop.direct_sum(*mine)


def computed_and_sent(workers: int) -> LinearOperator:
    """Results of the device in main memory are sent from there without another copy."""
    X = linop.TensorSpace((2 * workers, 3), linop.Partition((workers,)), memory="host")
    rng = np.random.default_rng(6)
    made = [
        linop.local_operators.matrix(
            rng.integers(-2, 3, (6, 6)).astype(float), Region(f"a{w}", (2, 3), w), x
        )
        for w, x in enumerate(X)
    ]
    others = [(w + 1) % workers for w in range(workers)]
    return linop.repartition(X, linop.Partition((workers,), others)) @ linop.direct_sum(*made)


PLACED: dict[str, Callable[[int], LinearOperator]] = {
    "offloaded": offloaded,
    "large offloaded": lambda n: offloaded(n, LARGE),
    "beside": beside,
    "computed": computed,
    "between": between,
    "stencil apart": lambda n: apart(n, 8),
    "computed and sent": computed_and_sent,
    "columns": columns,
    "meeting": meeting,
    "turned": turned,
    "packed": packed,
}
"""By name, of a number of workers."""
MADE = {**OPERATORS, **PLACED}

# Arguments and results


def host(arrays: DeviceArrays, value: Any) -> Any:
    """A plan's result, in main memory."""
    return each(value, arrays.fetched)


def lies_where_it_says(arrays: DeviceArrays, space: Space, value: Any, backend: Backend) -> None:
    """Each array that a plan gave is in the memory of its region."""
    for name, array in as_dict(space, value, backend).items():
        assert type(array) is arrays.of(space[name].memory).ndarray, (space[name], type(array))


def placed(arrays: DeviceArrays, space: Space, value: Any, backend: Backend) -> Any:
    """A worker's arrays, each in the memory of its region."""
    held = {
        name: array.copy() if space[name].memory == "host" else arrays.put(array)
        for name, array in as_dict(space, value, backend).items()
    }
    return held if isinstance(value, dict) else next(iter(held.values()), None)


def given(arrays: DeviceArrays, plan: BoundPlan, seed: int) -> Any:
    """A plan's argument, each array in the memory of its region."""
    return placed(arrays, plan.domain, argument(plan, seed), plan.backend)


def same(arrays: DeviceArrays, value: Any, wanted: Any, tolerance: float = 0.0) -> None:
    value = host(arrays, value)
    assert type(value) is type(wanted), (type(value), type(wanted))
    for one, other in zip(arrays_of(value), arrays_of(wanted), strict=True):
        same_arrays(one, other, tolerance)


def as_dict(space: Space, value: Any, backend: Backend) -> dict[str, Any]:
    assert backend.worker is not None
    regions = space.on(backend.worker)
    if value is None or isinstance(value, dict):
        return value or {}
    return {regions[0].name: value}
