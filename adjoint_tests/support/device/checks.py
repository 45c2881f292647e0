"""Contracts of `linop.testing`'s checks when plans and functions compute on a device: their vectors
are in main memory, and the reports are those of NumPy's arrays.

As in `support.device.plans`, each contract takes a backend and the arrays of the device, on every
worker. This module must not import MPI when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import linop
import linop.testing as lt
from linop import LinearOperator, Region, Space
from linop.backends import Backend
from linop.backends.device.device_arrays import DeviceArrays
from linop.backends.engine.arrays.interface import Arrays
from linop.errors import DTypeError
from linop.testing.tested_maps.tested_map import gathered
from support.contracts.plans import SMALL, part, raised, size
from support.device.operators import KINDS, MADE, placed
from support.spmd import check_programs

Map = Callable[[Any], Any]


def told(backend: Backend, report: lt.Report) -> lt.Report:
    """A report that is the same on all workers."""
    assert gathered(backend, str(report)) == [str(report)] * size(backend)
    return report


# What is right passes

CHECKED = ("total", "large total", "shifted", "several", "offloaded", "beside", "computed")


def plans_pass(backend: Backend, arrays: DeviceArrays, what: str) -> None:
    """Operators, and their plans, on regions of both memories."""
    if what == "several" and size(backend) == 1:
        return
    op = MADE[what](size(backend))
    plan = op.compile(backend)
    for one in (plan, plan.H):
        for check in (lt.check_adjoint, lt.check_dot_exact):
            assert told(backend, check(one, backend))
    if max(op.shape) < 100:
        assert all(told(backend, report) for report in check_programs.checked(backend, op))


def other_properties_pass(backend: Backend, arrays: DeviceArrays) -> None:
    n = size(backend)
    op, total = MADE["shifted"](n), MADE["total"](n)
    for there in (op, linop.offload(op.codomain) @ op):
        lt.assert_unitary(there, backend)
        lt.assert_inverse(2 * there, there.H / 2, backend)
    lt.assert_self_adjoint(total, backend)
    lt.assert_equal(total.H, total.compile(backend), backend)


def matrices_pass(backend: Backend, arrays: DeviceArrays) -> None:
    """They compute in main memory, and are compared with what a device does."""
    check_programs.with_matrices(backend)


def functions_pass(backend: Backend, arrays: DeviceArrays) -> None:
    """Hand-written functions get what a plan would: arrays of the device, and NumPy's for regions
    in main memory."""
    seen = set()

    def forward(x: dict[str, Any]) -> dict[str, Any]:
        (a, array), (h, other) = sorted(x.items())
        seen.update({type(array), type(other)})
        return {a: array * 2 + arrays.put(other), h: other * 3}

    def adjoint(y: dict[str, Any]) -> dict[str, Any]:
        (a, array), (h, other) = sorted(y.items())
        return {a: array * 2, h: other * 3 + arrays.fetched(array)}

    n = size(backend)
    space = Space([Region(f"{k}{w}", (2, 3), w, m) for w in range(n) for k, m in KINDS])
    op = lt.pair(forward, adjoint, space, space)
    assert all(told(backend, report) for report in check_programs.checked(backend, op))
    assert seen == {arrays.ndarray, np.ndarray}
    bare = lt.pair(lambda x: x * 2, lambda y: y * 2, (2, 3), (2, 3), dtype=np.complex64)
    assert all(told(backend, report) for report in check_programs.checked(backend, bare))
    if np.dtype(np.longdouble).itemsize > 8:
        wide = lt.pair(np.copy, np.copy, 3, 3, dtype=np.longdouble)
        assert "has no arrays of" in raised(DTypeError, lambda: lt.check_linear(wide, backend))


def whole_vectors_pass(arrays: DeviceArrays, workers: int) -> None:
    """In one process that holds all workers."""
    backend = linop.backends.get("threads", arrays=arrays)
    for what in ("total", "offloaded", "computed"):
        assert all(check_programs.checked(backend, MADE[what](workers)))
    space = Space(Region("x", 3))
    wrong = lt.check_adjoint(lt.pair(lambda x: x * 2, lambda y: y * 3, space, space), backend)
    assert "F has 2, the conjugate transpose of the adjoint has 3" in wrong.details


# What is wrong is named


def doubled(x: Any) -> Any:
    return x * 2


def dropped(x: Any) -> Any:
    y = x * 2
    y[2:3] = 0
    return y


def affine(x: Any) -> Any:
    return x * 2 + 1


LOCAL: dict[str, tuple[Map, Map]] = {
    "adjoint": (doubled, dropped),
    "forward": (dropped, doubled),
    "affine": (affine, doubled),
}
"""A forward function and its adjoint, one of them wrong."""


def mistaken(workers: int, memory: str, fault: str) -> LinearOperator:
    """Every block doubled, and passed on; on the last worker by functions with a fault."""
    X = linop.TensorSpace((SMALL * workers,), linop.Partition((workers,)), memory=memory)
    right = (doubled, doubled)
    functions = [right] * (workers - 1) + [LOCAL.get(fault, right)]
    maps = [linop.local(r, r, *both) for r, both in zip(X.regions, functions, strict=True)]
    return linop.shift(X, 1) @ linop.direct_sum(*maps)


def reports_are_those_of_numpy(backend: Backend, arrays: DeviceArrays, memory: str) -> None:
    """Of plans with a fault in a local map of one worker: the same entry is named, and the error
    has the same bits."""
    n = size(backend)
    right = mistaken(n, memory, "")
    for fault, check, others, passes in [
        ("adjoint", lt.check_adjoint, (), False),
        ("adjoint", lt.check_dot_exact, (), False),
        ("adjoint", lt.check_exact, (), False),
        ("adjoint", lt.check_linear, (), True),
        ("adjoint", lt.check_equal, (right,), True),
        ("forward", lt.check_equal, (right,), False),
        ("forward", lt.check_inverse, (right.H / 4,), False),
        ("forward", lt.check_adjoint, (), False),
        ("forward", lt.check_unitary, (), False),
        ("adjoint", lt.check_self_adjoint, (), n <= 2),
        ("affine", lt.check_linear, (), False),
        ("affine", lt.check_adjoint, (), False),
    ]:
        op = mistaken(n, memory, fault)
        there = told(backend, check(op, *others, backend=backend))
        here = check(op, *others, backend="reference")
        assert there.passed == here.passed == passes, str(there)
        assert (there.worst, there.error) == (here.worst, here.error), (str(there), str(here))


def spoilt(arrays: Arrays, other: Arrays, fault: str) -> Map:
    """A function of one kind of arrays that does what it must not."""

    def function(x: Any) -> Any:
        y = x * 2
        if fault == "changes":
            x[1:2] = 7
        elif fault == "same memory":
            return x[::-1]
        elif fault == "infinity":
            y[2:3] = np.inf
        elif fault == "other memory":
            return other.put(arrays.fetched(y))
        elif fault == "dtype":
            return y.astype(np.float32)
        elif fault == "shape":
            return y[1:]
        elif fault == "entry":
            return dropped(x)
        return y

    return function


SPOILT = {
    "changes": "the forward function changed its argument in place: x{0}[1] (worker {0}) was ",
    "same memory": "returned memory of its argument x{0} as its result y{0} on worker {0}",
    "infinity": "the forward function gives inf at y{0}[2] (worker {0})",
    "other memory": "returned {2}.ndarray for y{0} (worker {0}); expected a {1}.ndarray",
    "dtype": "returned dtype float32 for y{0} (worker {0}); expected float64",
    "shape": "returned shape (4,) for y{0} (worker {0}); expected (5,)",
    "entry": "from x{0}[2] (worker {0}) to y{0}[2] (worker {0}): F has 0, the conjugate transpose "
    "of the adjoint has 2",
}
"""Words of each error, with the worker's number, and the origin of two kinds of arrays."""


