"""Sums of plans that do not depend on the number of workers, their order, nor their roads."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import COPIES, Partition, TensorSpace, verify_plans
from linop.errors import ArgumentError, BackendError, DTypeError
from linop.operators.reproducible import reproducible
from linop.spaces.reproducible_sums import exact_sum, tree_sum
from support.contracts.reproducible_sums import (
    bits,
    drawn_terms,
    has_the_bits_of_one_process,
    has_them_wherever_terms_are,
    kinds,
    says_its_sums,
    total_of,
)
from support.draws import ON_RANKS
from support.job_programs import mpiexec
from support.operators.catalogue import NAMES, operators
from support.requirements import needs_mpi
from support.workers import EVERY_ROAD, on_ranks, on_threads

LARGE = 9000
"""Elements of which shares are summed."""


def copies(workers: int, size: int, dtype: Any = "float64") -> TensorSpace:
    return TensorSpace((size,), Partition((workers,)), dtype, axes=[COPIES])


@given(st.data(), kinds, st.integers(0, 2**32), st.sampled_from([3, LARGE]))
def test_exact_sums_wherever_terms_are(data: Any, kind: str, seed: int, size: int) -> None:
    """On 1 to 8 workers, of which each has some of the terms, in any order."""
    workers = data.draw(st.integers(1, 8))
    at = data.draw(st.lists(st.integers(0, workers - 1), min_size=1, max_size=9))
    root = data.draw(st.sets(st.integers(0, workers - 1), min_size=1, max_size=3))
    op = total_of(at, sorted(root), size, "float64")
    terms = drawn_terms(np.random.default_rng(seed), np.dtype("float64"), len(at), size, kind)
    exact = reproducible(op, "exact")
    verify_plans(exact)
    given_ = {f"x{k}": x for k, x in enumerate(terms)} if len(at) > 1 else terms[0]
    wanted = bits(exact_sum(*terms))
    assert bits(exact(given_)) == wanted
    assert bits(op.compile(linop.backends.get("threads"), sums="exact")(given_)) == wanted


@given(st.sampled_from(NAMES).flatmap(operators), st.sampled_from(["exact", "tree"]))
def test_it_is_the_same_operator(op: linop.LinearOperator, sums: str) -> None:
    """And so is its adjoint, and their plans are proven."""
    if op.loops or not op.clinear or op.dtype.kind not in "fc":
        return
    same = reproducible(op, sums)
    assert same.H.H is same and reproducible(op, sums) is same
    if all(call.map.matrix is not None for call in op.stages.calls):
        assert same.equals(op) and same.H.equals(op.H)
    verify_plans(same)
    verify_plans(same.H)
    x = same.domain.random(0)
    assert np.allclose(same.codomain.flatten(same(x)), op.codomain.flatten(op(x)))


def test_overlapping_sums_are_taken_cell_by_cell() -> None:
    """Sums of the adjoint of a halo exchange, where corners have more terms than edges."""
    X = TensorSpace((9, 9), Partition((3, 3)))
    op = linop.halo_exchange(X, (3, 3), padding=1).H
    exact = reproducible(op, "exact")
    (sums,) = (layer for layer in exact.stages.layers if layer)
    assert {len(call.inputs) for call in sums} == {4}
    assert exact.equals(op)
    verify_plans(exact)


@pytest.mark.parametrize("sums", ["exact", "tree"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
def test_on_threads(workers: int, sums: str) -> None:
    for size in (5, LARGE):
        on_threads(workers, has_the_bits_of_one_process, "wide", size, sums)


@needs_mpi
@pytest.mark.parametrize("road", EVERY_ROAD)
def test_on_every_road(road: str) -> None:
    for sums in ("exact", "tree"):
        on_ranks(4, has_the_bits_of_one_process, "special", LARGE, sums, **EVERY_ROAD[road])


@needs_mpi
@ON_RANKS
@given(st.data(), st.integers(1, 4), st.integers(0, 2**32), kinds)
def test_exact_sums_wherever_ranks_have_terms(data: Any, ranks: int, seed: int, kind: str) -> None:
    at = data.draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=8))
    on_ranks(ranks, has_them_wherever_terms_are, at, LARGE, seed, kind)


def test_on_processes_of_torch() -> None:
    pytest.importorskip("torch")
    from support.torchrun import on_torchrun

    for sums in ("exact", "tree"):
        on_torchrun(4, has_the_bits_of_one_process, "wide", 500, sums)


@pytest.mark.parametrize("sums", ["exact", "tree"])
def test_an_option_of_backends(sums: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linop.launch(lambda b: says_its_sums(b, sums), 4, "threads", sums=sums)
    monkeypatch.setenv("LINOP_SUMS", sums)
    on_threads(4, says_its_sums, sums)
    whole = linop.backends.get("threads")
    assert pickle.loads(pickle.dumps(whole)).sums == sums
    with pytest.raises(BackendError, match=r"sums='fixed' wanted; this program has"):
        linop.launch(lambda b: linop.backends.get("threads", sums="fixed"), 1, "threads")


@needs_mpi
def test_an_option_of_ranks() -> None:
    for sums in ("exact", "tree"):
        on_ranks(4, says_its_sums, sums, sums=sums)


OTHERS = """
def main(backend):
    Y = TensorSpace((1,), Partition((3,)), axes=[linop.COPIES])
    x = np.array([[1.0, 1e16, -1e16][backend.worker]])
    return backend.sums, linop.all_reduce(Y, [0]).compile(backend)(x)[0]


