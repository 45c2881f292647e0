"""Local operators, against NumPy, SciPy and loops; and what they make with movement around them.

Whole numbers, compared with ``==``. Only Fourier transforms round, in SciPy's convolutions too
where it takes those for faster: `rounding` is allowed there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pylops
import pytest
import scipy.signal
import scipy.sparse
import scipy.sparse.linalg
from hypothesis import example, given
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Region, Space
from linop.errors import LinopError
from linop.testing import check_adjoint, check_exact
from linop.testing.describing import (
    COMPLEX,
    COMPUTED,
    HALVES,
    Description,
    box_in,
    boxes,
    dtype_of,
    holders,
    seeds,
    shapes,
    space_of,
    whole_numbers,
)
from support.operators.catalogue import describe
from support.operators.properties import (
    backend_agrees,
    conjugates,
    interpretation,
    rounding,
    same_arrays,
    same_matrices,
    two_roads,
)

WORKERS = 4


def is_matrix(op: LinearOperator, wanted: np.ndarray, tolerance: float = 0.0) -> None:
    """An operator is a matrix: as it is known, forward and back, here and on threads."""
    assert op.shape == wanted.shape
    same_matrices(op.to_matrix(), scipy.sparse.csr_array(wanted), tolerance)
    two_roads(op, tolerance)
    interpretation(op, tolerance=tolerance)
    backend_agrees(op, tolerance=tolerance)
    conjugates(op, tolerance)
    for report in (check_adjoint(op), check_adjoint(op.H), check_exact(op)):
        assert report, str(report)


def columns(op: LinearOperator) -> np.ndarray:
    """The matrix by applying the operator to unit vectors."""
    units = np.eye(op.domain.size, dtype=op.dtype)
    results = [op.codomain.flatten(op(op.domain.unflatten(unit))) for unit in units]
    return np.reshape(results, op.shape[::-1]).T


def wide(values: np.ndarray) -> np.ndarray:
    """The same numbers in a dtype in which sums of products are exact."""
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


# Matrices, functions, and operators of other libraries


@st.composite
def sides(draw: st.DrawFn) -> tuple[Space, Space, np.ndarray]:
    """Two spaces on the same workers, and a matrix between them."""
    described = draw(describe("dense_matrix", WORKERS))
    domain, codomain = space_of(described["domain"]), space_of(described["codomain"])
    values = whole_numbers((codomain.size, domain.size), domain.dtype, described["seed"])
    return domain, codomain, values


FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    "dense": lambda A: A,
    "Fortran": np.asfortranarray,
    "csr": scipy.sparse.csr_array,
    "csc": scipy.sparse.csc_array,
    "coo": scipy.sparse.coo_array,
    "old sparse": scipy.sparse.csr_matrix,
}


C2, C3 = (Space(Region(name, n), np.complex128) for name, n in (("x", 2), ("y", 3)))


@example((C2, C3, np.array([[1, 2j], [1 - 1j, 0], [2, -1j]])), "dense")
@given(sides(), st.sampled_from(sorted(FORMS)))
def test_matrices(drawn: Any, form: str) -> None:
    domain, codomain, A = drawn
    op = linop.local_operators.matrix(FORMS[form](A), domain, codomain)
    is_matrix(op, wide(A))
    assert op.equals(linop.local_operators.matrix(A, domain, codomain))
    assert op.H.equals(linop.local_operators.matrix(A.conj().T, codomain, domain))
    assert linop.local_operators.from_scipy(FORMS[form](A), domain, codomain).equals(op)


def test_a_matrix_alone_is_on_worker_0() -> None:
    op = linop.local_operators.matrix([[1, 2, 3], [4, 5, 6]])
    assert op.domain == Space(Region("x", 3), int)
    assert op.codomain == Space(Region("y", 2), int)
    same_arrays(op(np.array([1, 0, -1])), np.array([-2, -2]))
    same_arrays(op.H(np.array([1, 1])), np.array([5, 7, 9]))


def pair(A: np.ndarray, domain: Space, codomain: Space, B: np.ndarray | None = None) -> Any:
    """A matrix as two functions of bare arrays, dicts, or None; B in place of the adjoint."""
    back = A.conj().T if B is None else B

    def applied(M: np.ndarray, source: Space, target: Space) -> Callable[[Any], Any]:
        def apply(x: Any) -> Any:
            assert isinstance(x, dict) is (len(source) > 1)
            flat = source.flatten(source.vector({} if x is None else x))
            arrays = target.unflatten(M @ flat).arrays
            return next(iter(arrays.values())) if len(arrays) == 1 else arrays

        return apply

    functions = applied(A, domain, codomain), applied(back, codomain, domain)
    return linop.local(domain, codomain, *functions, name="L")


@given(sides())
def test_pairs_of_functions(drawn: Any) -> None:
    domain, codomain, A = drawn
    is_matrix(pair(A, domain, codomain), wide(A))


@given(sides(), st.data())
def test_a_wrong_adjoint_is_found(drawn: Any, data: st.DataObject) -> None:
    domain, codomain, A = drawn
    B = A.conj().T.copy()
    if not B.size:
        return
    B[tuple(data.draw(st.integers(0, n - 1)) for n in B.shape)] += 1
    op = pair(A, domain, codomain, B)
    assert not check_adjoint(op)
    assert not check_exact(op)
    assert not check_adjoint(op, "threads")
    assert check_adjoint(pair(A, domain, codomain))


@given(sides())
def test_scipy_operators(drawn: Any) -> None:
    domain, codomain, A = drawn
    op = scipy.sparse.linalg.LinearOperator(
        A.shape, lambda x: A @ x, lambda y: A.conj().T @ y, dtype=A.dtype
    )
    is_matrix(linop.local_operators.from_scipy(op, domain, codomain), wide(A))


@given(st.integers(2, 6), st.sampled_from(("float64", "complex128")), seeds, holders(WORKERS))
def test_pylops_operators(size: int, dtype: str, seed: int, to: tuple[int, ...]) -> None:
    A = whole_numbers((3, size), dtype, seed)
    M, D = (
        pylops.MatrixMult(A, dtype=dtype),
        pylops.FirstDerivative(size, kind="forward", dtype=dtype),
    )
    difference = np.diff(np.eye(size), axis=0, append=np.eye(size)[-1:])
    x = Space(Region("x", size, to), dtype)
    is_matrix(linop.local_operators.from_scipy(M, x), A)
    is_matrix(linop.local_operators.from_scipy(M @ D.H - 2 * M, x), A @ difference.T - 2 * A)
    assert linop.local_operators.from_scipy(M).domain == Space(Region("x", size), dtype)
    assert str(linop.local_operators.from_scipy(M)) == "MatrixMult"


@st.composite
def regions(draw: st.DrawFn, dtypes: Sequence[str] = COMPUTED, most: int = 4) -> Space:
    """A space of one region, which several workers may hold."""
    shape = draw(shapes(draw(st.integers(0, 3)), most))
    return Space(
        Region("x", shape, draw(holders(WORKERS))), dtype_of(draw(st.sampled_from(dtypes)))
    )


@given(regions(), seeds)
def test_diagonals(space: Space, seed: int) -> None:
    d = whole_numbers(space["x"].shape, space.dtype, seed)
    is_matrix(linop.local_operators.diagonal(d, space), np.diag(wide(d).ravel()))
    same_arrays(linop.local_operators.diagonal(d)(np.full_like(d, 3)), np.asarray(3 * d))


@given(regions(), st.data())
def test_restrictions_to_a_subset(space: Space, data: st.DataObject) -> None:
    x = space["x"]
    keep = box_in(x, data.draw(boxes(x.shape)))
    op = linop.local_operators.restriction(space, keep)
    assert op.codomain["x'"] == Region("x'", keep.shape, x.workers)
    kept = np.arange(x.size).reshape(x.shape)[keep.index].ravel()
    is_matrix(op, np.eye(x.size)[kept])


@given(regions(), st.data())
def test_restrictions_to_indices(space: Space, data: st.DataObject) -> None:
    """Negative ones, and the same more than once."""
    n = space.size
    numbers = st.lists(st.integers(-n, n - 1), max_size=6) if n else st.just([])
    keep = np.array(data.draw(numbers), data.draw(st.sampled_from([np.int8, np.int64])))
    is_matrix(linop.local_operators.restriction(space, keep), np.eye(n)[keep])
    square = linop.local_operators.restriction(space, keep[: 2 * (len(keep) // 2)].reshape(2, -1))
    assert square.codomain["x'"].shape == (2, len(keep) // 2)
    is_matrix(square, np.eye(n)[keep[: square.codomain.size]])


@given(st.sampled_from("bBhHiIqQ"), st.integers(0, 99))
def test_restrictions_to_indices_of_short_dtypes(dtype: str, index: int) -> None:
    """A region of more elements than the dtype of its indices counts."""
    op = linop.local_operators.restriction(Region("x", 300), np.array([index, 0], dtype))
    assert op(np.arange(300.0)).tolist() == [index, 0]


@given(regions(COMPLEX, 3), seeds)
def test_fourier_transforms(space: Space, seed: int) -> None:
    F, x = linop.local_operators.fft(space), space.integers(seed)["x"]
    wanted = np.ones((1, 1))
    for n in space["x"].shape:
        at = np.arange(n)
        wanted = np.kron(wanted, np.exp(-2j * np.pi * np.outer(at, at) / n) / np.sqrt(n or 1))
    is_matrix(F, wanted, 4 * rounding(F))
    transformed = np.fft.fftn(x, norm="ortho") if x.ndim and x.size else x
    same_arrays(F(x), np.asarray(transformed, space.dtype), rounding(F))
    same_arrays(F.H(F(x)), x, rounding(F))


# Convolution


def slid(x: np.ndarray, kernel: np.ndarray, described: Description) -> np.ndarray:
    """The sliding product, term by term."""
    pads = list(zip(described["left"], described["padding"], strict=True))
    padded = np.pad(x, pads)
    stride, dilation = described["stride"], described["dilation"]
    rows = zip(padded.shape, kernel.shape, stride, dilation, strict=True)
    y = np.zeros([(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in rows], x.dtype)
    for out, at in itertools.product(np.ndindex(y.shape), np.ndindex(kernel.shape)):
        row = zip(out, stride, at, dilation, strict=True)
        y[out] += kernel[at] * padded[tuple(o * s + k * d for o, s, k, d in row)]
    return y


def correlated(x: np.ndarray, kernel: np.ndarray, described: Description) -> np.ndarray:
    """The same by SciPy: the kernel spread out, and every so many results taken."""
    dilation = described["dilation"]
    spread = np.zeros(
        [d * (k - 1) + 1 for k, d in zip(kernel.shape, dilation, strict=True)], x.dtype
    )
    spread[tuple(slice(None, None, d) for d in dilation)] = kernel.conj()
    padded = np.pad(x, list(zip(described["left"], described["padding"], strict=True)))
    y = scipy.signal.correlate(padded, spread, "valid", "direct")
    return y[tuple(slice(None, None, s) for s in described["stride"])]


@st.composite
def convolutions(draw: st.DrawFn) -> Description:
    """A kernel and where it slides, in 1 to 3 dimensions."""
    ndim = draw(st.integers(1, 3))
    most = (4, 3, 2)[ndim - 1]

    def numbers(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(least, most)) for _ in range(ndim))

    drawn = {"kernel": numbers(1, most), "stride": numbers(1, 3), "dilation": numbers(1, 2)}
    drawn |= {"left": numbers(0, 2), "padding": numbers(0, 2)}
    rows = zip(*drawn.values(), numbers(0, 3), strict=True)
    drawn["shape"] = tuple(max(0, d * (k - 1) + 1 - a - b) + n for k, _, d, a, b, n in rows)
    return {**drawn, "dtype": draw(st.sampled_from(COMPUTED))}


@given(convolutions(), holders(WORKERS), seeds)
def test_convolutions(described: Description, to: tuple[int, ...], seed: int) -> None:
    kernel = whole_numbers(described["kernel"], described["dtype"], seed)
    x = whole_numbers(described["shape"], described["dtype"], seed + 1, 9)
    wanted = slid(x, kernel, described)
    same_arrays(correlated(x, kernel, described), wanted)
    domain = Space(Region("x", x.shape, to), x.dtype)
    codomain = Space(Region("y", wanted.shape, to), x.dtype)
    pads = list(zip(described["left"], described["padding"], strict=True))
    options = {"stride": described["stride"], "dilation": described["dilation"], "padding": pads}
    op = linop.local_operators.convolution(kernel, domain, codomain, **options)
    same_arrays(op(x), wanted, rounding(op))
    units = np.eye(x.size, dtype=x.dtype).reshape(x.size, *x.shape)
    rows = [slid(unit, kernel, described).ravel() for unit in units]
    matrix = wide(np.reshape(rows, op.shape[::-1]).astype(x.dtype).T)
    same_matrices(op.to_matrix(), scipy.sparse.csr_array(matrix))
    is_matrix(op, matrix, rounding(op))


def test_one_number_stands_for_every_dimension() -> None:
    kernel, x, y = whole_numbers((2, 2), float, 0), Region("x", (5, 6)), Region("y", (3, 3))
    op = linop.local_operators.convolution(kernel, x, y, stride=2, padding=1, dilation=2)
    options = {"stride": (2, 2), "padding": [(1, 1), (1, 1)], "dilation": (2, 2)}
    assert op.equals(linop.local_operators.convolution(kernel, x, y, **options))
    assert linop.local_operators.convolution(
        kernel, x, y, stride=2, padding=(1, 1), dilation=2
    ).equals(op)


def test_a_kernel_without_dimensions_scales() -> None:
    op = linop.local_operators.convolution(np.array(2.0), Region("x", ()), Region("y", ()))
    same_arrays(op(np.array(3.0)), np.array(6.0))


@pytest.mark.parametrize(("size", "padding"), [(0, 0), (2, -1)])
def test_kernels_that_cannot_be(size: int, padding: int) -> None:
    x, y = Region("x", 4), Region("y", max(0, 5 - size + 2 * padding))
    with pytest.raises(LinopError):
        linop.local_operators.convolution(np.ones(size), x, y, padding=padding)(np.ones(4))


def test_padding_may_be_a_numpy_number() -> None:
    options = {"padding": np.int64(1)}
    op = linop.local_operators.convolution(np.ones(2), Region("x", 4), Region("y", 5), **options)  # type: ignore[arg-type]
    same_arrays(op(np.ones(4)), np.array([1.0, 2, 2, 2, 1]))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["matrix", "diagonal", "restriction", "local"])
def test_matrices_of_half_precision(kind: str, dtype: str) -> None:
    """SciPy has no such sparse matrices; `to_matrix` gives them in double precision."""
    space, values = Space(Region("x", 2), dtype_of(dtype)), np.eye(2).astype(dtype_of(dtype))
    op = {
        "matrix": lambda: linop.local_operators.matrix(values, space, space),
        "diagonal": lambda: linop.local_operators.diagonal(values[0] + values[1], space),
        "restriction": lambda: linop.local_operators.restriction(space, [0, 1]),
        "local": lambda: pair(values, space, space),
    }[kind]()
    same_arrays(op.to_matrix().toarray(), np.eye(2))
    same_arrays(columns(op), values)
