"""Integers and dtypes: local operators, inner products, casts, and the checks of maps."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import isqrt, prod, sqrt
from random import Random
from typing import Any

import numpy as np
import pylops
import scipy

import linop
from linop import Region, Space, local_operators, testing
from linop.errors import LinopError, UndecidableError
from oracle.cases import Case, Drawer, WrongError, want
from oracle.exactly import (
    BFLOAT16,
    COMPLEX,
    FLOATS,
    INTEGERS,
    Array,
    Taps,
    eps,
    matrix_taps,
    product_is,
    rounded_once,
    sliding_taps,
    transposed,
)

SPARSE = tuple(d for d in (*INTEGERS, *FLOATS, *COMPLEX))


def values(random: Random, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Numbers of a dtype: small, of full range (integers), or floats of mixed size, at times with
    one that is huge, NaN or infinite."""
    rng = np.random.default_rng(random.getrandbits(64))
    kind = random.choice(["small", "full", "sparse"])
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        low, high = (info.min, info.max) if kind == "full" else (max(info.min, -9), 9)
        array: Array = rng.integers(low, high, shape, dtype, endpoint=True)
    else:
        array = rng.standard_normal(shape).astype(dtype)
        if dtype.kind == "c":
            array = (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
        if kind == "full" and array.size:
            huge = {2: 3e4, 4: 1e20}.get(dtype.itemsize, 1e20)
            odd = random.choice([np.nan, np.inf, -np.inf, huge])
            array.reshape(-1)[random.randrange(array.size)] = odd
    if kind == "sparse":
        array *= rng.integers(0, 2, shape).astype(dtype)
    return array


def space(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Space:
    return Space([Region(name, shape)], dtype)


ROADS: dict[str, Callable[[Any, Array], Array]] = {
    "in this process": lambda op, x: op(x),
    "threads": lambda op, x: op.compile(linop.backends.get("threads"))(x),
    "reference": lambda op, x: op.compile(linop.backends.get("reference"))(x),
}


def is_its_matrix(op: Any, taps: Taps, x: Array, y: Array, road: str) -> None:
    """Forward, adjoint, and the matrix that the operator says it is."""
    run = ROADS[road]
    product_is(taps, x, np.asarray(run(op, x)), "forward")
    product_is(transposed(taps), y, np.asarray(run(op.H, y)), "adjoint")
    if op.dtype.kind in "iu" and max(op.shape) <= 4000:
        said = op.to_matrix().astype(np.uint64) @ x.reshape(-1).astype(np.uint64)
        product_is(taps, x, said.astype(op.dtype), "to_matrix() @ x")


def draw_convolution(random: Random) -> Case:
    dtype = random.choice(SPARSE)
    ndim = random.choice([1, 1, 2, 2, 3])
    most = {1: 3000, 2: 64, 3: 14}[ndim]
    shape = tuple(random.randint(1, most) for _ in range(ndim))
    size = tuple(random.randint(1, min(n, {1: 400, 2: 20, 3: 6}[ndim])) for n in shape)
    stride = tuple(random.choice([1, 1, 2, 3]) for _ in shape)
    dilation = tuple(random.choice([1, 1, 1, 2]) for _ in shape)
    need = [d * (k - 1) + 1 - n for d, k, n in zip(dilation, size, shape, strict=True)]
    padding = tuple((random.randint(0, 3) + max(0, n), random.randint(0, 3)) for n in need)
    kernel = values(random, size, dtype)
    if dtype.kind not in "iu":
        kernel = np.nan_to_num(kernel, nan=1, posinf=1, neginf=1)
    x, road = values(random, shape, dtype), random.choice(list(ROADS))
    seed = random.getrandbits(32)

    def check() -> None:
        taps, out = sliding_taps(shape, kernel, stride, padding, dilation)
        op = local_operators.convolution(
            kernel,
            space("x", shape, dtype),
            space("y", out, dtype),
            stride=stride,
            padding=padding,
            dilation=dilation,
        )
        is_its_matrix(op, taps, x, values(Random(seed), out, dtype), road)

    text = f"convolution {dtype} {shape} * {size} {stride=} {padding=} {dilation=}, {road}"
    return Case(1, text, check)


def draw_matrix(random: Random) -> Case:
    dtype, road = random.choice(SPARSE), random.choice(list(ROADS))
    m, n = random.choice([(3, 5), (40, 7), (200, 150), (1, 3000), (64, 64)])
    A = np.nan_to_num(values(random, (m, n), dtype), nan=1, posinf=1, neginf=1)
    kind = random.choice(["dense", "sparse", "diagonal", "restriction"])
    if (kind == "sparse" and dtype.kind in "fV" and dtype.itemsize < 4) or dtype == BFLOAT16:
        kind = "dense"
    x, y = values(random, (n,), dtype), values(random, (m,), dtype)
    if kind in ("diagonal", "restriction"):
        y = values(random, (n,), dtype)
    keep = [random.randrange(n) for _ in range(random.randint(1, 5))]
    row = A[0].copy()

    def check() -> None:
        X, Y = space("x", (n,), dtype), space("y", (m,), dtype)
        if kind == "diagonal":
            op = local_operators.diagonal(row, X)
            is_its_matrix(op, matrix_taps(np.diag(row)), x, y, road)
        elif kind == "restriction":
            op = local_operators.restriction(X, keep)
            chosen = np.zeros((len(keep), n), dtype)
            chosen[np.arange(len(keep)), keep] = 1
            is_its_matrix(op, matrix_taps(chosen), x, y[: len(keep)], road)
        else:
            given = scipy.sparse.csr_array(A) if kind == "sparse" else A
            is_its_matrix(local_operators.matrix(given, X, Y), matrix_taps(A), x, y, road)

    return Case(1, f"{kind} {dtype} {m}x{n}, {road}", check)


def draw_inner(random: Random) -> Case:
    dtype = random.choice(INTEGERS)
    n = random.choice([1, 2, 4, 100, 9000])
    info = np.iinfo(dtype)
    top = random.choice([info.max, isqrt(info.max), 2 ** (info.bits // 2) % (info.max + 1)])
    rng = np.random.default_rng(random.getrandbits(64))
    low = random.choice([max(info.min, -top), top])
    x = rng.integers(low, top, n, dtype, endpoint=True)
    y = x if random.random() < 0.5 else rng.integers(low, top, n, dtype, endpoint=True)
    where = random.choice(["here", "threads"])

    def check() -> None:
        S = space("x", (n,), dtype)
        found: list[Any] = []

        def main(backend: Any) -> None:
            v, w = backend.vector(S, {"x": x}), backend.vector(S, {"x": y})
            found.append((v.inner(w), v.norm()))

        if where == "here":
            v, w = S.vector({"x": x}), S.vector({"x": y})
            found.append((v.inner(w), v.norm()))
        else:
            linop.launch(main, 1, "threads")
        exact = sum(int(a) * int(b) for a, b in zip(x, y, strict=True))
        square = sum(int(a) ** 2 for a in x)
        inner, norm = found[0]
        near = abs(Fraction(inner) - exact) <= Fraction(1, 10**12) * sum(
            abs(int(a) * int(b)) for a, b in zip(x, y, strict=True)
        )
        want(near, f"inner {inner} for {exact}")
        want(abs(norm - sqrt(square)) <= 1e-12 * sqrt(square), f"norm {norm} for {sqrt(square)}")

    return Case(2, f"{n} numbers of {dtype} from {low} to {top}, {where}", check)


def draw_whose(random: Random) -> Case:
    workers = random.randint(2, 4)
    dtypes = [np.dtype(d) for d in ("float64", "float32", "complex128", "int64")]
    kinds = [
        (random.choice(["u", "v"]), random.choice([3, 5]), random.choice(dtypes)) for _ in range(2)
    ]
    odd = random.randrange(workers)
    same = kinds[0] == kinds[1]
    operation = random.choice(["norm", "inner"])

    def check() -> None:
        told: dict[int, Any] = {}

        def main(backend: Any) -> None:
            spaces = [
                Space([Region(f"{name}{w}", (n,), w) for w in range(workers)], dtype)
                for name, n, dtype in kinds
            ]
            mine = spaces[int(backend.worker == odd)]
            arrays = {r.name: np.ones(r.shape) for r in mine.regions if backend.worker in r.workers}
            v = backend.vector(mine, {n: a.astype(mine.dtype) for n, a in arrays.items()})
            try:
                told[backend.worker] = v.norm() if operation == "norm" else v.inner(v)
            except LinopError as error:
                told[backend.worker] = error

        try:
            linop.launch(main, workers, "threads")
        except LinopError:
            pass
        if same:
            n = kinds[0][1] * workers
            right = sqrt(n) if operation == "norm" else n
            want(all(abs(t - right) < 1e-5 for t in told.values()), f"{told} for {right}")
        else:
            silent = {w: t for w, t in told.items() if not isinstance(t, Exception)}
            want(not silent, f"{operation}s of different vectors: {silent}")

    return Case(3, f"{operation} of {kinds} on {workers} workers, worker {odd} the second", check)


def real_linear(random: Random, n: int) -> tuple[str, Any]:
    makers: dict[str, Callable[[], Any]] = {
        "FFT(real=True)": lambda: pylops.signalprocessing.FFT(n, real=True),
        "Real": lambda: pylops.Real(n, dtype=np.complex128),
        "Imag": lambda: pylops.Imag(n, dtype=np.complex128),
        "Conj": lambda: pylops.Conj(n, dtype=np.complex128),
        "Real @ Diagonal": lambda: (
            pylops.Real(n, dtype=np.complex128) @ pylops.Diagonal(np.exp(1j * np.arange(n)))
        ),
        "Real.H": lambda: pylops.Real(n, dtype=np.complex128).H,
        "VStack": lambda: pylops.VStack(
            [pylops.Real(n, dtype=np.complex128), pylops.Imag(n, dtype=np.complex128)]
        ),
    }
    name = random.choice(list(makers))
    return name, makers[name]()


def draw_real_linear(random: Random) -> Case:
    n = random.choice([4, 8, 9])
    name, F = real_linear(random, n)
    scale = random.choice([1, 1j, 2 - 1j])
    seed = random.getrandbits(32)

    def check() -> None:
        op = scale * local_operators.from_scipy(F)
        rng = np.random.default_rng(seed)
        x, y = (rng.standard_normal(k) + 1j * rng.standard_normal(k) for k in reversed(op.shape))
        if op.dtype.kind != "c":
            x, y = x.real, y.real
        left, right = np.vdot(y, op(x)).real, np.vdot(op.H(y), x).real
        agree = abs(left - right) < 1e-9 * (1 + abs(left))
        want(agree, f"Re <y, Ax> is {left}, Re <A* y, x> is {right}")
        want(bool(testing.check_adjoint(F)) == bool(testing.check_adjoint(op)), "checks differ")

    return Case(4, f"{scale} * pylops {name} of {n}", check)


def draw_scipy_check(random: Random) -> Case:
    n = random.randint(2, 9)
    rng = np.random.default_rng(random.getrandbits(64))
    A = rng.integers(-9, 10, (n, n)).astype(float)
    faults: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
        "right": (lambda x: A @ x, lambda y: A.T @ y),
        "fractions": (lambda x: (A / 3) @ x, lambda y: (A / 3).T @ y),
        "round": (lambda x: A @ np.round(x), lambda y: A.T @ np.round(y)),
        "trunc": (lambda x: A @ np.trunc(x), lambda y: A.T @ np.trunc(y)),
        "257": (lambda x: A @ x, lambda y: 257 * (A.T @ y)),
        "int": (lambda x: (A @ x).astype(int), lambda y: (A.T @ y).astype(int)),
        "float32 floor": (lambda x: A @ np.floor(x), lambda y: A.T @ y),
        "zeros": (
            lambda x: np.zeros_like(np.arange(n)) if np.any(x % 1) else A @ x,
            lambda y: A.T @ y,
        ),
        "int8": (lambda x: (A @ x).astype(np.int8), lambda y: (A.T @ y).astype(np.int8)),
    }
    name = random.choice(list(faults))
    forward, backward = faults[name]
    dtype = random.choice([None, np.float64, np.float32])

    def check() -> None:
        op = scipy.sparse.linalg.LinearOperator((n, n), forward, backward, dtype=dtype)
        reports = [
            f(given)
            for f in (testing.check_adjoint, testing.check_exact, testing.check_linear)
            for given in (op, local_operators.from_scipy(op))
        ]
        passed = [bool(r) for r in reports]
        if name in ("right", "fractions"):
            want(all(passed), f"a right operator fails: {passed}")
        else:
            said = "whole numbers" in str(reports[0]).partition("\n")[0]
            want(said or not all(passed), "a wrong operator passes all checks")

    return Case(5, f"SciPy's operator, {name}, {n}x{n}, {dtype=}", check)


def draw_cast(random: Random) -> Case:
    given, held = (random.choice([*INTEGERS, *FLOATS[1:3]]) for _ in range(2))
    n = random.randint(1, 6)
    way = random.choice(["to_scipy", "unflatten", "vector", "call"])
    x = values(random, (n,), given)

    def check() -> None:
        S = space("x", (n,), held)
        if way == "to_scipy":
            y = linop.identity(S).to_scipy() @ x
        elif way == "unflatten":
            y = S.unflatten(x)["x"]
        elif way == "vector":
            y = S.vector({"x": x})["x"]
        else:
            y = linop.identity(S)(x)
        if held.kind in "iu" or given.kind in "iu":
            same = [_exact(a) == _exact(b) for a, b in zip(x, np.asarray(y), strict=True)]
            want(all(same), f"{x} became {y}")
        else:
            finite = np.isfinite(x.astype(float))
            near = np.abs(np.asarray(y).astype(float) - x.astype(float)) <= eps(held) * np.abs(x)
            want(np.all(near | ~finite), f"{x} became {y}")

    return Case(6, f"{way}: {x.tolist()} of {given} in a space of {held}", check)


def _exact(number: Any) -> Any:
    value = number.item()
    return Fraction(value) if value == value and abs(value) != np.inf else repr(value)


def draw_coefficient(random: Random) -> Case:
    dtype = random.choice([BFLOAT16, np.dtype("float16"), np.dtype("float32")])
    digits = {2: 8 if dtype == BFLOAT16 else 11, 4: 24}[dtype.itemsize]
    odd = 2 ** (digits - 1) + random.randrange(2 ** (digits - 1))
    scale = Fraction(2) ** (random.randint(-3, 3) - digits)
    tiny = random.choice([0, 1, -1]) * Fraction(1, 2 ** random.choice([14, 40, 45]))
    value = (odd + Fraction(1, 2) + tiny) * scale
    way = random.choice(["scalar", "matrix", "diagonal"])

    def check() -> None:
        S = space("x", (1,), dtype)
        number = value if way == "scalar" else float(value)
        exact = Fraction(number)
        if way == "scalar":
            op = number * linop.identity(S)
        elif way == "matrix":
            op = local_operators.matrix(np.array([[number]]), S, S)
        else:
            op = local_operators.diagonal(np.array([number]), S)
        found, right = op(np.ones(1, dtype))[0], rounded_once(exact, dtype)
        want(found == right, f"{float(exact)!r} became {found}, nearest is {right}")
        want(float(op.to_matrix()[0, 0]) in (float(right), float(exact)), "another matrix")
        if way != "scalar":
            want(float(op.to_matrix()[0, 0]) == float(right), f"matrix {op.to_matrix()[0, 0]!r}")

    return Case(6, f"{way} {value} ({float(value)!r}) in {dtype}", check)


def draw_equality(random: Random) -> Case:
    n = random.randint(2, 9)
    S = space("x", (n,), np.dtype(np.complex128))
    form = random.choice(["F* F - I", "F F* - I", "F* F", "(F* F)^2", "2 F* F - 2 I", "F* D F"])
    ways = ["equals", "reversed", "simplified"]
    way = random.choice(ways)

    def check() -> None:
        F = local_operators.fft(S, S)
        one, zero = linop.identity(S), linop.zero(S, S)
        D = local_operators.diagonal(np.full(n, 3.0), S)
        pairs = {
            "F* F - I": (F.H @ F - one, zero),
            "F F* - I": (F @ F.H - one, zero),
            "F* F": (F.H @ F, one),
            "(F* F)^2": (F.H @ F @ F.H @ F, one),
            "2 F* F - 2 I": (2 * (F.H @ F) - 2 * one, zero),
            "F* D F": (F.H @ D @ F, 3 * one),
        }
        left, right = pairs[form]
        if way == "simplified":
            left = left.simplify()
        if way == "reversed":
            left, right = right, left
        try:
            want(left.equals(right), "equals is False where only rounding differs")
        except UndecidableError:
            pass

    return Case(11, f"{form} for n = {n}, {way}", check)


def draw_right_operator(random: Random) -> Case:
    dtype = random.choice([*INTEGERS, *FLOATS, *COMPLEX])
    kind = random.choice(["halo", "broadcast", "matrix", "diagonal", "sum"])
    n, p = random.randint(2, 12), random.randint(1, 3)
    check_of = random.choice(["check_adjoint", "check_exact", "check_linear"])
    numbers = np.nan_to_num(values(random, (n, n), dtype), nan=1, posinf=1, neginf=1)
    if dtype.kind not in "iu":
        numbers = np.where(np.abs(numbers) <= 1e3, numbers, np.ones((), dtype))

    def check() -> None:
        S = space("x", (n,), dtype)
        if kind == "halo":
            X = linop.TensorSpace((n + p,), linop.Partition((p,)), dtype)
            op = linop.halo_exchange(X, 3, padding=1)
        elif kind == "broadcast":
            X = linop.TensorSpace((n,), linop.Partition((1,)), dtype)
            op = linop.broadcast(X, linop.Partition((p,)))
        elif kind == "matrix":
            op = local_operators.matrix(numbers, S, S)
        elif kind == "diagonal":
            op = local_operators.diagonal(numbers[0], S)
        else:
            op = local_operators.diagonal(numbers[0], S) + 2 * linop.identity(S)
        report = getattr(testing, check_of)(op)
        want(report, f"a right operator fails: {str(report)[:200]}")

    return Case(12, f"{check_of} of {kind} in {dtype}, n = {n}, p = {p}", check)


DRAWERS: dict[int, list[Drawer]] = {
    1: [draw_convolution, draw_convolution, draw_matrix],
    2: [draw_inner],
    3: [draw_whose],
    4: [draw_real_linear],
    5: [draw_scipy_check],
    6: [draw_cast, draw_coefficient],
    11: [draw_equality],
    12: [draw_right_operator],
}
"""Drawers of cases, by kind."""

__all__ = ["DRAWERS", "WrongError", "prod"]
