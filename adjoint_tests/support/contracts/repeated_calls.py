"""Results of every call of a plan, in each mode, several times over: `test_repeated_calls` on
threads and ranks. Each is ``contract(backend, *arguments)``, and a `PersistentJob`'s check where a
communicator comes first.

A plan that is wrong from its second call on, or that overwrites a result which it gave before, is
found nowhere else. This module must not import MPI when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

import linop
from linop import COPIES, LinearOperator, Partition, Region, TensorSpace
from linop.backends import Backend, BoundPlan
from linop.backends.engine.arrays.interface import Arrays
from linop.backends.engine.worker import Worker
from linop.errors import LinopError
from linop.testing.describing import Description
from support.contracts.plans import LARGE, OPERATORS, argument, arrays_of, each, result, same, size
from support.operators.catalogue import FACTORIES, built
from support.operators.properties import rounding, same_arrays

if TYPE_CHECKING:
    pass

ROUNDS = 3
"""Calls in each mode: the first is checked, the second may be quick, the third finds what that
left."""

DIFFERENT = 7
"""Arguments of a plan: a number that shares no factor with those of modes, layouts and buffers."""

# Where arrays lie


def _fortran(array: np.ndarray) -> np.ndarray:
    return np.array(array, order="F")


def _strided(array: np.ndarray) -> np.ndarray:
    wide = np.full((*array.shape, 2), 77, array.dtype)
    wide[..., 0] = array
    return wide[..., 0]


def _reversed(array: np.ndarray) -> np.ndarray:
    back = (*(slice(None, None, -1),) * array.ndim, ...)
    return np.ascontiguousarray(array[back]).reshape(array.shape)[back]


def _unaligned(array: np.ndarray) -> np.ndarray:
    memory = np.zeros(array.nbytes + 1, np.uint8)
    moved = np.ndarray(array.shape, array.dtype, memory.data, 1)
    moved[...] = array
    return moved


def _read_only(array: np.ndarray) -> np.ndarray:
    fixed = array.copy()
    fixed.flags.writeable = False
    return fixed


WRITEABLE = (np.copy, _fortran, _strided, _reversed, _unaligned)
LAYOUTS = (*WRITEABLE, _read_only)
"""Copies of an array that lie in memory otherwise."""

# How a plan is called


def _new(plan: BoundPlan, x: Any, out: Any) -> Any:
    del out
    return plan(x)


def _out(plan: BoundPlan, x: Any, out: Any) -> Any:
    return plan(x, out=out)


def _in_place(plan: BoundPlan, x: Any, out: Any) -> Any:
    del out
    return plan(x, out=x)


def _started(plan: BoundPlan, x: Any, out: Any) -> Any:
    del out
    plan.start(x)
    return plan.finish()


def _started_out(plan: BoundPlan, x: Any, out: Any) -> Any:
    plan.start(x, out=out)
    return plan.finish()


def _started_in_place(plan: BoundPlan, x: Any, out: Any) -> Any:
    del out
    plan.start(x, out=x)
    return plan.finish()


MODES = (_new, _out, _in_place, _started, _started_out, _started_in_place)
CHANGING = (_in_place, _started_in_place)

# Contracts


def every_mode_again(
    backend: Backend, op: LinearOperator, seed: int, tolerance: float = 0.0
) -> None:
    """Forward and back, in each mode and several times, whatever the layouts: results are those of
    the interpretation, and the kept ones still are in the end; arguments are as they were."""
    plan, tried = op.compile(backend), op.compile(backend)
    given: list[tuple[str, Any, Any]] = []
    unchanged: list[tuple[Any, Any]] = []
    number = 0
    for one, trial in ((plan, tried), (plan.H, tried.H)):
        shown, in_place = str(one), _works_in_place(trial, seed)
        right = cache(partial(result, one))
        for mode in MODES:
            if mode in CHANGING and not in_place:
                continue
            for _ in range(ROUNDS):
                number += 1
                layouts = WRITEABLE if mode in CHANGING else LAYOUTS
                lie, lie_out = layouts[number % len(layouts)], WRITEABLE[number * 3 % 5]
                which = seed + number % DIFFERENT
                plain = argument(one, which)
                x, wanted = each(plain, lie), right(which)
                out = each(wanted, lambda a, lie=lie_out: lie(np.ones_like(a)))
                y = mode(one, x, out)
                said = f"{mode.__name__}, {lie.__name__}, {lie_out.__name__}: {shown}"
                _same(y, wanted, said, tolerance)
                given.append((said, y, wanted))
                if mode not in CHANGING:
                    unchanged.append((x, plain))
    for said, y, wanted in given:
        _same(y, wanted, f"kept: {said}", tolerance)
    for x, plain in unchanged:
        _same(x, plain, "the argument")
    _results_are_apart([y for _, y, _ in given], [x for x, _ in unchanged])


def _works_in_place(plan: BoundPlan, seed: int) -> bool:
    """True if all workers take ``out=x``, which breaks a plan that does not; who is not one of the
    operator's decides alone, and the reference takes it never."""
    x, worker = argument(plan, seed), plan.backend
    if worker.name == "reference":
        return False
    yes = True
    try:
        plan(x, out=x)
    except LinopError:
        _same(x, argument(plan, seed), "what was refused")
        yes = False
    assert isinstance(worker, Worker)
    return all(worker.transport.gather_all(yes))


