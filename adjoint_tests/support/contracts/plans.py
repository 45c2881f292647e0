"""Contracts of a bound plan, as SPMD programs: `test_plans` runs each on threads, `test_mpi_plans`
on ranks. Each is ``contract(backend, *arguments)``, for two workers or more.

A worker that fails says so with an AssertionError; others may then wait for it, which threads see
at once, and `linop.testing.workers.jobs` after a grace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import linop
from linop import COPIES, LinearOperator, Partition, Region, Space, TensorSpace
from linop.backends import Backend, BoundPlan
from linop.backends.engine.arrays.arguments import held_arrays
from linop.backends.engine.driving import DrivingPlan
from linop.backends.engine.parts_plan import PartsPlan
from linop.errors import (
    ArgumentError,
    DTypeError,
    LinopError,
    RegionError,
    ShapeError,
)
from linop.spaces.vector import Vector
from support.once import once

SMALL, LARGE = 5, 6000
"""Numbers on each worker. Results of more than 32 KiB are never copied out of the plan's memory."""

# Operators


def total(workers: int, size: int = SMALL, dtype: Any = np.float64) -> LinearOperator:
    """Copies on all workers become their sum: every worker waits for every other."""
    return linop.all_reduce(TensorSpace((size,), Partition((workers,)), dtype, axes=(COPIES,)))


def spread(workers: int, size: int = SMALL) -> LinearOperator:
    """The last worker gives copies to all; the others pass None."""
    return linop.broadcast(
        TensorSpace((size,), Partition((1,), [workers - 1])), Partition((workers,))
    )


def shifted(workers: int, size: int = SMALL) -> LinearOperator:
    """Every worker's block goes to the next one."""
    return linop.shift(TensorSpace((size * workers,), Partition((workers,))), 1)


def stencil(workers: int, columns: int = 3) -> LinearOperator:
    """Exchanges with neighbours, there and back, in two stages."""
    X = TensorSpace((8 * workers, columns), Partition((workers,)))
    H = linop.halo_exchange(X, (3, 1), padding=(1, 0))
    return H.H @ H


def tall(workers: int) -> LinearOperator:
    """Blocks beside each other, of many short rows, exchange columns."""
    X = TensorSpace((300, 4 * workers), Partition((1, workers)))
    H = linop.halo_exchange(X, (1, 5), padding=(0, 2))
    return H.H @ H


def collected(workers: int, size: int = SMALL) -> LinearOperator:
    """A replicated region becomes the sum of one region of each worker."""
    parts = [Region(f"x{w}", size, w) for w in range(workers)]
    everywhere = Region("r", size, range(workers))
    op = linop.allocate(Space(parts), everywhere)
    for part in parts:
        op = linop.add(op.codomain, part, everywhere) @ op
        op = linop.deallocate(op.codomain, part) @ op
    return op


def several(workers: int, size: int = SMALL) -> LinearOperator:
    """Two regions on every worker but the first; one stays where it is."""
    space = Space([Region(f"{n}{w}", size, w) for w in range(workers) for n in "ab"[: 1 + (w > 0)]])
    a = [space[f"a{w}"] for w in range(workers)]
    return linop.identity(space) + linop.add(space, a[0], a[-1]) + linop.add(space, a[-1], a[0])


def parts(workers: int, size: int = SMALL) -> LinearOperator:
    """The real parts of i times every worker's block, which goes to the next one."""
    X = TensorSpace((size * workers,), Partition((workers,)), complex)
    return linop.real(X) @ (1j * linop.identity(X)) @ linop.shift(X, 1)


OPERATORS: dict[str, Callable[[int], LinearOperator]] = {
    "total": total,
    "large total": lambda n: total(n, LARGE),
    "total in shares": lambda n: total(n, 20_000),
    "large spread": lambda n: spread(n, LARGE),
    "shifted": shifted,
    "large shifted": lambda n: shifted(n, LARGE),
    "stencil": stencil,
    "large stencil": lambda n: stencil(n, 700),
    "tall stencil": tall,
    "several": several,
    "large several": lambda n: several(n, LARGE),
    "parts": parts,
    "large parts": lambda n: parts(n, LARGE),
}
"""By name, of a number of workers."""

# Arguments and results, as plans take and give them


def mine(backend: Backend) -> int:
    assert backend.worker is not None
    return backend.worker


def size(backend: Backend) -> int:
    assert backend.workers is not None
    return backend.workers


def part(space: Space, arrays: Any, backend: Backend) -> Any:
    """A worker's part of a vector."""
    held = {r.name: arrays[r.name] for r in space.on(mine(backend))}
    return (held or None) if len(held) != 1 else next(iter(held.values()))


def leaves(plan: BoundPlan) -> list[BoundPlan]:
    """The plans with instructions that a plan calls: itself, unless it calls others."""
    if isinstance(plan, PartsPlan):
        return leaves(plan.plan)
    if isinstance(plan, DrivingPlan):
        return [leaf for part in plan.parts for leaf in leaves(part)]
    return [plan]


