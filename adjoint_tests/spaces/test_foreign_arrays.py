"""Arrays of other packages, and numbers that a dtype does not hold, at every entry: an error that
names the cure, or the same numbers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import Partition, Region, Space, TensorSpace
from linop.errors import ArgumentError, DTypeError, LinopError, ShapeError
from linop.spaces.exact import exact
from support.contracts import vectors
from support.contracts.plans import raised

X = Space(Region("x", 3))
T = TensorSpace((3,), Partition((1,)))
KEEP = linop.identity(X)
SEVERAL = TensorSpace((6,), Partition((2,)))
SHIFT = linop.shift(SEVERAL, 1)


class OnDevice:
    """An array in device memory, as CuPy's are for NumPy: it has no conversion."""

    dtype, shape, size = np.dtype(np.float64), (3,), 3

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (3,), "typestr": "<f8", "data": (0, False), "version": 3}

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")


KEPT: dict[str, Callable[[Any], Any]] = {
    "vector": X.vector,
    "operator": KEEP,
    "plan": lambda x: linop.launch(lambda b: KEEP.compile(b)(x), 1),
    "whole plan": KEEP.compile(linop.backends.get("threads")),
    "reference": KEEP.compile(linop.backends.get("reference")),
    "backend's vector": lambda x: linop.launch(lambda b: b.vector(X, x), 1),
    "started plan": lambda x: linop.launch(lambda b: KEEP.compile(b).start(x), 1),
    "gather": lambda x: T.gather({T.regions[0].name: x}),
}
"""Entries that keep the memory of arrays, and convert none."""
COPIED = {"unflatten": X.unflatten, "scatter": T.scatter}
"""Entries that copy."""
ENTRIES = {**KEPT, **COPIED}


@pytest.mark.parametrize("where", ENTRIES)
def test_arrays_on_a_device_are_refused(where: str) -> None:
    words = raised(ArgumentError, lambda: ENTRIES[where](OnDevice()))
    assert "OnDevice given, numpy.ndarray expected; copy it to main memory with .get()" in words


@pytest.mark.parametrize("where", ENTRIES)
def test_sparse_matrices_are_refused(where: str) -> None:
    words = raised(ArgumentError, lambda: ENTRIES[where](scipy.sparse.csr_array(np.eye(3))))
    assert "csr_array given, numpy.ndarray expected; give x.toarray()" in words


@pytest.mark.parametrize("where", KEPT)
def test_operators_and_other_objects_are_refused(where: str) -> None:
    assert "Identity given, numpy.ndarray expected" in raised(
        ArgumentError, lambda: KEPT[where](KEEP)
    )
    for x in ("abc", object(), {1, 2}):
        assert "numbers of dtype float64 expected" in raised(DTypeError, lambda x=x: KEPT[where](x))
    assert "shape () given, (3,) expected" in raised(ShapeError, lambda: KEPT[where](2.0))


