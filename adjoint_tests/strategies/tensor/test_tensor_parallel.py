"""Tensor and sequence parallel networks are their sequential twins."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from hypothesis import given
from hypothesis import strategies as st

from support.requirements import needs_mpi
from support.strategies.tensor import tensor_parallel
from support.strategies.tensor.tensor_networks import Case
from support.strategies.tensor.tensor_parallel import (
    clips_the_norm_of_all,
    composes_with_data_parallel,
    counts_as_megatron,
    entropies_of_large_logits,
    is_exact,
    is_its_twin,
)
from support.strategies.tensor.wrong_tensor_parallel import (
    CALLS,
    PAIRINGS,
    PLANS,
    refuses,
    refuses_a_second_time,
    refuses_alone,
    refuses_changed_norms,
    refuses_hooks,
    refuses_indices,
    refuses_other_nets,
)
from support.torchrun import on_torchrun
from support.workers import on_ranks, on_threads

SEQUENCE = pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
CONTRACTS = [
    getattr(tensor_parallel, name)
    for name in (
        "norms_agree",
        "takes_any_strides",
        "row_parallel_alone",
        "clips_the_norm_of_all",
        "follows_new_calls",
        "entropies_are_torch_s",
        "looks_up",
        "prepares_the_net_itself",
        "prepares_chains",
    )
]
HEADS = "prepares_the_net_itself", "norms_agree", "clips_the_norm_of_all", "follows_new_calls"
CASES = [
    Case(),
    Case(sequence=True),
    Case(heads=10, groups=5, sequence=True, norm="RMSNorm"),
    Case(heads=8, groups=4, bias=False, tied=False),
    Case(width=5, length=2, sequence=True, batch=1),
]


@SEQUENCE
@pytest.mark.parametrize("workers", range(1, 9))
@pytest.mark.parametrize(("hidden", "bias"), [(16, True), (11, False), (3, True)])
def test_exact_on_threads(workers: int, hidden: int, bias: bool, sequence: bool) -> None:
    on_threads(workers, is_exact, hidden, sequence, bias)


@SEQUENCE
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_messages_are_megatron_s(workers: int, sequence: bool) -> None:
    on_threads(workers, counts_as_megatron, sequence)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_language_models_on_threads(workers: int, case: Case) -> None:
    on_threads(workers, is_its_twin, case)


GROUPS = [(2, 2, 1), (4, 8, 2), (6, 12, 3)]
"""Workers, heads, and fewer groups of them."""


@pytest.mark.parametrize(("workers", "heads", "groups"), GROUPS)
def test_shared_groups_on_threads(workers: int, heads: int, groups: int) -> None:
    case = Case(heads=heads, groups=groups, blocks=1, sequence=workers % 4 > 0, length=8)
    on_threads(workers, is_its_twin, case)


def test_the_norm_of_shared_groups() -> None:
    on_threads(4, clips_the_norm_of_all, 2)


@needs_mpi
def test_shared_groups_on_ranks() -> None:
    on_ranks(4, is_its_twin, Case(heads=8, groups=2, blocks=1, sequence=True))


@st.composite
def cases(draw: Any) -> tuple[int, Case]:
    """Any numbers of workers, heads, groups, words of text."""
    workers = draw(st.integers(1, 8))
    groups = draw(st.integers(workers, 9))
    case = Case(
        width=draw(st.integers(1, 9)),
        heads=groups * draw(st.integers(1, 2)),
        groups=groups,
        blocks=1,
        norm=draw(st.sampled_from(["LayerNorm", "RMSNorm"])),
        bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        sequence=draw(st.booleans()),
        length=draw(st.integers(1, 9)),
        batch=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 99)),
    )
    return workers, case


@given(drawn=cases())
def test_drawn_language_models_on_threads(drawn: tuple[int, Case]) -> None:
    on_threads(drawn[0], is_its_twin, drawn[1])


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
def test_contracts_on_threads(contract: Any, workers: int) -> None:
    if workers == 8 and contract.__name__ in HEADS:
        workers = 4  # there are four heads
    on_threads(workers, contract)


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_entropies_of_large_logits_on_threads(workers: int) -> None:
    on_threads(workers, entropies_of_large_logits)


def test_beside_data_parallel_on_threads() -> None:
    on_threads(4, composes_with_data_parallel)


def test_in_debug_mode(monkeypatch: Any) -> None:
    monkeypatch.setenv("LINOP_DEBUG", "1")
    on_threads(2, is_its_twin, Case(sequence=True))
    on_threads(2, refuses_changed_norms)


ON_RANKS = [
    (is_exact, 11, False),
    (is_exact, 16, True),
    (is_its_twin, Case()),
    (is_its_twin, CASES[2]),
    (counts_as_megatron, True),
    *((contract,) for contract in CONTRACTS),
]


@needs_mpi
@pytest.mark.parametrize(
    ("ranks", "contract"),
    [(ranks, one) for k, one in enumerate(ON_RANKS) for ranks in ((2, 4) if k % 2 else (1, 3))],
    ids=lambda one: str(one) if isinstance(one, int) else one[0].__name__,
)
def test_on_ranks(ranks: int, contract: Any) -> None:
    on_ranks(ranks, *contract)


@needs_mpi
def test_beside_data_parallel_on_ranks() -> None:
    on_ranks(4, composes_with_data_parallel)


@pytest.mark.parametrize("workers", [4])
@pytest.mark.parametrize(
    "contract", [ON_RANKS[1], ON_RANKS[2], ON_RANKS[3]], ids=lambda one: one[0].__name__
)
def test_on_torchrun(contract: Any, workers: int) -> None:
    on_torchrun(workers, *contract)


WRONG = [
    (what, name)
    for what, table in zip(("pairing", "call", "plan"), (PAIRINGS, CALLS, PLANS), strict=True)
    for name in table
]
REFUSALS = pytest.mark.parametrize(
    "contract",
    [refuses_a_second_time, refuses_alone, refuses_other_nets, refuses_indices, refuses_hooks],
    ids=lambda contract: contract.__name__,
)


@pytest.mark.parametrize(("what", "name"), WRONG)
def test_refused(what: str, name: str) -> None:
    on_threads(2, refuses, what, name)


@REFUSALS
def test_refused_of_workers(contract: Any) -> None:
    on_threads(2, contract)


@needs_mpi
@pytest.mark.parametrize(("what", "name"), WRONG[::3])
def test_refused_on_ranks(what: str, name: str) -> None:
    on_ranks(2, refuses, what, name)


@needs_mpi
@REFUSALS
def test_refused_of_ranks(contract: Any) -> None:
    on_ranks(2, contract)
