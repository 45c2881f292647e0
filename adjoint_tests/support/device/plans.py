"""What holds of plans on a device, whatever their transport: on the simulated one in every run of
the suite, on a GPU where there is one.

Each contract takes a backend and the arrays of the device, on every worker. This module must not
import MPI when it is imported.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

import linop
from linop import Region, Space
from linop.backends import Backend
from linop.backends.device.device_arrays import DeviceArrays
from linop.backends.threads import Threads
from linop.errors import ArgumentError, DTypeError, LinopError, ShapeError
from linop.normal_form.maps import LocalMap
from linop.testing.describing import Description
from linop.testing.workers.jobs import job
from support.contracts.plans import (
    LARGE,
    OPERATORS,
    SMALL,
    argument,
    arrays_of,
    each,
    part,
    raised,
    result,
    size,
    total,
)
from support.device.operators import (
    MADE,
    as_dict,
    columns,
    given,
    lies_where_it_says,
    offloaded,
    placed,
    same,
)
from support.operators import catalogue
from support.operators.catalogue import FACTORIES, build
from support.operators.properties import rounding, same_arrays

if TYPE_CHECKING:
    from mpi4py import MPI

Contract = Callable[..., None]


def simulated_arrays() -> DeviceArrays:
    from support.device.simulated import ARRAYS

    return ARRAYS


def cupy_arrays() -> DeviceArrays:
    from linop.backends.device.device_arrays import cupy_arrays

    return cupy_arrays()


NAMES = tuple(name for name in catalogue.NAMES if name != "pair_of_functions")
"""The operators of the catalogue but for one whose functions are written for NumPy's arrays."""

ARRAYS: dict[str, Callable[[], DeviceArrays]] = {
    "simulated": simulated_arrays,
    "cupy": cupy_arrays,
}


@contextmanager
def shown(arrays: DeviceArrays, to_mpi: bool) -> Iterator[None]:
    """Inside, whether the simulated device shows its arrays to MPI."""
    if arrays.name == "cupy":
        yield
        return
    from support.device.simulated import Counts

    Counts.visible = to_mpi
    try:
        yield
    finally:
        Counts.visible = True


def on_ranks(ranks: int, kind: str, way: str, contract: Contract, *arguments: Any) -> None:
    """A contract under MPI. What is staged is never shown to MPI."""
    job(ranks).run(_on_rank, kind, way, contract, *arguments)


def _on_rank(comm: MPI.Comm, kind: str, way: str, contract: Contract, *arguments: Any) -> None:
    arrays = ARRAYS[kind]()
    backend = linop.backends.get("cupy", comm=comm, way=way, wait_limit=10, arrays=arrays)
    with shown(arrays, to_mpi=way == "aware"):
        contract(backend, arrays, *arguments)


def on_threads(workers: int, kind: str, contract: Contract, *arguments: Any) -> None:
    """The same on threads, which need no MPI."""
    arrays = ARRAYS[kind]()
    with shown(arrays, to_mpi=False):
        linop.launch(
            lambda backend: contract(backend, arrays, *arguments), workers, "threads", arrays=arrays
        )


def in_every_case(
    backend: Backend, arrays: DeviceArrays, contract: Contract, cases: list[tuple[Any, ...]]
) -> None:
    """A contract, with all of its arguments."""
    for arguments in cases:
        contract(backend, arrays, *arguments)


def operator_agrees(
    backend: Backend, arrays: DeviceArrays, name: str, description: Description, seed: int
) -> None:
    """An operator of the catalogue, forward and back: whole numbers as the expression says, and
    movements of any numbers to the bit as on NumPy's arrays. Results are read at the end alone."""
    op = build(name, description)
    known = [call.map.port is not None or in_main_memory(call.map) for call in op.stages.calls]
    if not all(known):
        words = raised(ArgumentError, lambda: op.compile(backend))
        assert "computes with NumPy's arrays alone" in words, words
        return
    tolerance = 0.0 if FACTORIES[name].exact else rounding(op)
    try:
        plan = op.compile(backend)
    except DTypeError:
        assert op.dtype.kind == "V", op.dtype  # bfloat16, which some versions of CuPy lack
        return
    threads = Threads().compile(op)  # in main memory, whatever this program's arrays
    kept = []
    for one, other in ((plan, threads), (plan.H, threads.H)):
        for k in range(3):
            y = one(given(arrays, one, seed + k))
            lies_where_it_says(arrays, one.codomain, y, backend)
            kept.append((y, result(one, seed + k), tolerance))
        if op.stages.pure:
            x = one.domain.random(seed)
            x, y = part(one.domain, x, backend), part(one.codomain, other(x), backend)
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
    image = plan(mine)
    wanted = op(op.domain.integers(seed))
    assert image.inner(image) == wanted.inner(wanted) or tolerance