for sums, total in (("fixed", 0.0), ("exact", 1.0), ("tree", 0.0), ("fixed", 0.0)):
    assert (sums, total) in linop.launch(main, 3, sums=sums)
assert ("fixed", 0.0) in linop.launch(main, 3)
try:
    linop.backends.get(NAME, sums="tree")
except linop.errors.BackendError as error:
    assert "sums='tree' wanted; this" in str(error) and "has 'fixed'" in str(error)
else:
    raise AssertionError
"""


@needs_mpi
@pytest.mark.timeout(200)
def test_launches_with_other_sums_on_ranks(program: Path) -> None:
    job = mpiexec(3, program, "NAME = 'mpi'\n" + OTHERS)
    assert job.returncode == 0, job.stderr


@pytest.mark.timeout(200)
def test_launches_with_other_sums_on_processes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    head = "import numpy as np\nimport linop\nfrom linop import Partition, TensorSpace\n"
    file = tmp_path / "others.py"
    file.write_text(head + "NAME = 'torch'\n" + OTHERS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", str(file)]
    job = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert job.returncode == 0, job.stderr


def test_the_reference_has_the_same_bits() -> None:
    Y = copies(4, 7)
    op, x = linop.all_reduce(Y, [0]), Y.random(3)
    for sums, add in (("exact", exact_sum), ("tree", tree_sum)):
        wanted = bits(add(*x.arrays.values()))
        for name in ("reference", "threads"):
            y = op.compile(linop.backends.get(name), sums=sums)(x)
            assert {bits(one) for one in y.arrays.values()} == {wanted}


def test_sums_of_two_and_of_integers_are_the_plain_plan() -> None:
    for op in (linop.all_reduce(copies(2, 9), [0]), linop.all_reduce(copies(4, 9, "int32"), [0])):
        assert reproducible(op, "exact").stages is op.stages
    scaled = 0.3 * linop.all_reduce(copies(2, 9), [0])  # c x + y may be rounded once, or twice
    assert reproducible(scaled, "exact").stages is not scaled.stages


def test_loops_have_the_sums_of_their_backend() -> None:
    op = linop.all_reduce(copies(3, 1), [0])
    loop, terms = linop.repeat(op, 2), [1e16, 1.0, -1e16]

    def program(backend: Any) -> float:
        return float(loop.compile(backend)(np.array([terms[backend.worker]]))[0])

    assert linop.launch(program, 3, "threads", sums="exact") == [3.0] * 3
    assert linop.launch(program, 3, "threads") == [0.0] * 3


def test_an_operator_with_sums_takes_others() -> None:
    """It keeps its own on any backend, and has others where they are asked for."""
    op, terms = linop.all_reduce(copies(3, 1), [0]), [1.0, 1e16, -1e16]

    def program(backend: Any) -> list[float]:
        x = np.array([terms[backend.worker]])
        exact = reproducible(op, "exact")
        plans = [exact.compile(backend), *(exact.compile(backend, s) for s in ("fixed", "exact"))]
        plans.append(plans[0].op.compile(backend, "tree"))
        plans.append(plans[0].op.compile(backend, "fixed"))
        return [float(plan(x)[0]) for plan in plans]

    for sums in ("fixed", "tree", "exact"):
        assert linop.launch(program, 3, "threads", sums=sums)[0] == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert reproducible(reproducible(op, "exact"), "fixed") is op
    assert reproducible(reproducible(op, "exact"), "tree") is reproducible(op, "tree")


def test_they_pickle_and_copy() -> None:
    op = reproducible(linop.all_reduce(copies(4, 7), [0]), "tree")
    again, x = pickle.loads(pickle.dumps(op)), op.domain.random(0)
    assert again.equals(op) and str(again) == str(op)
    plan = op.compile(linop.backends.get("threads"))
    for one in (again, pickle.loads(pickle.dumps(plan))):
        assert all(bits(y) == bits(one(x)[name]) for name, y in op(x).arrays.items())


def test_debug_mode_proves_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINOP_DEBUG", "1")
    on_threads(4, has_the_bits_of_one_process, "wide", LARGE, "exact")


def test_what_cannot_be() -> None:
    op = linop.all_reduce(copies(3, 2), [0])
    threads = linop.backends.get("threads")
    with pytest.raises(ArgumentError, match=r"sums: fixed, exact or tree expected, given 'any'"):
        op.compile(threads, sums="any")
    with pytest.raises(DTypeError, match=r"sums='exact' is of float16, .* given longdouble|float"):
        linop.all_reduce(copies(3, 2, np.longdouble), [0]).compile(threads, sums="exact")
    loop = linop.repeat(op, 3)
    with pytest.raises(ArgumentError, match="an operator without time loops expected"):
        loop.compile(threads, sums="exact")
    with pytest.raises(ArgumentError, match="sums='fixed': an operator without time loops"):
        loop.compile(linop.backends.get("threads", sums="tree"), sums="fixed")
    with pytest.raises(ArgumentError, match="expected, given 'any'"):
        loop.compile(threads, sums="any")

    def different(backend: Any) -> None:
        op.compile(backend, sums="exact" if backend.worker else "tree")

    with pytest.raises(BackendError, match="workers built different operators"):
        linop.launch(different, 3, "threads")
