"""Operators inside torch's autograd: derivatives of all operators where one process holds all
workers, and the contracts of `support.contracts.autograd` and `support.contracts.autograd_errors`
on threads and on ranks."""

from __future__ import annotations

import copy
import gc
import importlib.util
import math
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

import linop
from linop import LinearOperator, Partition, Region, Space, TensorSpace
from linop.errors import ArgumentError, DeadlockError, DTypeError
from support.contracts import autograd as autograd_contracts
from support.contracts import autograd_errors, mpi_plans
from support.contracts.autograd import apply, tensor
from support.operators.catalogue import FACTORIES, build, describe
from support.operators.properties import rounding
from support.requirements import needs_mpi
from support.workers import in_job, on_ranks

CONTRACTS = autograd_contracts.CONTRACTS + autograd_errors.CONTRACTS
names = ["-".join([contract.__name__, *map(str, rest)]) for contract, rest in CONTRACTS]
contracts = pytest.mark.parametrize(("contract", "arguments"), CONTRACTS, ids=names)
BAD = [(what, False) for what in autograd_errors.bad_tensors(0)]
BAD += [(what, True) for what in ("dtype", "shape", "sparse", "none")]
bad = pytest.mark.parametrize(("what", "later"), BAD)
WITHOUT_TENSORS = [*map(np.dtype, ("longdouble", "clongdouble", "uint16", "uint32", "uint64"))]
"""Dtypes of which torch has no tensors, or none to compute with."""


# SPMD programs


