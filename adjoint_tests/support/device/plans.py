"""Contracts of plans on a device, whatever their transport: on the simulated one in every run of
the suite, on a GPU where there is one.

Each contract takes a backend and the arrays of the device, on every worker. This module must not
import MPI when it is imported.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import linop
from linop import LinearOperator, Region, Space
from linop.backends import Backend
from linop.backends.device.device_arrays import DeviceArrays
from linop.backends.threads.backend import Threads
from linop.errors import ArgumentError, DTypeError, LinopError, ShapeError
from linop.normal_form.maps import LocalMap
from linop.testing.describing import Description
from support.contracts.plans import (
    LARGE,
    OPERATORS,
    SMALL,
    argument,
    arrays_of,
    each,
    image,
    part,
    raised,
    result,
    size,
    total,
)
from support.device.operators import (
    MADE,
    as_dict,
    given,
    lies_where_it_says,
    offloaded,
    placed,
    same,
)
from support.once import once
from support.operators import catalogue
from support.operators.catalogue import FACTORIES, built
from support.operators.properties import rounding, same_arrays

if TYPE_CHECKING:
    pass


NAMES = tuple(name for name in catalogue.NAMES if name != "pair_of_functions")
"""The operators of the catalogue but for one whose functions are written for NumPy's arrays."""
_KIND = {"collectives": "movements", "padding": "movements", "memory": "memory"}
"""Kinds of operators, by the last part of the name of their factories' module."""


def _kind(name: str) -> str:
    return _KIND.get(FACTORIES[name].build.__module__.rpartition(".")[2], "with maps")


KINDS = {kind: tuple(n for n in NAMES if _kind(n) == kind) for kind in map(_kind, NAMES)}
"""The same by kind: a device differs from main memory in what it does for a kind of operator, not
for an operator."""


def operator_agrees(
    backend: Backend, arrays: DeviceArrays, name: str, description: Description, seed: int
) -> None:
    """An operator of the catalogue, forward and back: whole numbers as the expression says, and
    movements of any numbers to the bit as on NumPy's arrays. Results are read at the end alone."""
    op = built(name, description)
    known = [call.map.port is not None or in_main_memory(call.map) for call in op.stages.calls]
    if not all(known) and op.dtype.char not in "gG":
        words = raised(ArgumentError, lambda: op.compile(backend))
        assert "computes with NumPy's arrays alone" in words, words
        return
    tolerance = 0.0 if FACTORIES[name].exact else rounding(op)
    try:
        plan = op.compile(backend)
    except DTypeError:
        # Long double is NumPy's alone; bfloat16 is missing in some versions of CuPy.
        assert op.dtype.kind == "V" or op.dtype.char in "gG", op.dtype
        return
    kept = []
    for number, one in enumerate((plan, plan.H)):
        for k in range(3):
            y = one(given(arrays, one, seed + k))
            lies_where_it_says(arrays, one.codomain, y, backend)
            kept.append((y, result(one, seed + k), tolerance))
        if op.stages.pure:
            x = part(one.domain, one.domain.random(seed), backend)
            y = part(one.codomain, _moved(op, seed)[number], backend)
            kept.append((one(placed(arrays, one.domain, x, backend)), y, 0.0))
    plan.start(given(arrays, plan, seed + 7))
    between = plan.H(given(arrays, plan.H, seed + 8))
    kept += [
        (plan.finish(), result(plan, seed + 7), tolerance),
        (between, result(plan.H, seed + 8), tolerance),
    ]
    for value, wanted, off in kept:
        same(arrays, value, wanted, off)
    mine = backend.vector(op.domain, as_dict(op.domain, given(arrays, plan, seed), backend))
    mapped, wanted = plan(mine), image(op, seed)
    assert mapped.inner(mapped) == wanted.inner(wanted) or tolerance


@once(kept=1)
def _moved(op: LinearOperator, seed: int) -> list[Any]:
    """Images of random vectors under an operator and its adjoint, as threads make them in main
    memory, whatever this program's arrays."""
    plan = Threads().compile(op)
    return [one(one.domain.random(seed)) for one in (plan, plan.H)]