def argument(plan: BoundPlan, seed: int) -> Any:
    """Whole numbers for this worker."""
    drawn = _drawn(plan.domain, seed).arrays
    return part(plan.domain, {name: a.copy() for name, a in drawn.items()}, plan.backend)


def result(plan: BoundPlan, seed: int) -> Any:
    """The expected results for them."""
    arrays = part(plan.codomain, image(plan.op, seed).arrays, plan.backend)
    return each(arrays, np.copy)


@once(kept=16)
def image(op: LinearOperator, seed: int) -> Vector:
    """The expected result of whole numbers, of all workers."""
    return op(_drawn(op.domain, seed))


def _drawn(space: Space, seed: int) -> Vector:
    return _drawn_in_order(space, seed, space.regions)


@once(kept=64)
def _drawn_in_order(space: Space, seed: int, order: tuple[Region, ...]) -> Vector:
    """`_drawn`: spaces with the same regions in another order are equal, and draw other numbers."""
    assert order == space.regions
    drawn = space.integers(seed)
    for array in drawn.arrays.values():
        array.flags.writeable = False
    return drawn


def arrays_of(value: Any) -> list[np.ndarray]:
    """The arrays of an argument or a result."""
    if value is None:
        return []
    return list(value.values()) if isinstance(value, dict) else [value]


def each(value: Any, change: Callable[[np.ndarray], np.ndarray]) -> Any:
    """The same form with other arrays."""
    if value is None:
        return None
    if isinstance(value, dict):
        return {name: change(array) for name, array in value.items()}
    return change(value)


def same(given: Any, wanted: Any, what: Any = "") -> None:
    """Equal in form and in every element."""
    assert type(given) is type(wanted), (what, type(given), type(wanted))
    if isinstance(given, dict):
        assert list(given) == list(wanted), (what, list(given), list(wanted))
    for one, other in zip(arrays_of(given), arrays_of(wanted), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), what
        assert np.array_equal(one, other), (what, one, other)


def works(plan: BoundPlan, seed: int = 7) -> None:
    """It gives what it should, forward and back."""
    for one in (plan, plan.H):
        same(one(argument(one, seed)), result(one, seed), one)


def raised(kind: type[LinopError], call: Callable[[], Any]) -> str:
    """The text of the error that a call raises, of exactly this class."""
    try:
        given = call()
    except LinopError as error:
        assert type(error) is kind, repr(error)
        return str(error)
    raise AssertionError(f"{kind.__name__} expected, {given!r} given")


def complaint(space: Space, worker: int, x: Any) -> tuple[type[LinopError], str]:
    """Errors of an argument, as raised on the worker that passes it."""
    try:
        held_arrays(space, worker, x)
    except LinopError as error:
        return type(error), str(error)
    raise AssertionError(f"nothing is wrong with {x!r}")


# Results and arguments


def results_are_kept(backend: Backend, what: str) -> None:
    """Results are memory of their own, whoever holds how many of them; of some, views alone."""
    plan = OPERATORS[what](size(backend)).compile(backend)
    kept: list[tuple[BoundPlan, int, Any]] = []
    for seed in range(10):
        for one in (plan, plan.H):
            x = argument(one, seed)
            before = each(x, np.copy)
            y = one(x)
            same(x, before, "the argument")
            kept.append((one, seed, each(y, lambda a: a[1:]) if seed % 3 == 1 else y))
            del y
        if seed == 5:
            del kept[::2]  # their memory may come again
    wanted = [each(result(one, seed), lambda a, k=seed: a[k % 3 == 1 :]) for one, seed, _ in kept]
    plan.release()
    again = OPERATORS[what](size(backend)).compile(backend)
    works(again)  # where the first plan had its memory
    for (one, seed, y), right in zip(kept, wanted, strict=True):
        same(y, right, (one, seed))
    arrays = [a for *_, y in kept for a in arrays_of(y)]
    for k, array in enumerate(arrays):
        array[...] = k
    works(again)
    for k, array in enumerate(arrays):
        assert (array == k).all(), (k, array)