def faults_of_functions_are_named(backend: Backend, arrays: DeviceArrays, memory: str) -> None:
    """All workers report a wrong memory of one worker's function."""
    n, last = size(backend), size(backend) - 1
    X, Y = (Space([Region(f"{k}{w}", SMALL, w, memory) for w in range(n)]) for k in "xy")
    mine = arrays.of(memory)
    other = arrays if memory == "host" else arrays.of("host")
    for fault, words in SPOILT.items():
        wrong = spoilt(mine, other, fault) if backend.worker == last else doubled
        op = lt.pair(wrong, doubled, X, Y, name="functions")
        report = told(backend, lt.check_adjoint(op, backend))
        assert not report
        names = (kind.ndarray.__module__ for kind in (mine, other))
        assert words.format(last, *names) in report.details, str(report)


# Vectors of users


def vectors_compute_there(backend: Backend, arrays: DeviceArrays) -> None:
    """Vectors of a backend have its arrays, and compute with them."""
    n = size(backend)
    X = Space([Region(f"{k}{w}", (2, 3), w, m) for w in range(n) for k, m in KINDS])
    u, v = X.integers(1), X.integers(2)
    x, y = (backend.vector(X, placed(arrays, X, part(X, one, backend), backend)) for one in (u, v))
    assert x.inner(y) == u.inner(v) and x.norm() == u.norm()
    for there, here in [(2 * x - y / 2, 2 * u - v / 2), (-x.copy(), -u)]:
        for region in X.on(backend.worker):  # type: ignore[arg-type]
            array = there[region.name]
            assert type(array) is arrays.of(region.memory).ndarray
            assert np.array_equal(arrays.fetched(array), here[region.name])


CONTRACTS: dict[Callable[..., None], list[tuple[Any, ...]]] = {
    plans_pass: [(what,) for what in CHECKED],
    other_properties_pass: [()],
    matrices_pass: [()],
    functions_pass: [()],
    reports_are_those_of_numpy: [("default",), ("host",)],
    faults_of_functions_are_named: [("default",), ("host",)],
    vectors_compute_there: [()],
}
"""With the arguments that each is tried with."""