def _same(given: Any, wanted: Any, what: str, tolerance: float = 0.0) -> None:
    assert type(given) is type(wanted), (what, type(given), type(wanted))
    for one, other in zip(arrays_of(given), arrays_of(wanted), strict=True):
        try:
            same_arrays(one, other, tolerance)
        except AssertionError as error:
            raise AssertionError(what, *error.args) from None


def _results_are_apart(results: list[Any], arguments: list[Any]) -> None:
    """No two results, and no result and argument, share memory; a result can be written to."""
    arrays = [array for y in results for array in arrays_of(y)]
    others = [array for x in arguments for array in arrays_of(x)]
    for k, array in enumerate(arrays):
        assert array.flags.writeable
        array[...] = k % 100
    for k, array in enumerate(arrays):
        assert (array == np.array(k % 100).astype(array.dtype)).all()
        assert not any(np.may_share_memory(array, x) for x in others)


def of_the_catalogue(backend: Backend, name: str, description: Description, seed: int) -> None:
    """An operator of the catalogue."""
    op = built(name, description)
    tolerance = 0.0 if FACTORIES[name].exact else rounding(op)
    every_mode_again(backend, op, seed, tolerance)


def of_several_workers(backend: Backend, what: str, seed: int) -> None:
    """An operator of `support.contracts.plans`."""
    every_mode_again(backend, OPERATORS[what](size(backend)), seed)


def a_halo_in_place(backend: Backend) -> None:
    """An exchange into blocks that hold their halos already: most of a block stays."""
    X = TensorSpace((4 * size(backend),), Partition((size(backend),)))
    every_mode_again(backend, linop.halo_exchange(X, 3, in_place=True), 1)


@contextmanager
def all_large(yes: bool) -> Iterator[None]:
    """Inside, plans treat results of any size as large ones."""
    names = [(Arrays, "small")]
    try:
        from linop.backends.mpi.shared_memory import windows
    except ImportError:
        pass
    else:
        names += [(windows, name) for name in ("_LEAST", "_RUN")]
    before = [getattr(module, name) for module, name in names]
    for module, name in names if yes else ():
        setattr(module, name, 0)
    try:
        yield
    finally:
        for (module, name), value in zip(names, before, strict=True):
            setattr(module, name, value)


def as_if_large(
    backend: Backend, large: bool, contract: Callable[..., None], *arguments: Any
) -> None:
    """A contract; if `large`, on ranks that treat results of any size as large ones."""
    with all_large(large):
        contract(backend, *arguments)


# Local functions