def in_main_memory(local: LocalMap) -> bool:
    """True if a local map computes there, whatever the backend."""
    spaces = (local.domain, local.codomain)
    return {region.memory for space in spaces for region in space} == {"host"}


def results_are_kept(backend: Backend, arrays: DeviceArrays, what: str) -> None:
    """Results are memory of their own, read long after; arguments are left as they are, and may be
    written to as soon as the call is over, if that is queued too."""
    if what.endswith("several") and size(backend) == 1:
        return
    plan = MADE[what](size(backend)).compile(backend)
    kept = []
    for seed in range(6):
        for one in (plan, plan.H):
            x = given(arrays, one, seed)
            before = each(x, lambda a: a.copy())
            y = one(x)
            kept += [(before, argument(one, seed)), (y, result(one, seed))]
            for array in arrays_of(x):
                array.fill(-5)
        if seed == 3:
            del kept[::3]  # their memory may come again
    for value, wanted in kept:
        same(arrays, value, wanted)


def the_device_may_be_behind(backend: Backend, arrays: DeviceArrays, what: str) -> None:
    """One plan, again and again, and nothing else, so that who sends nothing has no reason to wait
    for its device: no message overwrites one that was not read yet."""
    if what.endswith("several") and size(backend) == 1:
        return
    plan = MADE[what](size(backend)).compile(backend)
    for one in (plan, plan.H):
        xs = [given(arrays, one, seed) for seed in range(4)]
        kept = [one(x) for x in xs]
        for seed, y in enumerate(kept):
            same(arrays, y, result(one, seed))


def plans_may_go_first(backend: Backend, arrays: DeviceArrays, what: str) -> None:
    """Results of plans that nobody has any more are right, read long after."""
    if what.endswith("several") and size(backend) == 1:
        return
    op = OPERATORS[what](size(backend))
    kept = []
    for direction in (op, op.H):
        plan = direction.compile(backend)
        x, right = given(arrays, plan, 5), result(plan, 5)
        kept.append((plan(x), right))
        plan.release()
        del plan
        gc.collect()
    for value, wanted in kept:
        same(arrays, value, wanted)


def out_is_filled(backend: Backend, arrays: DeviceArrays, what: str) -> None:
    """Results go where they are wanted, by calls and by their two halves."""
    if what.endswith("several") and size(backend) == 1:
        return
    plan = MADE[what](size(backend)).compile(backend)
    for seed in range(4):
        for one in (plan, plan.H):
            x, right = given(arrays, one, seed), result(one, seed)
            wrong = each(right, lambda a: a - 1)
            out = placed(arrays, one.codomain, wrong, backend)
            if seed % 2:
                one.start(x, out=out)
                y = one.finish()
            else:
                y = one(x, out=out)
            for mine, other in zip(arrays_of(y), arrays_of(out), strict=True):
                assert mine is other
            same(arrays, out, right)
            same(arrays, x, argument(one, seed))


def streams_are_followed(backend: Backend, arrays: DeviceArrays, what: str) -> None:
    """Calls of one plan on one stream after the other, none of which the host waits for: a result
    is there once its own stream was waited for."""
    if what.endswith("several") and size(backend) == 1:
        return
    plan = MADE[what](size(backend)).compile(backend)
    cuda = arrays.module.cuda
    streams = [cuda.Stream(non_blocking=True) for _ in range(3)]
    kept = []
    for seed in range(6):
        for one in (plan, plan.H):
            stream = streams[seed % 3]
            with stream:
                x = given(arrays, one, seed)
                if seed % 2:
                    kept.append((stream, one(x), result(one, seed)))
                    continue
                one.start(x)
            after = streams[(seed + 1) % 3]
            with after:
                kept.append((after, one.finish(), result(one, seed)))
    for stream, value, wanted in reversed(kept):
        with stream:
            same(arrays, value, wanted)