def in_main_memory(local: LocalMap) -> bool:
    """Whether a local map computes there, whatever the backend."""
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
    """What does not fit is an error on every worker, whoever passes it; memory of another kind is
    never copied in silence."""
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
    if last:
        raised(ArgumentError, lambda: plan(fits, out=fits))
    plan = op.compile(backend)
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
    """Where a local map of one worker raises in a later call, all hear of it."""
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
    """Matrices, dense and sparse, diagonals and convolutions on every worker's device, of whole
    numbers too: exactly what NumPy gives."""
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
    op = linop.direct_sum(*mine)
    plan = op.compile(backend)
    for one in (plan, plan.H):
        for seed in range(2):
            same(arrays, one(given(arrays, one, seed)), result(one, seed))


def dtypes_are_refused(backend: Backend, arrays: DeviceArrays) -> None:
    """What a device has no numbers for is told when an operator is compiled."""
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


def hosts_wait_seldom(backend: Backend, arrays: DeviceArrays) -> None:
    """Under MPI: for the device, once a stage where MPI is given its memory; staged, once for each
    message that is sent, and once for the buffers of those that come. Never where a plan goes away:
    that may be at any moment, inside what would be interrupted by it."""
    from support.device.simulated import Counts

    for name, make in OPERATORS.items():
        plan: Any = make(size(backend)).compile(backend)
        x = given(arrays, plan, 1)
        plan(x)
        before = Counts.waits
        plan(x)
        waits = Counts.waits - before
        steps = plan.plan.steps
        stages = {
            s.stage
            for s in steps
            if isinstance(s, linop.planning.plan.Send | linop.planning.plan.Receive)
        }
        receiving = {s.stage for s in steps if isinstance(s, linop.planning.plan.Receive)}
        most = len(stages) if backend.aware.yes else len(plan.plan.sends) + len(receiving)  # type: ignore[attr-defined]
        assert waits <= most, (name, waits, most)
        before = Counts.waits
        plan.release()
        del plan
        gc.collect()
        assert Counts.waits == before, name


def kernels_are_few(backend: Backend, arrays: DeviceArrays) -> None:
    """Under MPI: one for what a stage packs, one for what stays, one for what comes; and what leads
    from and to main memory alone has nothing to do with the device."""
    from support.device.simulated import Counts

    H = columns(size(backend))
    for op, most in ((H, 3), (H.H, 3), (columns(size(backend), "host"), 0)):
        plan = op.compile(backend)
        x = given(arrays, plan, 1)
        plan(x)
        launches, waits = Counts.launches, Counts.waits
        plan(x)
        assert Counts.launches - launches <= most, (str(op), Counts.launches - launches)
        assert most or Counts.waits == waits, Counts.waits - waits


def ways_are_chosen_together(comm: MPI.Comm) -> None:
    """All ranks have to ask for one way; what MPI does not promise is not tried; and plans say
    so."""
    arrays = simulated_arrays()
    for wanted, words in [
        ("staged", "pinned main memory: asked"),
        ("aware", "given the device's memory: asked for, and messages from device"),
        ("auto", "says"),
    ]:
        own = comm.Dup()
        backend = linop.backends.get("cupy", comm=own, way=wanted, arrays=arrays)
        assert linop.backends.get("cupy", comm=own) is backend
        assert words in backend.way(), backend.way()
        assert len(set(comm.allgather(backend.way()))) == 1
        plan = total(comm.size).compile(backend)
        assert comm.size == 1 or backend.way() in plan.describe()
        own.Free()
    own = comm.Dup()
    odd = "best" if comm.rank == 0 else "auto"
    text = raised(
        ArgumentError, lambda: linop.backends.get("cupy", comm=own, way=odd, arrays=arrays)
    )
    assert "way: expected auto, aware or staged, given 'best'" in text
    if comm.size > 1:
        odd = "aware" if comm.rank == 0 else "staged"
        text = raised(
            linop.errors.BackendError,
            lambda: linop.backends.get("cupy", comm=own, way=odd, arrays=arrays),
        )
        assert "different settings: way='aware' on worker 0 and way='staged' on" in text
    with shown(arrays, to_mpi=False):
        text = raised(
            linop.errors.BackendError,
            lambda: linop.backends.get("cupy", comm=own, way="aware", arrays=arrays),
        )
        assert "use way='staged'" in text, text
    own.Free()


def missing_gpus_are_told(comm: MPI.Comm) -> None:
    """Where one rank has no GPU, or no such one, every rank hears of it, and how to do without."""
    arrays = simulated_arrays()
    own = comm.Dup()
    from support.requirements import missing_gpu  # pytest, which ranks seldom need

    if missing_gpu():
        mine = arrays if comm.rank else None
        try:
            linop.backends.get("cupy", comm=own, arrays=mine)
        except (linop.errors.BackendError, linop.errors.MissingExtraError) as error:
            assert "worker 0: " in str(error), error
            assert "linop-algebra[cupy]" in str(error) or "finds no GPU" in str(error), error
        else:
            raise AssertionError("an error expected")
    text = raised(
        linop.errors.BackendError,
        lambda: (
            linop.backends.get("cupy", comm=own, device=7 * comm.rank, arrays=arrays)
            if comm.size > 1
            else linop.backends.get("cupy", comm=own, device=7, arrays=arrays)
        ),
    )
    assert "wanted; there are 1" in text, text
    own.Free()