@contracts
def test_on_threads(contract: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    linop.launch(lambda b: contract(b, *arguments), 3)


@bad
def test_bad_tensors_on_threads(what: str, later: bool) -> None:
    linop.launch(lambda b: autograd_errors.bad_tensors_fail_everywhere(b, what, 0, later), 2)


def test_passes_that_cross_do_not_end_well() -> None:
    with pytest.raises(DeadlockError, match=r"to make call [12] of plan"):
        linop.launch(autograd_errors.a_pass_that_crosses_with_the_last_call, 2)


@needs_mpi
def test_forward_mode_on_ranks() -> None:
    on_ranks(2, autograd_contracts.forward_mode)


@needs_mpi
def test_no_new_communicators() -> None:
    in_job(2, mpi_plans.makes_no_communicators)


@needs_mpi
@pytest.mark.timeout(300)
@contracts
def test_on_ranks(contract: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    on_ranks(2, contract, *arguments, wait_limit=10)


@needs_mpi
@bad
def test_bad_tensors_on_ranks(what: str, later: bool) -> None:
    contract = autograd_errors.bad_tensors_fail_everywhere
    on_ranks(2, contract, what, 1, later, wait_limit=10)


def test_the_backend_is_that_of_the_program() -> None:
    op = linop.shift(TensorSpace((4,), Partition((2,))), 1)

    def main(backend: linop.backends.Backend) -> Any:
        assert linop.backends.current() is backend
        return apply(op, torch.full((2,), float(backend.worker), dtype=torch.float64)).tolist()

    for backend in ("threads", "reference", "threads"):
        assert linop.launch(main, 2, backend) == [[1, 1], [0, 0]]
    assert linop.backends.current().worker is None
    assert len(op.kept) == 2  # those of programs that have ended are gone


# One process with all workers


def applied(op: LinearOperator) -> tuple[Callable[..., Any], list[Any]]:
    """A function of tensors, and where to differentiate it."""
    names = [region.name for region in op.domain]

    def f(*tensors: Any) -> Any:
        y = apply(op, dict(zip(names, tensors, strict=True)))
        return tuple(y.values()) if isinstance(y, dict) else y

    vector = op.domain.random(0)
    return f, [tensor(vector[name], True) for name in names]


@given(data=st.data())
def test_derivatives_of_all_operators(data: st.DataObject) -> None:
    """Of first and second order, backward and forward, against finite differences."""
    name = data.draw(st.sampled_from([n for n in FACTORIES if FACTORIES[n].exact]))
    op = build(name, data.draw(describe(name, 3)))
    double = op.dtype.name in ("float64", "complex128")
    # torch's checks want a tensor, and take no empty ones.
    if not double or not 0 < op.domain.size <= 12 or not all(map(math.prod, shapes(op))):
        return
    f, xs = applied(op)
    assert torch.autograd.gradcheck(f, xs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, xs, check_fwd_over_rev=True, fast_mode=True)


def test_derivatives_of_several_regions() -> None:
    """Each region has its own gradient and tangent: those of the others are drawn too seldom."""
    first, second = Region("x", (2,)), Region("y", (2,))
    f, xs = applied(linop.add(Space([first, second]), first, second))
    assert torch.autograd.gradcheck(f, xs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, xs, check_fwd_over_rev=True)


def shapes(op: LinearOperator) -> list[tuple[int, ...]]:
    return [r.shape for space in (op.domain, op.codomain) for r in space] or [(0,)]


@settings(max_examples=60)
@given(data=st.data())
def test_values_of_all_operators(data: st.DataObject) -> None:
    """In every dtype of torch: forward is the operator, the gradient its adjoint."""
    name = data.draw(st.sampled_from(list(FACTORIES)))
    op = build(name, data.draw(describe(name, 3)))
    if op.dtype in WITHOUT_TENSORS:
        with pytest.raises(DTypeError, match="are float64"):
            apply(op, {})
        return
    x, y = op.domain.integers(1), op.codomain.integers(2)
    inputs = {n: tensor(a) for n, a in x.arrays.items()}
    real = op.dtype.kind in "iu"
    for one in inputs.values():
        one.requires_grad_(not real)
    results = apply(op, inputs)
    results = results if isinstance(results, dict) else dict(zip(y.arrays, [results], strict=False))
    forward, backward = op(x), op.H(y)
    tolerance = 0.0 if FACTORIES[name].exact else rounding(op)
    for n, result in results.items() if y.arrays else ():
        close(result.detach(), tensor(forward[n]), tolerance)
    if real or not y.arrays:
        return
    seeds = [tensor(y[n]) for n in results]
    torch.autograd.backward(list(results.values()), seeds)
    for n, one in inputs.items():
        close(one.grad, tensor(backward[n]), tolerance)


def close(given: Any, wanted: Any, tolerance: float) -> None:
    assert (given.shape, given.dtype) == (wanted.shape, wanted.dtype)
    if tolerance and wanted.numel():
        scale = max(1.0, float(wanted.abs().max()))
        assert float((given - wanted).abs().max()) <= tolerance * scale
    else:
        assert torch.equal(given, wanted), (given, wanted)


def test_close_can_fail() -> None:
    one = torch.ones(2)
    for other, tolerance in ((one + 1, 0.25), (one + 1e-3, 0), (one.double(), 1), (one[:1], 1)):
        with pytest.raises(AssertionError):
            close(one, other, tolerance)


def test_same_can_fail() -> None:
    one = torch.ones(2)
    for other in (one + 1, one.double(), one[:1], {"x": one}):
        with pytest.raises(AssertionError):
            autograd_contracts.same(one, other)
    for pair in (({"x": one}, {"y": one}), ({"x": one}, {"x": 2 * one}), (None, None)):
        with pytest.raises(AssertionError):
            autograd_contracts.same(*pair)


HALO = linop.halo_exchange(TensorSpace((6,), Partition((2,))), 3, padding=1)


def test_transforms() -> None:
    """torch.func's transforms, nested too; vmap slice by slice, with none of them at all."""
    op = 2 * HALO
    matrix = torch.from_numpy(op.to_matrix().toarray())
    names = [region.name for region in op.domain]

    def f(x: Any) -> Any:
        return torch.cat(list(apply(op, dict(zip(names, x.split(3), strict=True))).values()))

    x = torch.arange(6.0, dtype=torch.float64)
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        assert torch.equal(jacobian(f)(x), matrix)
    square: Any = torch.func.hessian(lambda x: (f(x) ** 2).sum() / 2)(x)
    assert torch.equal(square, matrix.T @ matrix)
    value, tangent = torch.func.jvp(f, (x,), (x + 1,))
    assert torch.equal(value, matrix @ x) and torch.equal(tangent, matrix @ (x + 1))
    many = torch.arange(24.0, dtype=torch.float64).reshape(4, 6)
    assert torch.equal(torch.func.vmap(f)(many), many @ matrix.T)
    assert torch.equal(torch.func.vmap(f, in_dims=1, out_dims=1)(many.T), matrix @ many.T)
    assert torch.func.vmap(f)(many[:0]).shape == (0, len(matrix))
    gradients = torch.func.vmap(torch.func.grad(lambda x: f(x).sin().sum()))(many)
    right = [matrix.T @ torch.cos(matrix @ row) for row in many]
    assert torch.allclose(gradients, torch.stack(right), rtol=1e-15)  # of cos, vectorised or not


def test_one_of_several_regions_is_batched() -> None:
    x, y = torch.ones(3, dtype=torch.float64), torch.ones((2, 3), dtype=torch.float64)
    a, b = (region.name for region in HALO.domain)
    results = torch.func.vmap(lambda y: apply(HALO, {a: x, b: y}))(y)
    assert [result.shape for result in results.values()] == [(2, 4), (2, 4)]


def test_compiled() -> None:
    """torch.compile leaves one break at an operator, and computes the same."""
    explained = torch._dynamo.explain(lambda x: (apply(TOTAL, {"x": x + 1}) * 2).sin())(XS)
    assert explained.graph_break_count == 1, explained

    @torch.compile(backend="aot_eager")
    def f(x: Any) -> Any:
        return (apply(TOTAL, {"x": x + 1}) * 2).sin()

    x, y = XS.clone().requires_grad_(), XS.clone().requires_grad_()
    f(x).sum().backward()
    (apply(TOTAL, {"x": y + 1}) * 2).sin().sum().backward()
    assert torch.allclose(x.grad, y.grad, rtol=1e-14)


TOTAL = 3 * linop.identity(Space([Region("x", 4)]))
XS = torch.arange(4.0, dtype=torch.float64)


def test_modules() -> None:
    """A module prints its operator, is copied and pickled, and has no state."""
    module = linop.autograd.Module(TOTAL)
    assert torch.equal(module(XS), 3 * XS)
    assert str(module) == f"Module({TOTAL})"
    assert copy.deepcopy(module).op is TOTAL
    again = pickle.loads(pickle.dumps(module))  # and nothing of the plans in it
    assert again.op.equals(TOTAL) and torch.equal(again(XS), 3 * XS)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4).double(), module)
    assert torch.equal(copy.deepcopy(model)(XS), model(XS))
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    assert torch.equal(
        linop.autograd.Module(TOTAL.compile(linop.backends.get("threads")))(XS), 3 * XS
    )