def _every_second(array: np.ndarray) -> np.ndarray:
    wide = np.full((*array.shape[:-1], 2 * array.shape[-1]), 77, array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


def _backwards(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array[::-1])[::-1]


def _column(array: np.ndarray) -> np.ndarray:
    block = np.full((*array.shape, 3), 77, array.dtype)
    block[..., 1] = array
    return block[..., 1]


LAYOUTS = (np.copy, np.asfortranarray, _every_second, _backwards, _column)
"""Copies of an array whose strides differ."""


def any_strides_will_do(backend: Backend, what: str) -> None:
    """Arguments and ``out`` may lie in memory as they like, and differently every time."""
    plan = OPERATORS[what](size(backend)).compile(backend)
    for one in (plan, plan.H):
        for seed, lie in enumerate([*LAYOUTS, *LAYOUTS]):
            lie_out = LAYOUTS[(seed * 3) % len(LAYOUTS)]
            x, right = each(argument(one, seed), lie), result(one, seed)
            for array in arrays_of(x):
                array.flags.writeable = seed % 2 > 0
            same(one(x), right, (one, lie))
            out = each(right, lambda a, lie=lie_out: lie(a - 1))
            _is(one(x, out=out), out)
            same(out, right, (one, lie, lie_out))
            for array in arrays_of(out):
                array -= 1
            one.start(x, out=out)
            _is(one.finish(), out)
            same(out, right, (one, lie, lie_out))
            same(x, argument(one, seed), "the argument")


def _is(given: Any, out: Any) -> None:
    """The arrays that were passed are given back."""
    assert type(given) is type(out)
    for one, other in zip(arrays_of(given), arrays_of(out), strict=True):
        assert one is other


def a_vector_with_out_gives_a_vector(backend: Backend) -> None:
    """Its arrays are those that were passed."""
    plan = total(size(backend)).compile(backend)
    out = np.zeros(SMALL)
    given = plan(backend.vector(plan.domain, plan.domain.integers(3).arrays), out=out)
    assert [array is out for array in given.arrays.values()] == [True]
    same(out, result(plan, 3))


def in_place_is_by_region(backend: Backend, length: int) -> None:
    """A kept region is copied unless its own memory is given; another's is refused."""
    space = Space([Region(f"{name}{w}", length, w) for w in range(2) for name in "ab"])
    op = linop.identity(space)
    for name in "ab":
        op = linop.copy(space, space[f"{name}0"][:2], space[f"{name}1"][:2]) @ op
    plan = op.compile(backend)
    names = [region.name for region in space.on(mine(backend))]
    for kept in (names[:1], names[1:], names, []):
        x, wanted = argument(plan, 4), result(plan, 4)
        out = {name: x[name] if name in kept else np.zeros(length) for name in names}
        same(plan(x, out=out), wanted, kept)
    x = argument(plan, 5)
    crossed = dict(zip(names, reversed(x.values()), strict=True))
    again = op.compile(backend)
    raised(ArgumentError, lambda: again(x, out=crossed))
    works(again)


def out_may_be_the_argument(backend: Backend, op: LinearOperator, seed: int) -> None:
    """With ``out=x`` the result is right, call after call, also where the operator does not work in
    place; unless the arrays fit their regions of the argument only."""
    plan = op.compile(backend)
    for k in range(4):
        x = argument(plan, seed + k)
        wanted = result(plan, seed + k)
        try:
            if k % 2:
                plan.start(x, out=x)
                given = plan.finish()
            else:
                given = plan(x, out=x)
        except (RegionError, ShapeError):
            assert k == 0 and op.domain != op.codomain
            return
        same(given, wanted, k)
        if x is not None:
            same(x, wanted, k)


def the_argument_as_out(backend: Backend, what: str) -> None:
    out_may_be_the_argument(backend, OPERATORS[what](size(backend)), 3)


def out_is_refused(backend: Backend, length: int) -> None:
    """Refused: `out` that does not fit, cannot be written, is no array, or is memory of the
    argument's."""
    plan = total(size(backend), length).compile(backend)
    fixed, fits = np.zeros(length), np.ones(length)
    fixed.flags.writeable = False
    overlapping = np.ones(length + 1)
    for x, out, kind, words in [
        (fits, fixed, ArgumentError, "the array is read-only"),
        (fits, np.zeros(length + 1), ShapeError, f"({length + 1},) given, ({length},) expected"),
        (fits, np.zeros(length, np.float32), DTypeError, "float32 given, float64 expected"),
        (fits, {"z": np.zeros(length)}, RegionError, "unknown region 'z'"),
        (fits, [0.0] * length, ArgumentError, "list"),
        (overlapping[1:], overlapping[:-1], ArgumentError, "shares memory with the argument"),
    ]:
        for one in (plan, plan.H):
            for call in (one, one.start):
                text = raised(kind, lambda call=call, x=x, out=out: call(x, out=out))
                assert words in text, text
    assert (fits == 1).all() and (fixed == 0).all()
    works(plan)


def a_later_call_refuses_the_argument_s_memory(backend: Backend, what: str) -> None:
    """A worker alone, whose later calls are quick: no other one waits for it then."""
    plan = OPERATORS[what](1).compile(backend)
    x = argument(plan, 1)
    given = np.concatenate([x, x[:1]])
    for _ in range(3):
        out = np.empty_like(x)
        same(plan(x, out=out), result(plan, 1))
    words = raised(ArgumentError, lambda: plan(given[:-1], out=given[1:]))
    assert "shares memory with the argument" in words
