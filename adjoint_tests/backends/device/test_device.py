"""Plans on a device that is simulated: what the ``cupy`` backend and threads on a GPU do, but for
the GPU. The same contracts on one are in `test_cupy`.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import linop
from linop import Region, Space
from linop.backends import Backend
from linop.backends.device.kernels import copied_in_words
from linop.errors import ArgumentError, BackendError
from linop.planning.lowering import workers_of
from linop.testing.describing import seeds
from support.contracts.plans import argument, each, raised, result, total
from support.device import checks as device_checks
from support.device import mpi as device_mpi
from support.device import plans as device_plans
from support.device import simulated
from support.device import tensors as device_tensors
from support.device.operators import given as given_to
from support.device.operators import lies_where_it_says, offloaded, same
from support.device.plans import CONTRACTS, KINDS
from support.device.running import in_every_case, on_ranks, on_threads
from support.draws import FEW, ON_RANKS
from support.operators.catalogue import build, describe
from support.operators.properties import stays_exact
from support.requirements import needs_mpi, needs_torch
from support.workers import in_job

pytestmark = pytest.mark.slow

DEVICE = "simulated"
ARRAYS = simulated.ARRAYS

TENSORS = (
    device_tensors.tensors_go_there_and_back,
    device_tensors.tensors_lie_where_their_regions_do,
    device_tensors.functions_of_tensors_are_checked,
)

named = attrgetter("__name__")
each_kind = pytest.mark.parametrize("kind", KINDS)
each_contract = pytest.mark.parametrize("contract", CONTRACTS, ids=named)
each_check = pytest.mark.parametrize("contract", device_checks.CONTRACTS, ids=named)
WAYS = ("aware", "staged", "nccl")
each_way = pytest.mark.parametrize("way", WAYS)


# Threads


@each_kind
@settings(max_examples=6 * settings().max_examples)
@given(data=st.data(), seed=seeds)
def test_operators_on_threads(kind: str, data: st.DataObject, seed: int) -> None:
    name = data.draw(st.sampled_from(KINDS[kind]), label=kind)
    description = data.draw(describe(name), label=name)
    op = build(name, description)
    assume(stays_exact(op))
    workers = max(workers_of(op.stages), default=0) + 1
    on_threads(workers, DEVICE, device_plans.operator_agrees, name, description, seed)


@each_contract
@pytest.mark.parametrize("workers", [1, 3])
def test_contracts_on_threads(workers: int, contract: Callable[..., None]) -> None:
    on_threads(workers, DEVICE, in_every_case, contract, CONTRACTS[contract])


@each_check
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_checks_on_threads(workers: int, contract: Callable[..., None]) -> None:
    on_threads(workers, DEVICE, in_every_case, contract, device_checks.CONTRACTS[contract])


@pytest.mark.parametrize("workers", [1, 3])
def test_checks_of_whole_vectors(workers: int) -> None:
    with simulated.Stream():
        device_checks.whole_vectors_pass(ARRAYS, workers)


@given(workers=st.integers(1, 8), seed=st.integers(0, 999))
def test_runs_overlap_on_threads(workers: int, seed: int) -> None:
    on_threads(workers, DEVICE, device_plans.runs_overlap, seed)


@given(workers=st.integers(1, 4), seed=seeds)
def test_one_process_that_holds_all_workers(workers: int, seed: int) -> None:
    """Its threads work on the stream of the caller."""
    plan = total(workers).compile(linop.backends.get("threads", arrays=ARRAYS))
    stream = simulated.Stream()
    with stream:
        x = plan.domain.integers(seed)
        given = {name: ARRAYS.put(array) for name, array in x.arrays.items()}
        image = plan(linop.Vector(plan.domain, given))
        wanted = plan.op(x)
        for name, array in image.arrays.items():
            assert np.array_equal(array.get(), wanted[name])
        raised(ArgumentError, lambda: plan(x))


def test_threads_wait_for_nothing() -> None:
    """No worker's host waits for the device, whatever is exchanged."""

    def main(backend: Backend) -> None:
        for name, make in device_plans.OPERATORS.items():
            plan = make(3).compile(backend)
            x = each(argument(plan, 1), ARRAYS.put)
            before = simulated.Counts.waits
            kept = [plan(x), plan.H(plan(x))]
            assert simulated.Counts.waits == before, name
            del kept

    # One after the other, so that nobody counts what another reads.
    linop.launch(main, 3, "threads", arrays=ARRAYS)