def test_plans_go_with_their_operator() -> None:
    op = 2 * linop.identity(Space([Region("x", 4)]))
    apply(op, XS.clone().requires_grad_()).sum().backward()
    gone = weakref.ref(op), weakref.ref(op.kept[linop.backends.current()].plan)
    y = apply(op, XS.clone().requires_grad_())
    del op
    gc.collect()
    y.sum().backward()  # the graph still has it
    del y
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_results_share_memory_with_arrays() -> None:
    """A plan reads the tensor's own memory, and the result is the plan's own."""
    seen: list[np.ndarray] = []

    def watch(x: np.ndarray) -> np.ndarray:
        seen.append(x)
        return x

    r = Region("r", 4)
    op = linop.local(r, r, watch, watch)
    apply(op, XS)
    assert np.shares_memory(seen[0], XS.numpy())
    apply(op, XS).sum().backward()
    assert [a.strides for a in seen] == [(8,), (8,), (0,)]  # an expanded gradient is not copied
    assert apply(op, XS).grad_fn.saved_tensors == ()


def test_what_is_no_operator_is_refused() -> None:
    with pytest.raises(ArgumentError, match="LinearOperator or a plan expected, given 3"):
        apply(3, XS)
    long = linop.identity(Space([Region("x", 4)], np.longdouble))
    with pytest.raises(DTypeError, match=r"tensors of linop.autograd are float64, float32"):
        apply(long, XS)


def test_torch_is_imported_when_it_is_asked_for() -> None:
    program = (
        "import sys, linop\n"
        "assert 'torch' not in sys.modules\n"
        "sys.modules['torch'] = None\n"
        "try: linop.autograd\n"
        "except linop.errors.MissingExtraError as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "linop.autograd needs torch: pip install 'linop-algebra[torch]'" in run.stdout
