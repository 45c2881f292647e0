"""The suite on a GPU: the whole catalogue and the contracts of `test_device`, with CuPy's own
arrays.

``python -m pytest -m gpu adjoint_tests`` runs it, and nothing else. Which ways messages travel
under MPI depends on the MPI library: "aware" is tried where that says it is.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from linop.planning.lowering import workers_of
from linop.testing.describing import seeds
from support.device import checks as device_checks
from support.device import nccl as device_nccl
from support.device import plans as device_plans
from support.device import tensors as device_tensors
from support.device.plans import CONTRACTS, NAMES
from support.device.running import cupy_arrays, in_every_case, on_ranks, on_threads
from support.draws import ON_RANKS
from support.operators.catalogue import build, describe
from support.operators.properties import stays_exact
from support.requirements import needs_gpu, needs_mpi, needs_nccl, needs_torch_on_gpu

pytestmark = [pytest.mark.gpu, needs_gpu, pytest.mark.timeout(400)]

KIND = "cupy"
WAYS = ("staged", "aware")
"""Aware is staged with an MPI library that does not take pointers to a GPU's memory."""

named = attrgetter("__name__")
each_operator = pytest.mark.parametrize("name", NAMES)
each_contract = pytest.mark.parametrize("contract", CONTRACTS, ids=named)
each_check = pytest.mark.parametrize("contract", device_checks.CONTRACTS, ids=named)
each_way = pytest.mark.parametrize("way", WAYS)
TENSORS = (
    device_tensors.tensors_go_there_and_back,
    device_tensors.tensors_lie_where_their_regions_do,
    device_tensors.other_devices_are_refused,
    device_tensors.layers_work,
    device_tensors.functions_of_tensors_are_checked,
)
each_tensor_contract = pytest.mark.parametrize("contract", TENSORS, ids=named)


@each_operator
@given(data=st.data(), seed=seeds)
def test_operators_on_threads(name: str, data: st.DataObject, seed: int) -> None:
    description = data.draw(describe(name), label=name)
    op = build(name, description)
    assume(stays_exact(op))
    workers = max(workers_of(op.stages), default=0) + 1
    on_threads(workers, KIND, device_plans.operator_agrees, name, description, seed)


@each_contract
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_contracts_on_threads(workers: int, contract: Callable[..., None]) -> None:
    on_threads(workers, KIND, in_every_case, contract, CONTRACTS[contract])


@each_check
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_checks_on_threads(workers: int, contract: Callable[..., None]) -> None:
    on_threads(workers, KIND, in_every_case, contract, device_checks.CONTRACTS[contract])


@pytest.mark.parametrize("workers", [1, 3])
def test_checks_of_whole_vectors(workers: int) -> None:
    device_checks.whole_vectors_pass(cupy_arrays(), workers)


@given(workers=st.integers(1, 8), seed=st.integers(0, 999))
def test_runs_overlap_on_threads(workers: int, seed: int) -> None:
    on_threads(workers, KIND, device_plans.runs_overlap, seed)


@needs_torch_on_gpu
@each_tensor_contract
def test_tensors_of_one_worker(contract: Callable[..., None]) -> None:
    """Of one: torch runs the backward pass of a device on one thread of a process."""
    on_threads(1, KIND, in_every_case, contract, device_tensors.CONTRACTS[contract])


@needs_mpi
@each_operator
@ON_RANKS
@given(ranks=st.integers(1, 4), way=st.sampled_from(WAYS), data=st.data(), seed=seeds)
def test_operators_under_mpi(
    name: str, ranks: int, way: str, data: st.DataObject, seed: int
) -> None:
    description = data.draw(describe(name, ranks), label=name)
    assume(stays_exact(build(name, description)))
    on_ranks(ranks, KIND, way, device_plans.operator_agrees, name, description, seed)


@needs_mpi
@each_way
@each_contract
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_contracts_under_mpi(ranks: int, contract: Callable[..., None], way: str) -> None:
    on_ranks(ranks, KIND, way, in_every_case, contract, CONTRACTS[contract])


@needs_mpi
@each_way
@each_check
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_checks_under_mpi(ranks: int, contract: Callable[..., None], way: str) -> None:
    on_ranks(ranks, KIND, way, in_every_case, contract, device_checks.CONTRACTS[contract])


@needs_mpi
@needs_torch_on_gpu
@each_way
@each_tensor_contract
@pytest.mark.parametrize("ranks", [1, 2])
def test_tensors_under_mpi(ranks: int, contract: Callable[..., None], way: str) -> None:
    on_ranks(ranks, KIND, way, in_every_case, contract, device_tensors.CONTRACTS[contract])


def _gpus() -> int:
    return cupy_arrays().module.cuda.runtime.getDeviceCount()


@needs_mpi
@needs_nccl
@each_contract
def test_contracts_over_nccl(contract: Callable[..., None]) -> None:
    """With a GPU for each rank, of which there may be one alone."""
    on_ranks(min(_gpus(), 4), KIND, "nccl", in_every_case, contract, CONTRACTS[contract])


@needs_mpi
@needs_nccl
def test_failures_over_nccl_are_heard_and_mended() -> None:
    on_ranks(min(_gpus(), 4), KIND, "nccl", device_nccl.a_failure_is_heard_and_mended)


@needs_mpi
@needs_nccl
@each_operator
@ON_RANKS
@given(data=st.data(), seed=seeds)
def test_operators_over_nccl(name: str, data: st.DataObject, seed: int) -> None:
    ranks = min(_gpus(), 4)
    if ranks == 1 and name == "repartition_to_other_workers":
        pytest.skip("one GPU, so one worker, which has no others")
    description = data.draw(describe(name, ranks), label=name)
    assume(stays_exact(build(name, description)))
    on_ranks(ranks, KIND, "nccl", device_plans.operator_agrees, name, description, seed)