class Workspace:
    """Functions of arrays of one shape that return something else than new memory of their own."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.buffer = np.zeros(shape)
        self.scratch = np.zeros((shape[0] + 2, *shape[1:]))

    def new(self, x: np.ndarray) -> np.ndarray:
        return 2 * x

    def itself(self, x: np.ndarray) -> np.ndarray:
        return x

    def view_of_the_argument(self, x: np.ndarray) -> np.ndarray:
        return x[::-1]

    def reused_buffer(self, x: np.ndarray) -> np.ndarray:
        return np.multiply(x, 2, out=self.buffer)

    def view_of_a_workspace(self, x: np.ndarray) -> np.ndarray:
        self.scratch[: len(x)] = 2 * x
        return self.scratch[: len(x)]

    def fortran(self, x: np.ndarray) -> np.ndarray:
        return np.asfortranarray(2 * x)

    def sequence(self, x: np.ndarray) -> Any:
        return (2 * x).tolist()


FUNCTIONS = tuple(name for name in vars(Workspace) if not name.startswith("_"))
"""All of them are self-adjoint, and linear."""


def local_maps(workers: int, name: str, length: int, where: str) -> LinearOperator:
    """A function on every worker; before a movement, after one, between two, twice, or alone."""
    X = TensorSpace((length * workers, 2), Partition((workers,)))
    moved = linop.shift(X, 1)
    done: list[LinearOperator] = []
    for region in X.regions:
        f = getattr(Workspace(region.shape), name)
        target = Region(region.name, region.shape, region.workers)
        done.append(linop.local(region, target, f, f))
    L = linop.direct_sum(*done)
    return {
        "alone": L,
        "before": moved @ L,
        "after": L @ moved,
        "between": moved @ L @ moved.H,
        "twice": L @ L,
        "around": L @ moved @ L,
    }[where]


WHERE = ("alone", "before", "after", "between", "twice", "around")


def local_functions(backend: Backend, name: str, where: str, length: int) -> None:
    """Whatever memory a user's function returns, results are the plan's own."""
    every_mode_again(backend, local_maps(size(backend), name, length, where), 1)


def one_buffer_for_all(backend: Backend, length: int) -> None:
    """Two maps of a worker that share a workspace, one after the other and in one layer."""
    regions = [Region(f"{n}{w}", length, w) for w in range(size(backend)) for n in "ab"]
    spaces = {w: Workspace((length,)) for w in range(size(backend))}
    maps = [
        linop.local(r, r, spaces[r.workers[0]].reused_buffer, spaces[r.workers[0]].reused_buffer)
        for r in regions
    ]
    every_mode_again(backend, linop.direct_sum(*maps), 2)


def arguments_are_read_only(backend: Backend, length: int) -> None:
    """A function that writes to its argument is told so, wherever that comes from."""

    def wrong(x: np.ndarray) -> np.ndarray:
        x *= 2
        return x

    X = TensorSpace((length * size(backend),), Partition((size(backend),)))
    L = linop.direct_sum(*(linop.local(r, r, wrong, wrong) for r in X.regions))
    for op in (L, L @ linop.shift(X, 1), linop.shift(X, 1) @ L):
        given = argument(op.compile(backend), 1)
        before = each(given, np.copy)
        try:
            op.compile(backend)(given)
        except (ValueError, LinopError) as error:
            assert "read-only" in str(error), error
        else:
            raise AssertionError("an error expected")
        _same(given, before, "the argument")


LENGTHS = (3, LARGE)

# Buffers of requests


def buffers_live_as_long_as_requests(backend: Backend, calls: int) -> None:
    """Memory that a sum is begun with is not freed, nor used again, before all have read it."""
    n, shape = size(backend), (40, 40)
    X = TensorSpace(shape, Partition((n,)), np.int64, axes=(COPIES,))
    plan = linop.all_reduce(X).compile(backend)
    for k in range(calls):
        x = np.asfortranarray(argument(plan, k))
        plan.start(x)
        requests = plan._program.messages._single.requests  # type: ignore[attr-defined]
        begun = [r for r in requests.leaving.requests if r is not None]
        held = [b for r in begun for b in r.buffers if isinstance(b, np.ndarray)]
        assert any(b.size == x.size and (b.reshape(shape) == x).all() for b in held)
        del begun, held
        junk = [np.full(shape, -1) for _ in range(20)]
        same(plan.finish(), result(plan, k), k)
        del junk
        assert not any(requests.leaving.requests)