def runs_overlap(backend: Backend, arrays: DeviceArrays, seed: int) -> None:
    """Runs of several plans, started and finished in any order that all workers share."""
    choice = random.Random(seed)
    names = [n for n in MADE if size(backend) > 1 or not n.endswith("several")]
    plans = [MADE[n](size(backend)).compile(backend) for n in choice.choices(names, k=2)]
    plans += [plan.H for plan in plans]
    running: dict[int, int] = {}
    kept = []
    for step in range(12):
        k = choice.randrange(len(plans))
        if k in running:
            kept.append((plans[k].finish(), result(plans[k], running.pop(k))))
        elif choice.random() < 0.6:
            plans[k].start(given(arrays, plans[k], step))
            running[k] = step
        else:
            kept.append((plans[k](given(arrays, plans[k], step)), result(plans[k], step)))
    kept += [(plans[k].finish(), result(plans[k], step)) for k, step in running.items()]
    for value, wanted in kept:
        same(arrays, value, wanted)


def wrong_arguments_are_told(backend: Backend, arrays: DeviceArrays, length: int) -> None:
    """A wrong argument of one worker is an error on every worker; memory of another kind is never
    copied in silence."""
    op = total(size(backend), length)
    fits = arrays.put(np.ones(length))
    name = f"{arrays.ndarray.__module__}.ndarray"
    last = size(backend) - 1
    for wrong, kind, words in [
        (np.ones(length), ArgumentError, f"numpy.ndarray given, {name} expected; copy it to"),
        ([1.0] * length, ArgumentError, f"{name} expected"),
        (arrays.put(np.ones(length + 1)), ShapeError, f"({length + 1},) given"),
        (arrays.put(np.ones(length, np.float32)), DTypeError, "float32 given, float64 expected"),
    ]:
        plan = op.compile(backend)
        text = raised(kind, lambda x=wrong, plan=plan: plan(x if backend.worker == last else fits))
        assert words in text, text
        plan = op.compile(backend)
        out = wrong if backend.worker == last else arrays.put(np.ones(length))
        raised(kind, lambda out=out, plan=plan: plan(fits, out=out))
    plan = op.compile(backend)
    x = given(arrays, plan, 2)
    same(arrays, plan(x, out=x), result(plan, 2))
    same(arrays, plan(given(arrays, plan, 1)), result(plan, 1))


def wrong_memories_are_told(backend: Backend, arrays: DeviceArrays) -> None:
    """An array of the device for a region in main memory, and the reverse, as an argument and as
    ``out``."""
    X = linop.TensorSpace((SMALL * size(backend),), linop.Partition((size(backend),)))
    op, last = linop.offload(X) @ linop.shift(X, 1), size(backend) - 1
    here, there = np.ones(SMALL), arrays.put(np.ones(SMALL))
    name = f"{arrays.ndarray.__module__}.ndarray"
    up = f": numpy.ndarray given, {name} expected; copy it to the device with"
    down = f" in host memory: {name} given, numpy.ndarray expected; copy it to main memory with"
    for side, x, y, words in [
        ("plan", here, here.copy(), up),
        ("plan", there, there.copy(), down),
        ("H", there, there.copy(), down),
        ("H", here, here.copy(), up),
    ]:
        plan = op.compile(backend)
        one = plan if side == "plan" else plan.H
        if backend.worker != last:
            x, y = (there, here.copy()) if one is plan else (here, there.copy())
        text = raised(ArgumentError, lambda one=one, x=x, y=y: one(x, out=y))
        assert "array of region 'x" in text and words in text, text
    plan = op.compile(backend)
    same(arrays, plan(given(arrays, plan, 1)), result(plan, 1))


def offloading_overlaps(backend: Backend, arrays: DeviceArrays) -> None:
    """`start` queues the copy, and waits for nothing; `finish` waits for it, and for no more."""
    plan = offloaded(size(backend), LARGE).compile(backend)
    for one in (plan, plan.H):
        for seed in range(3):
            x = given(arrays, one, seed)
            one.start(x)
            y = one.finish()
            lies_where_it_says(arrays, one.codomain, y, backend)
            if one is plan:  # in main memory, and there
                same_arrays(y, result(one, seed))
            same(arrays, y, result(one, seed))