@pytest.mark.parametrize("where", KEPT)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int64"])
def test_tensors_of_torch_are_refused(where: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(3, dtype=getattr(torch, dtype))
    for tensor in (x, x.requires_grad_()) if x.is_floating_point() else (x,):
        words = raised(ArgumentError, lambda tensor=tensor: KEPT[where](tensor))
        assert "torch.Tensor given, numpy.ndarray expected; linop.autograd.apply(op, x)" in words


@pytest.mark.parametrize("where", COPIED)
def test_tensors_of_torch_that_convert_are_copied(where: str) -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(3, dtype=torch.float64)
    assert np.concatenate(list(COPIED[where](x).arrays.values())).tolist() == [0, 1, 2]
    for tensor in (torch.ones(3, requires_grad=True), torch.ones(3, dtype=torch.bfloat16)):
        words = raised(ArgumentError, lambda tensor=tensor: COPIED[where](tensor))
        assert "linop.autograd.apply(op, x)" in words


@pytest.mark.parametrize("make", ["diagonal", "matrix", "convolution"])
def test_tensors_that_have_gradients_are_refused_by_local_operators(make: str) -> None:
    torch = pytest.importorskip("torch")
    given = torch.ones(3, 3, requires_grad=True) if make == "matrix" else torch.ones(3)
    sides = (Space(Region("x", 3)), Space(Region("y", 5))) if make == "convolution" else ()
    words = raised(
        ArgumentError,
        lambda: getattr(linop.local_operators, make)(given.requires_grad_(), *sides),
    )
    assert f"{make}: torch.Tensor given, numpy.ndarray expected" in words


def test_a_bare_array_for_several_regions() -> None:
    plan = SHIFT.compile(linop.backends.get("threads"))
    for take in (SHIFT, plan, SEVERAL.vector):
        words = raised(ArgumentError, lambda take=take: take(np.ones(6)))
        assert "X.scatter(x), which divides a global array" in words
    words = raised(
        ArgumentError, lambda: Space([Region("a", 1), Region("b", 2)]).vector(np.ones(3))
    )
    assert "a dict by region name (a, b), or the Vector X.unflatten(x)" in words

    def main(backend: Any) -> None:
        words = raised(ShapeError, lambda: SHIFT.compile(backend)(np.ones(6)))
        assert "(6,) given, (3,) expected; X.scatter(x) divides a global array" in words

    linop.launch(main, 2)


def test_vectors_are_vectors() -> None:
    v = X.random(0)
    assert X.vector(v) is v
    assert T.gather(T.scatter(v)).tolist() == v["x"].tolist()
    with pytest.raises(LinopError, match="the spaces differ"):
        X.vector(T.zeros())
    with pytest.raises(ArgumentError, match=r"X\.gather\(v\)"):
        SEVERAL.scatter(SEVERAL.zeros())


# Casts

WIDE = ("int64", "uint64", "int8", "float64", "float16", "complex128", "bool")


def numbers_of(name: str) -> st.SearchStrategy[Any]:
    if name == "bool":
        return st.booleans()
    if name.startswith(("int", "uint")):
        info = np.iinfo(name)
        edges = [k + d for k in (0, 2**7, 2**15, 2**24, 2**31, 2**53, 2**63) for d in (-1, 0, 1)]
        fit = [k for k in edges if info.min <= k <= info.max]
        return st.sampled_from(fit) | st.integers(int(info.min), int(info.max))
    if name == "complex128":
        return st.complex_numbers(allow_nan=False, allow_infinity=False)
    return st.floats(width=16 if name == "float16" else 64, allow_nan=False)


def holds(value: Any, found: Any, dtype: np.dtype[Any]) -> bool:
    """True if a conversion has kept a number: integers exactly, others rounded to nearest."""
    if isinstance(value, int | np.integer | np.bool_):
        return bool(np.isfinite(found)) and bool(exact(found) == int(value))
    if not np.isfinite(value):
        return bool(found == value)
    part = np.zeros((), dtype).real.dtype
    tiny, eps = (
        Fraction(float(np.finfo(part).smallest_subnormal)),
        Fraction(2) ** -np.finfo(part).nmant,
    )
    for a, b in ((value.real, found.real), (value.imag, found.imag)):
        if not np.isfinite(b):
            return False
        error = abs(Fraction(float(a)) - Fraction(float(b)))
        if error > max(tiny, abs(Fraction(float(a))) * eps) / 2:
            return False
    return True


@given(st.sampled_from(WIDE), st.sampled_from(vectors.INTEGERS + vectors.FLOATS[:6]), st.data())
def test_flat_vectors_keep_their_numbers_or_are_refused(
    given_: str, name: str, data: st.DataObject
) -> None:
    values = np.array(data.draw(st.lists(numbers_of(given_), min_size=3, max_size=3)), given_)
    dtype = np.dtype(name)
    space = Space(Region("x", 3), dtype)
    rank = {"b": 0, "u": 0, "i": 0, "f": 1, "c": 2}
    fits = rank[values.dtype.kind] <= rank[dtype.kind]
    if fits:
        with np.errstate(all="ignore"):
            fits = all(
                holds(v, f, dtype) for v, f in zip(values, values.astype(dtype), strict=True)
            )
    if not fits:
        for take in (space.unflatten, lambda x: linop.identity(space).to_scipy() @ x):
            with pytest.raises(DTypeError, match=f"{dtype}"):
                take(values)
        return
    found = space.unflatten(values)["x"]
    assert found.dtype == dtype
    assert all(holds(v, f, dtype) for v, f in zip(values, found, strict=True))
    through = linop.identity(space).to_scipy() @ values
    assert through.tolist() == found.tolist()
    assert space.flatten(space.vector(found)).tolist() == found.tolist()


@pytest.mark.parametrize(
    ("name", "low", "high"), [("int8", 0, 300), ("float16", 2049, 2049), ("uint16", 0, 2**17)]
)
def test_whole_numbers_that_a_dtype_lacks(name: str, low: int, high: int) -> None:
    with pytest.raises(DTypeError, match=f"of which {name} does not hold every number"):
        Space(Region("x", 99), name).integers(0, low, high)
    with pytest.raises(ArgumentError, match="<= low <= high <"):
        X.integers(0, 3, 2)


# Pickles


@given(st.sampled_from(["threads", "reference"]), st.integers(1, 3), st.booleans())
def test_plans_of_one_process_and_scipy_s_operators_pickle(
    name: str, workers: int, adjoint: bool
) -> None:
    space = TensorSpace((6,), Partition((workers,)), "complex128")
    op = linop.shift(space, 1) + 1j * linop.identity(space)
    op = op.H if adjoint else op
    x = space.random(0)
    plan = op.compile(linop.backends.get(name))
    assert pickle.loads(pickle.dumps(plan))(x).equals(plan(x))
    assert pickle.loads(pickle.dumps(plan.H))(x).equals(plan.H(x))
    assert copy.deepcopy(plan) is plan
    flat, wanted = space.flatten(x), op.to_scipy()
    for made, other in ((wanted, op), (wanted.H, op.H), (wanted.T, op.T)):
        found = pickle.loads(pickle.dumps(made))
        assert (found @ flat == space.flatten(other(x))).all()
        assert (found.rmatvec(flat) == space.flatten(other.H(x))).all()


def test_a_worker_s_plan_names_what_to_pickle() -> None:
    def main(backend: Any) -> None:
        plan = SHIFT.compile(backend)
        for each in (plan, plan.H):
            words = raised(ArgumentError, lambda each=each: pickle.dumps(each))
            assert "cannot be pickled" in words
            assert "pickle its operator, plan.op" in words
        assert copy.copy(plan) is plan
        assert pickle.loads(pickle.dumps(plan.op)).equals(SHIFT)

    linop.launch(main, 2)
