"""Coefficients are exact: against dense matrices of fractions, in plain Python.

The model knows nothing of linop's numbers: a complex one is a pair of fractions, an integer one a
residue, and a sum or a product is done entry by entry.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Region, Space
from linop.backends import Backend
from linop.errors import ArgumentError, DTypeError, UndecidableError
from linop.testing import code
from support.operators.properties import plans_fit, run_spmd, same_vectors, whole_vector

# The model

Pair = tuple[Fraction, Fraction]
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
REALS = ("float32", "float64")
COMPLEX = ("complex64", "complex128")


@dataclass(frozen=True)
class Dense:
    """A matrix of pairs of fractions; the real part modulo 2^bits for integers."""

    entries: tuple[tuple[Pair, ...], ...]
    dtype: np.dtype[Any]

    def _made(self, entry: Callable[[int, int], Pair]) -> Dense:
        n = range(len(self.entries))
        return Dense(tuple(tuple(self._kept(entry(i, j)) for j in n) for i in n), self.dtype)

    def _kept(self, number: Pair) -> Pair:
        if self.dtype.kind not in "iu":
            return number
        modulus, top = 2 ** (8 * self.dtype.itemsize), int(np.iinfo(self.dtype).max)
        residue = int(number[0]) % modulus
        return Fraction(residue - modulus if residue > top else residue), Fraction(0)

    def __add__(self, other: Dense) -> Dense:
        return self._made(lambda i, j: _sum([self.entries[i][j], other.entries[i][j]]))

    def __matmul__(self, other: Dense) -> Dense:
        n = range(len(self.entries))
        return self._made(
            lambda i, j: _sum([_times(self.entries[i][k], other.entries[k][j]) for k in n])
        )

    def times(self, number: Pair) -> Dense:
        return self._made(lambda i, j: _times(number, self.entries[i][j]))

    @property
    def H(self) -> Dense:
        return self._made(lambda i, j: (self.entries[j][i][0], -self.entries[j][i][1]))


def _sum(numbers: list[Pair]) -> Pair:
    return sum((a for a, _ in numbers), Fraction(0)), sum((b for _, b in numbers), Fraction(0))


def _times(a: Pair, b: Pair) -> Pair:
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


def pair(number: Any) -> Pair:
    """A scalar as the model has it."""
    if isinstance(number, complex):
        return Fraction(number.real), Fraction(number.imag)
    return Fraction(number), Fraction(0)


def entries(op: LinearOperator) -> Dense:
    """The matrix that the transfers of an operator say."""
    n = op.domain.size
    found = [[(Fraction(0), Fraction(0))] * n for _ in range(n)]
    for transfer in op.movement():
        c: Any = transfer.coefficient
        target, source = transfer.target, transfer.source
        boxes = (product(*(range(s.start, s.stop) for s in p.slices)) for p in (target, source))
        for (i,), (j,) in zip(*boxes, strict=True):
            row = op.codomain.offsets[target.region.name] + i
            column = op.domain.offsets[source.region.name] + j
            found[row][column] = _sum([found[row][column], (Fraction(c.real), Fraction(c.imag))])
    return Dense(tuple(map(tuple, found)), op.dtype)


# What is drawn

a, b = Region("a", 2), Region("b", 1, 1)
Drawn = tuple[LinearOperator, Dense]


def leaf(kind: str, dtype: str) -> Drawn:
    """I, a sum into another region, or a part cleared; and the matrix, on (a0, a1, b0)."""
    space = Space([a, b], dtype)
    ops = {
        "I": (linop.identity(space), ((0, 0), (1, 1), (2, 2))),
        "S": (linop.add(space, a[0:1], b), ((0, 0), (1, 1), (2, 2), (2, 0))),
        "T": (linop.add(space, b, a[1:2]), ((0, 0), (1, 1), (2, 2), (1, 2))),
        "K": (linop.clear(space, a[1:2]), ((0, 0), (2, 2))),
    }
    op, ones = ops[kind]
    rows = tuple(tuple((Fraction((i, j) in ones), Fraction(0)) for j in range(3)) for i in range(3))
    return op, Dense(rows, np.dtype(dtype))


def scalars(dtype: str) -> st.SearchStrategy[Any]:
    """Huge, tiny and subnormal floats, fractions, and the ends of the integers."""
    kind = np.dtype(dtype).kind
    if kind in "iu":
        low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        return st.sampled_from([0, 1, 3, high, high // 2 + 1, low]) | st.integers(low, high)
    floats = [1e16, 1e-16, 0.1, -3.0, 1e-30, 2.0**30 + 1]
    if dtype in ("float64", "complex128"):
        floats += [1e200, 1e-200, 5e-324, 2.0**53 + 2]
    drawn = st.sampled_from(floats) | st.fractions(-9, 9, max_denominator=50)
    if kind == "c":
        return drawn | st.sampled_from([1j, 1 - 0.1j, complex(1e16, 1), complex(0, 1e-30)])
    return drawn


@st.composite
def expressions(draw: st.DrawFn, dtype: str, depth: int = 3) -> Drawn:
    """A sum, a product, a power, a multiple, a quotient, an adjoint of such; and its matrix."""
    kind = draw(st.sampled_from("leaf + - @ ** * / H".split())) if depth else "leaf"
    if kind == "leaf":
        return leaf(draw(st.sampled_from("ISTK")), dtype)
    op, matrix = draw(expressions(dtype, depth - 1))
    if kind in "+-@":
        other, more = draw(expressions(dtype, depth - 1))
        match kind:
            case "+":
                return op + other, matrix + more
            case "-":
                return op - other, matrix + more.times(pair(-1))
            case _:
                return op @ other, matrix @ more
    if kind == "**":
        power = draw(st.sampled_from([2, 3, 11]))
        return op**power, reduce(operator.matmul, [matrix] * power)
    if kind == "H":
        return op.H, matrix.H
    scalar = draw(scalars(dtype))
    if kind == "/" and np.dtype(dtype).kind not in "iu" and abs(scalar) > 1e-20:
        re, im = pair(scalar)
        size = re * re + im * im
        return op / scalar, matrix.times((re / size, -im / size))
    return scalar * op, matrix.times(pair(scalar))


DTYPES = st.sampled_from((*INTEGERS, *REALS, *COMPLEX))


@given(st.data(), DTYPES)
def test_coefficients_are_those_of_exact_arithmetic(data: st.DataObject, dtype: str) -> None:
    op, matrix = data.draw(expressions(dtype))
    assert entries(op) == matrix
    assert entries(op.conj().T) == matrix.H
    assert entries(op.simplify()) == matrix


@given(st.data(), DTYPES)
def test_equality_is_that_of_exact_matrices(data: st.DataObject, dtype: str) -> None:
    (one, this), (other, that) = (data.draw(expressions(dtype, 2)) for _ in range(2))
    assert one.equals(other) == (this == that)
    assert (one + other).equals(other + one)
    tiny = data.draw(scalars(dtype))
    changed = one + tiny * leaf("K", dtype)[0]
    assert changed.equals(one) == (tiny == 0)
    assert (changed - one).equals(tiny * leaf("K", dtype)[0])
    # However it came about, an equal movement has one fingerprint.
    again = ((changed + one) - one).movement()
    assert again.fingerprint == changed.movement().fingerprint


def plans_run_as_the_reference(op: LinearOperator) -> None:
    """To the last bit, forward and back."""
    x, y = op.domain.integers(0), op.codomain.integers(1)
    forward, backward = zip(*run_spmd(op, x, y), strict=True)
    same_vectors(whole_vector(op.codomain, forward), op(x))
    same_vectors(whole_vector(op.domain, backward), op.H(y))
    plans_fit(op)


@given(st.data(), st.sampled_from(INTEGERS))
def test_integers_wrap_alike_everywhere(data: st.DataObject, dtype: str) -> None:
    op, matrix = data.draw(expressions(dtype))
    x = op.domain.integers(0)
    flat = [int(v) for v in op.domain.flatten(x)]
    wanted = matrix @ Dense(
        tuple(tuple((Fraction(v if j == 0 else 0), Fraction(0)) for j in range(3)) for v in flat),
        op.dtype,
    )
    assert [int(v) for v in op.codomain.flatten(op(x))] == [row[0][0] for row in wanted.entries]
    assert op.to_matrix().dtype == op.dtype
    assert op.to_matrix().toarray().tolist() == [[e[0] for e in row] for row in matrix.entries]
    plans_run_as_the_reference(op)


@given(st.data(), st.sampled_from(REALS))
def test_a_matrix_is_rounded_once(data: st.DataObject, dtype: str) -> None:
    op, matrix = data.draw(expressions(dtype))
    largest = Fraction(float(np.finfo(dtype).max))
    exact = [[e[0] for e in row] for row in matrix.entries]
    if any(abs(e) > largest for row in exact for e in row):
        with pytest.raises(DTypeError, match="out of range on a space of dtype"):
            op.to_matrix()
        return
    for given_row, row in zip(op.to_matrix().toarray(), exact, strict=True):
        for number, wanted in zip(given_row, row, strict=True):
            neighbours = (np.nextafter(number, number.dtype.type(way)) for way in (-np.inf, np.inf))
            error = abs(Fraction(float(number)) - wanted)
            assert all(error <= abs(Fraction(float(n)) - wanted) for n in neighbours if n - n == 0)


# The reports

X = Space(Region("x", 3))
I3, ZERO = linop.identity(X), linop.zero(X, X)


def test_what_rounding_once_proved_is_not_proven() -> None:
    assert not ((1e16 * I3 + I3) - 1e16 * I3).equals(ZERO)
    assert ((1e16 * I3 + I3) - 1e16 * I3).equals(I3)
    assert not ((1e-200 * I3) @ (1e-200 * I3)).equals(ZERO)
    assert ((1e16 * I3) @ (1e16 * I3)).to_matrix().diagonal().tolist() == [1e32] * 3
    assert ((I3 / 49) * 49).equals(I3)
    assert (I3 / 3 + I3 / 3 + I3 / 3).equals(I3)
    assert (0.1 * I3 + 0.2 * I3 + 0.3 * I3).equals(0.3 * I3 + 0.2 * I3 + 0.1 * I3)
    assert not (0.1 * I3 + 0.2 * I3).equals(0.3 * I3)  # these floats are no tenths
    whole = linop.identity(Space(Region("x", 3), np.int64))
    assert not ((2**53 + 1) * whole).equals(2**53 * whole)


def test_local_maps_of_known_matrix_are_compared_exactly() -> None:
    D = linop.local_operators.diagonal(np.array([1.0, 3, -2]), X)
    assert not ((1e16 * D + D) - 1e16 * D).equals(ZERO)
    assert ((1e16 * D + D) - 1e16 * D).equals(D)
    assert not ((1e-200 * D) @ (1e-200 * D)).equals(ZERO)
    assert ((1e-200 * D) @ (1e-200 * D) / 1e-200 / 1e-200).equals(D @ D)
    assert (D / 49 * 49).equals(D)
    Y = Space(Region("x", 3), np.int64)
    E = linop.local_operators.diagonal(np.array([2**53 + 1, 2**62, -1]), Y)
    assert not E.equals(linop.local_operators.diagonal(np.array([2**53, 2**62, -1]), Y))
    assert (2 * E + 2 * E).equals(
        linop.local_operators.diagonal(np.array([4 * (2**53 + 1), 0, -4]), Y)
    )
    assert ((E + E) + (E + E)).to_matrix().toarray().tolist() == np.diag(
        [2**55 + 4, 0, -4]
    ).tolist()
    C = linop.local_operators.fft(Space(Region("x", 4), complex))
    assert (C.H @ C).equals(linop.identity(C.domain))


def test_a_matrix_that_is_not_finite_is_not_compared() -> None:
    D = linop.local_operators.diagonal(np.array([1.0, np.inf, 2]), X)
    with pytest.raises(UndecidableError, match="a local operator's matrix is not finite"):
        D.equals(I3)


def test_a_long_power_wraps_in_plans_as_in_the_reference() -> None:
    space = Space([Region("a", 2), Region("b", 2, 1)], np.int64)
    step = linop.add(space, *space.regions)
    op = (step @ step.H) ** 45
    plans_run_as_the_reference(op)
    assert op.to_matrix().dtype == np.int64


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64"])
def test_scalars_that_an_integer_space_cannot_hold(dtype: str) -> None:
    one = linop.identity(Space(Region("x", 3), dtype))
    limits = np.iinfo(dtype)
    for bad in (int(limits.max) + 1, int(limits.min) - 1, 2**64, 1e40):
        with pytest.raises(DTypeError, match=f"out of range on a space of dtype {dtype}"):
            bad * one
    assert (int(limits.max) * one + one).equals(int(limits.min) * one)
    assert (one - one - one).equals(-one)
    assert ((-one) @ (-one)).equals(one)
    assert ((one + one) ** 64).equals(linop.zero(one.domain, one.domain))


def test_scalars_that_no_space_can_hold() -> None:
    for bad in (float("nan"), float("-inf"), complex(0, float("inf")), np.float32("inf")):
        for make in (lambda s: s * I3, lambda s: I3 / s, lambda s: s * X.zeros()):
            with pytest.raises(ArgumentError, match="needs a finite number, given"):
                make(bad)
    for bad in (0, 0.0, 0j, Fraction(0)):
        with pytest.raises(ArgumentError, match="division by zero, given"):
            I3 / bad
        with pytest.raises(ArgumentError, match="division by zero, given"):
            X.zeros() / bad
    for huge in (10**400, -(10**400), Fraction(10**400, 3)):
        with pytest.raises(DTypeError, match=r"scalar -?\d\.\d+e\+\d+ is out of range .* float64"):
            huge * I3
    with pytest.raises(DTypeError, match=r"scalar 1e\+40 is out of range .* dtype complex64"):
        1e40 * linop.identity(Space(Region("x", 3), np.complex64))
    assert (I3 / -2j).codomain.dtype == complex
    with pytest.raises(DTypeError, match=r"complex scalar 0\.5j on a space of dtype int64"):
        linop.identity(Space(Region("x", 3), np.int64)) / -2j


def test_a_product_out_of_range_is_refused_where_it_is_used() -> None:
    huge = 1e300 * (1e300 * I3)
    assert (huge / 1e300 / 1e300).equals(I3)
    assert str(huge) == "1.00000e+600 I"
    for use in (
        lambda: huge(np.ones(3)),
        huge.to_matrix,
        lambda: plans_fit(huge),
        lambda: huge.compile(linop.backends.get("reference"))(np.ones(3)),
    ):
        with pytest.raises(DTypeError, match=r"scalar 1\.?0*e\+600 is out of range .* float64"):
            use()


@pytest.mark.parametrize("name", ["threads", "reference"])
def test_a_coefficient_out_of_range_is_told_on_every_worker(name: str) -> None:
    """Be it one that a single worker multiplies by."""
    regions = [Region(f"x{w}", 2, w) for w in range(2)]
    one, other = (linop.identity(Space(region)) for region in regions)
    op = linop.direct_sum(one, 1e300 * (1e300 * other))

    def main(backend: Backend) -> None:
        for _ in range(2):
            text = "scalar 1.00000e.600 is out of range" if name == "threads" else "is out of range"
            with pytest.raises(DTypeError, match=text):
                op.compile(backend)(np.ones(2))
            if name == "threads":
                assert (op / 1e300 / 1e300).compile(backend)(np.ones(2))[0] in (0, 1)

    linop.launch(main, workers=2, backend=name)


@pytest.mark.parametrize(
    "make",
    [
        linop.local_operators.matrix,
        linop.local_operators.diagonal,
        linop.local_operators.convolution,
        "sparse",
    ],
)
@pytest.mark.parametrize(
    ("dtype", "bad"),
    [
        ("int8", 300),
        ("uint8", -1),
        ("uint8", 0.5),
        ("float16", 1e6),
        ("float32", 1e300),
        ("float32", 2**24 + 1),
        ("complex64", 1e300),
        ("float64", 1j),
    ],
)
def test_values_that_a_space_cannot_hold(make: Any, dtype: str, bad: Any) -> None:
    """Refused when the operator is built; others are as they were given."""

    def built(values: Any) -> LinearOperator:
        space = Space(Region("x", 2), dtype)
        if make is linop.local_operators.diagonal:
            return linop.local_operators.diagonal(values, space)
        if make is linop.local_operators.convolution:
            return linop.local_operators.convolution(values, space, Space(Region("y", 1), dtype))
        values = np.array([values])
        values = scipy.sparse.csr_array(values) if make == "sparse" else values
        return linop.local_operators.matrix(values, space, Space(Region("y", 1), dtype))

    with pytest.raises(DTypeError, match=f"numbers of dtype {dtype} expected|of which {dtype} do"):
        built(np.array([1, bad]))
    good = built(np.array([1, 2]))
    assert good.to_matrix().sum() == 3 and good.dtype == dtype


def test_scalars_of_all_kinds_are_what_they_are_exactly() -> None:
    third = Fraction(1, 3)
    for scalar, exactly in {
        True: 1,
        np.int8(-3): -3,
        np.uint64(2**64 - 1): 2**64 - 1,
        np.float32(0.1): Fraction(float(np.float32(0.1))),
        np.float16(0.1): Fraction(float(np.float16(0.1))),
        np.longdouble(1) / 3: Fraction(*(np.longdouble(1) / 3).as_integer_ratio()),
        third: third,
        0.1: Fraction(0.1),
    }.items():
        (transfer,) = (scalar * I3).movement()
        assert transfer.coefficient == exactly
        (transfer,) = (I3 / scalar).movement()
        assert transfer.coefficient == 1 / Fraction(exactly)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "longdouble", "complex64"])
def test_a_product_is_rounded_once_to_each_dtype(dtype: str) -> None:
    """1 + u/2 + u^3 is more than half way to 1 + u, and in a float64 it is no more than half."""
    one = linop.identity(Space(Region("x", 1), dtype))
    bits = np.finfo(dtype).nmant
    scalar = 1 + Fraction(1, 2 ** (bits + 1)) + Fraction(1, 2 ** (3 * bits))
    (result,) = (scalar * one)(np.ones(1, dtype))
    assert result == 1 + np.finfo(dtype).eps
    (below,) = ((scalar - Fraction(2, 2 ** (3 * bits))) * one)(np.ones(1, dtype))
    assert below == 1


# Digests

N = 4096
WHOLE, PARTS = linop.TensorSpace(N, linop.Partition(1)), linop.Partition(N)
SPREAD = linop.broadcast(WHOLE, PARTS)
BACK = linop.sum_reduce(SPREAD.codomain, linop.Partition(1))
ALL = linop.all_reduce(SPREAD.codomain)
EQUAL: dict[str, tuple[LinearOperator, LinearOperator]] = {
    "all-reduce": (ALL, SPREAD @ BACK),
    "adjoint": (SPREAD.H, BACK),
    "self-adjoint": (ALL, ALL.H),
    "mean": (ALL / N, (SPREAD / N) @ BACK),
    "brackets": ((ALL @ SPREAD) @ BACK, ALL @ (SPREAD @ BACK)),
    "terms": (ALL + 2 * ALL, 2 * ALL + ALL),
}


@pytest.mark.parametrize("case", EQUAL)
def test_digests_prove_equality_without_tables(case: str) -> None:
    one, other = EQUAL[case]
    assert one.equals(other)
    for op in (one, other):
        assert "table" not in vars(op.movement())
        assert "table" not in vars(op.movement().transfers)


def test_a_difference_is_found_without_whole_tables() -> None:
    for other in (2 * ALL, ALL + linop.identity(ALL.domain)):
        assert not ALL.equals(other)
        assert "table" not in vars(other.movement().transfers)


@given(st.data(), st.sampled_from(("int8", "float64")))
def test_equal_digests_are_of_equal_movements(data: st.DataObject, dtype: str) -> None:
    (one, this), (other, that) = (data.draw(expressions(dtype, 2)) for _ in range(2))
    if one.movement().digest == other.movement().digest:
        assert this == that
    for near in (one @ one + other, other @ one + one, one.H @ other, other.H @ one):
        for far in (other + one @ one, one @ other + one, (other.H @ one).H):
            if near.movement().digest == far.movement().digest:
                assert entries(near) == entries(far)


# What is printed

NUMBERS: dict[str, Callable[[LinearOperator], LinearOperator]] = {
    "1/49 I": lambda op: op / 49,
    "0.1 I": lambda op: 0.1 * op,
    "0.5 I": lambda op: op / 2,
    "-1/3 I": lambda op: Fraction(-1, 3) * op,
    "0.01 I": lambda op: 0.1 * (0.1 * op),
    "9007199254740993 I": lambda op: (2**53 + 1) * op,
    "1.18059e+21 I": lambda op: 2**70 * op,
    "(1/49)j I": lambda op: 1j * op / 49,
    "-1j I": lambda op: -1j * op,
    "(2-1j) I": lambda op: (2 - 1j) * op,
    "(0.5+(2/3)j) I": lambda op: (3 + 4j) * op / 6,
}


@pytest.mark.parametrize("text", NUMBERS)
def test_numbers_print_as_people_write_them(text: str) -> None:
    op = NUMBERS[text](linop.identity(Space(Region("x", 3), complex)))
    assert str(op) == text
    again = eval(code(op), {"linop": linop})
    assert again.equals(op)
    assert pickle.loads(pickle.dumps(op)).equals(op)


def test_fractions_in_latex() -> None:
    assert (I3 / 49)._repr_latex_() == r"$\frac{1}{49} I$"
    assert (I3 / -49)._repr_latex_() == r"$-\frac{1}{49} I$"