def a_later_call_fails_everywhere(backend: Backend, arrays: DeviceArrays) -> None:
    """An error of one worker's local map in a later call reaches all workers."""
    n = size(backend)
    calls = [0]

    def map_(x: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2 and backend.worker == n - 1:
            raise ValueError("too hot")
        return x * 2

    X = linop.TensorSpace((SMALL,), linop.Partition((n,)), axes=(linop.COPIES,))
    locally = [linop.local(r, r, map_, map_) for r in X.regions]
    plan = (linop.all_reduce(X) @ linop.direct_sum(*locally)).compile(backend)
    x = arrays.put(np.ones(SMALL))
    same(arrays, plan(x), np.full(SMALL, 2.0 * n))
    # Nobody is in the first call any more, where an alarm about this plan would be heard, too.
    total(n).compile(backend)(x)
    try:
        plan(x)
    except (ValueError, LinopError) as error:
        assert "too hot" in str(error), error
    else:
        raise AssertionError("an error expected")


def local_maps_compute_there(backend: Backend, arrays: DeviceArrays, dtype: str) -> None:
    """Matrices, dense and sparse, diagonals, convolutions and stencils on every worker's device, of
    whole numbers too: exactly what NumPy gives."""
    import scipy.sparse

    rng = np.random.default_rng(3)
    n, mine = size(backend), []
    for w in range(n):
        x = Space(Region(f"x{w}", (4, 5), w), dtype)
        dense = rng.integers(-3, 3, (6, 20)).astype(dtype)
        sparse = scipy.sparse.csr_array(np.where(np.abs(dense) > 1, dense, 0))
        y = Space(Region(f"y{w}", (6,), w), dtype)
        z = Space(Region(f"z{w}", (4, 3), w), dtype)
        kernel = rng.integers(-3, 3, (3, 2)).astype(dtype)
        mine.append(
            linop.local_operators.matrix(sparse.T, y, x)
            @ linop.local_operators.matrix(dense, x, y)
            @ linop.local_operators.diagonal(rng.integers(-3, 3, (4, 5)).astype(dtype), x)
        )
        mine[-1] = (
            linop.local_operators.convolution(kernel, x, z, stride=(1, 2), padding=(1, (1, 0)))
            @ mine[-1]
            * 2
        )
    X = linop.TensorSpace((4 * n, 5), linop.Partition((n, 1)), dtype)
    varying = rng.integers(-3, 3, X.global_shape).astype(dtype)
    star = linop.stencil(X, {(0, 0): varying, (-2, 0): 2, (0, 1): -1, (1, 0): 1}, "reflect")
    for op in (linop.direct_sum(*mine), star):
        plan = op.compile(backend)
        for one in (plan, plan.H):
            for seed in range(2):
                same(arrays, one(given(arrays, one, seed)), result(one, seed))


def dtypes_are_refused(backend: Backend, arrays: DeviceArrays) -> None:
    """A dtype that the device lacks is an error when an operator is compiled."""
    op = linop.identity(Space(Region("x", (3,)), np.longdouble))
    if np.dtype(np.longdouble).itemsize > 8:
        assert "has no arrays of" in raised(DTypeError, lambda: op.compile(backend))


CONTRACTS: dict[Callable[..., None], list[tuple[Any, ...]]] = {
    results_are_kept: [(what,) for what in MADE],
    the_device_may_be_behind: [(what,) for what in MADE],
    plans_may_go_first: [(what,) for what in OPERATORS],
    out_is_filled: [(what,) for what in MADE],
    streams_are_followed: [(what,) for what in MADE],
    wrong_arguments_are_told: [(SMALL,), (LARGE,)],
    wrong_memories_are_told: [()],
    offloading_overlaps: [()],
    local_maps_compute_there: [(d,) for d in ("float64", "float32", "int32", "complex128")],
    a_later_call_fails_everywhere: [()],
    dtypes_are_refused: [()],
}
"""With the arguments that each is tried with."""