def test_offloading_waits_in_finish_alone() -> None:
    """`start` queues the copies; `finish` waits for them, and for nothing that is queued later."""

    def main(backend: Backend) -> None:
        plan = offloaded(1).compile(backend)
        for one, put in ((plan, ARRAYS.put), (plan.H, np.copy)):
            x = put(argument(one, 1))
            before = simulated.Counts.waits
            one.start(x)
            assert simulated.Counts.waits == before
            later = ARRAYS.module.zeros(3)  # queued after the copies
            y = one.finish()
            assert simulated.Counts.waits == before + 1
            assert simulated.current().done < simulated.current().added
            assert (later.get() == 0).all()
            same(ARRAYS, y, result(one, 1))

    linop.launch(main, 1, "threads", arrays=ARRAYS)


def test_maps_of_numpy_alone_compute_in_main_memory() -> None:
    """Whatever computes with NumPy's arrays alone runs on a device's backend, on regions there."""
    import scipy.sparse.linalg

    A = np.arange(12.0).reshape(3, 4)
    x, y = Region("x", 4, 0, "host"), Region("y", 3, 0, "host")
    known = scipy.sparse.linalg.aslinearoperator(A)
    F = linop.local_operators.from_scipy(known, x, y) @ linop.offload(Space(Region("x", 4)), "host")

    def main(backend: Backend) -> None:
        plan = F.compile(backend)
        for one in (plan, plan.H):
            for seed in range(2):
                z = one(given_to(ARRAYS, one, seed))
                lies_where_it_says(ARRAYS, one.codomain, z, backend)
                same(ARRAYS, z, result(one, seed))
        elsewhere = linop.local_operators.from_scipy(known, Region("x", 4), y)
        text = raised(ArgumentError, lambda: elsewhere.compile(backend))
        assert "computes with NumPy's arrays alone" in text, text

    linop.launch(main, 1, "threads", arrays=ARRAYS)


@given(
    dtype=st.sampled_from("?bhilqefdFD"),
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    data=st.data(),
)
def test_runs_are_copied_in_words(dtype: str, shape: list[int], data: st.DataObject) -> None:
    """Boxes of any place and size, in words where they lie so."""
    rng = np.random.default_rng(data.draw(seeds))
    large = [n + data.draw(st.integers(0, 4)) for n in shape]
    values = [rng.integers(0, 99, large).astype(dtype) for _ in range(2)]
    target, source = map(ARRAYS.put, values)
    begins = [
        [data.draw(st.integers(0, m - n)) for n, m in zip(shape, large, strict=True)]
        for _ in range(2)
    ]
    to, of = (tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True)) for begin in begins)
    copied_in_words(target[to], source[of])
    values[0][to] = values[1][of]
    assert np.array_equal(target.get(), values[0])


def test_sums_take_one_kernel() -> None:
    """One kernel adds a multiple of a box, and one sums two boxes."""
    space = Space([Region("a", 6), Region("b", 6)])
    a, b = space.regions
    for op in (linop.identity(space) + 3 * linop.add(space, a, b), linop.add(space, a, b)):
        plan = op.compile(linop.backends.get("threads", workers=1, arrays=ARRAYS))
        x = plan.domain.integers(1)
        image = plan(linop.Vector(space, {n: ARRAYS.put(v) for n, v in x.arrays.items()}))
        for name, array in image.arrays.items():
            assert np.array_equal(array.get(), plan.op(x)[name])
    counted = []
    for scale in (1, 3):
        op = linop.identity(space) + scale * linop.add(space, a, b)
        backend: Any = linop.launch(lambda backend: backend, 1, "threads", arrays=ARRAYS)[0]
        plan = op.compile(backend)
        x = {region.name: ARRAYS.put(np.ones(6)) for region in space}
        plan(x)
        before = simulated.Counts.launches
        plan(x)
        counted.append(simulated.Counts.launches - before)
    assert counted[1] <= counted[0] + 1, counted


def test_arrays_of_a_device_are_refused_in_main_memory() -> None:
    """With how to get them there."""
    plan = total(1).compile(linop.backends.get("threads"))
    text = raised(ArgumentError, lambda: plan(ARRAYS.put(np.ones(5))))
    assert "simulated.ndarray given, numpy.ndarray expected" in text and ".get()" in text, text


def test_options_of_threads() -> None:
    raised(ArgumentError, lambda: linop.backends.get("threads", arrays="jax"))

    def main(backend: Backend) -> None:
        assert linop.backends.get("threads", arrays=ARRAYS) is backend
        raised(BackendError, lambda: linop.backends.get("threads", arrays="numpy"))

    linop.launch(main, 2, "threads", arrays=ARRAYS)


@needs_torch
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(
    "contract", [*TENSORS, device_tensors.other_devices_are_refused], ids=named
)
def test_tensors_on_threads(contract: Callable[..., None], workers: int) -> None:
    on_threads(workers, DEVICE, in_every_case, contract, device_tensors.CONTRACTS[contract])


@needs_torch
@pytest.mark.parametrize("workers", [1, 3])
def test_layers_on_threads(workers: int) -> None:
    on_threads(workers, DEVICE, device_tensors.layers_work)


# Ranks


@needs_mpi
@pytest.mark.timeout(300)
@each_way
@each_kind
@settings(max_examples=4 * FEW)
@given(ranks=st.integers(1, 4), data=st.data(), seed=seeds)
def test_operators_on_ranks(
    kind: str, way: str, ranks: int, data: st.DataObject, seed: int
) -> None:
    name = data.draw(st.sampled_from(KINDS[kind]), label=kind)
    description = data.draw(describe(name, ranks), label=name)
    assume(stays_exact(build(name, description)))
    on_ranks(ranks, DEVICE, way, device_plans.operator_agrees, name, description, seed)


@needs_mpi
@each_way
@each_contract
def test_contracts_under_mpi(contract: Callable[..., None], way: str) -> None:
    on_ranks(3, DEVICE, way, in_every_case, contract, CONTRACTS[contract])


@needs_mpi
@each_way
@each_check
def test_checks_under_mpi(contract: Callable[..., None], way: str) -> None:
    on_ranks(3, DEVICE, way, in_every_case, contract, device_checks.CONTRACTS[contract])


@needs_mpi
@needs_torch
@each_way
@pytest.mark.parametrize("contract", [*TENSORS, device_tensors.layers_work], ids=named)
def test_tensors_under_mpi(contract: Callable[..., None], way: str) -> None:
    on_ranks(2, DEVICE, way, in_every_case, contract, device_tensors.CONTRACTS[contract])


@needs_mpi
@each_way
@ON_RANKS
@given(ranks=st.integers(2, 4), seed=st.integers(0, 999))
def test_runs_overlap_under_mpi(way: str, ranks: int, seed: int) -> None:
    on_ranks(ranks, DEVICE, way, device_plans.runs_overlap, seed)


@needs_mpi
@each_way
@pytest.mark.parametrize("ranks", [2, 4])
def test_hosts_wait_once_a_stage_under_mpi(way: str, ranks: int) -> None:
    on_ranks(ranks, DEVICE, way, device_mpi.hosts_wait_seldom)


@needs_mpi
@each_way
@pytest.mark.parametrize("ranks", [1, 3])
def test_kernels_are_few_under_mpi(way: str, ranks: int) -> None:
    on_ranks(ranks, DEVICE, way, device_mpi.kernels_are_few)


@needs_mpi
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ways_are_chosen_together_under_mpi(ranks: int) -> None:
    in_job(ranks, device_mpi.ways_are_chosen_together)


@needs_mpi
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_gpu_is_an_error_on_every_rank_under_mpi(ranks: int) -> None:
    in_job(ranks, device_mpi.missing_gpus_are_told)
