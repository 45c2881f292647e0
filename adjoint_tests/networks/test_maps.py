"""linop.networks: Jacobians are operators, and right; mistakes are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import COPIES, REPLICATED, LinearOperator, Partition, TensorSpace
from linop.errors import (
    ArgumentError,
    BackendError,
    DTypeError,
    LinopError,
    PartitionError,
    RegionError,
    ShapeError,
    SpaceError,
)
from linop.networks import (
    Map,
    bias,
    chain,
    linear,
    multiply,
    relu,
    sigmoid,
    softmax_cross_entropy,
    squared_loss,
)
from support.networks.twins import STRATEGIES, mlp

ONE, LINE = Partition((1,)), Partition((3,))


def tensor(
    name: str, shape: tuple[int, ...], role: Any = COPIES, grid: Partition = ONE, dtype: Any = float
) -> TensorSpace:
    return TensorSpace(shape, grid, dtype, [role], name=name)


def modules(role: Any, grid: Partition, dtype: Any = float) -> dict[str, Map]:
    """One map of each kind, on 4 rows, in 4 columns."""
    z, t = (tensor(name, (4, 4), role, grid, dtype) for name in "zt")
    b = tensor("b", (4,), {0: COPIES}.get(role, role), grid, dtype)
    W = tensor("W", (4, 2), {0: COPIES}.get(role, role), grid, dtype)
    c = tensor("c", (2,), W.axes[0], grid, dtype)
    return {
        "linear": linear(z, W, c),
        "without bias": linear(z, W),
        "bias": bias(z, b),
        "sigmoid": sigmoid(z),
        "multiply": multiply(z, t),
        "relu": relu(z),
        "cross-entropy": softmax_cross_entropy(z, t),
        "squared": squared_loss(z, t, 0.25),
    }


KINDS = list(modules(COPIES, ONE))
each_kind = pytest.mark.parametrize("kind", KINDS)
each_role = pytest.mark.parametrize("role", [0, COPIES, REPLICATED], ids=["rows", "copies", "one"])


def point(F: Map, seed: int = 0) -> dict[str, np.ndarray]:
    """Numbers away from ReLU's corner."""
    random = np.random.default_rng(seed)
    return {
        r.name: random.choice([-1.0, 1.0], r.shape) * random.uniform(0.1, 1, r.shape)
        for r in F.domain.regions
    }


def flat(space: linop.Space, arrays: Any) -> np.ndarray:
    if not isinstance(arrays, dict):
        arrays = {space.regions[0].name: arrays}
    return np.concatenate([np.ravel(arrays[r.name]) for r in space.regions])


def moved(F: Map, x: dict[str, np.ndarray], k: int, step: Any) -> np.ndarray:
    """F at x plus a step along the k-th coordinate."""
    vector = flat(F.domain, x).astype(np.result_type(type(step), float))
    vector[k] += step
    y = F(F.domain.unflatten(vector))
    return flat(F.codomain, y.arrays)


@each_role
@each_kind
def test_jacobians_are_limits_of_differences(kind: str, role: Any) -> None:
    F = modules(role, LINE if role == 0 else Partition((2,)))[kind]
    x = point(F)
    J = F.jacobian(x).to_matrix().toarray()
    assert J.shape == (F.codomain.size, F.domain.size)
    for k in range(F.domain.size):
        slope = (moved(F, x, k, 1e-6) - moved(F, x, k, -1e-6)) / 2e-6
        assert np.abs(J[:, k] - slope).max() < 1e-8  # differences of rounded values


@each_kind
def test_jacobians_are_complex_steps(kind: str) -> None:
    """F(x + ih) = F(x) + ih F'(x) + O(h²), without cancellation: to the last digits."""
    if kind == "relu":
        pytest.skip("not analytic: it compares")
    real, wide = (modules(COPIES, ONE, dtype)[kind] for dtype in (float, complex))
    x = point(real)
    J = real.jacobian(x).to_matrix().toarray()
    for k in range(real.domain.size):
        slope = moved(wide, x, k, 1e-30j).imag / 1e-30
        assert np.abs(J[:, k] - slope).max() < 1e-14


@each_role
@each_kind
def test_jacobians_pass_the_checks_of_operators(kind: str, role: Any) -> None:
    F = modules(role, LINE)[kind]
    J = F.jacobian(point(F))
    assert isinstance(J, LinearOperator)
    assert linop.testing.check_exact(J)
    assert linop.testing.check_adjoint(J)


@given(st.sampled_from(STRATEGIES), st.integers(1, 5), st.integers(0, 99))
def test_the_jacobian_of_a_network_passes_them(strategy: str, workers: int, seed: int) -> None:
    model = mlp.mlp(strategy, workers, (3, 5, 6, 2), 7)
    J = model.map.jacobian(point(model.map, seed), model.names)
    assert linop.testing.check_adjoint(J)
    assert J.domain.regions == tuple(r for p in model.parameters for r in p.regions)


def test_the_chain_rule_is_the_product() -> None:
    x = tensor("x", (2, 3))
    W, V = tensor("W", (3, 4)), tensor("V", (4, 2))
    first = linear(x, W, name="y")
    second = sigmoid(tensor("y", (2, 4)), name="h")
    third = linear(tensor("h", (2, 4)), V, name="z")
    F = third @ second @ first
    at = point(F)
    y = first({n: at[n] for n in ("x@0", "W@0")})
    h = second(y)
    J1 = first.jacobian({n: at[n] for n in ("x@0", "W@0")}).to_matrix()
    J2 = second.jacobian(y).to_matrix()
    J3 = third.jacobian({"h@0": h, "V@0": at["V@0"]}).to_matrix()
    J = F.jacobian(at).to_matrix().toarray()
    n = first.domain.size
    assert np.allclose(J[:, :n], (J3[:, : h.size] @ J2 @ J1).toarray(), rtol=1e-14)
    assert np.array_equal(J[:, n:], J3[:, h.size :].toarray())


def test_operators_are_links() -> None:
    """A movement, and an operator of which only a part of the argument is active."""
    x, w = tensor("x", (2,)), tensor("w", (2,))
    both = linop.Space([*x.regions, *w.regions])
    add = linop.add(both, x.regions[0], w.regions[0])
    F = chain(add, sigmoid(w))
    at = {"x@0": np.array([1.0, 2.0]), "w@0": np.array([3.0, 4.0])}
    s = 1 / (1 + np.exp(-np.array([4.0, 6.0])))
    y = F(at)
    assert np.allclose(y["h@0"], s) and np.array_equal(y["x@0"], at["x@0"])
    J = F.jacobian(at, ["x@0"]).to_matrix().toarray()
    wanted = np.concatenate([np.eye(2), np.diag(s * (1 - s))])
    assert np.allclose(J, wanted, atol=1e-15)


@pytest.mark.parametrize("n", [3, 5000])
def test_operators_in_place_leave_the_point_as_it_was(n: int) -> None:
    x, w, h = (tensor(name, (n,)) for name in "xwh")
    a, b = w.regions[0], h.regions[0]
    both = linop.Space([b, a])
    random = np.random.default_rng(0)
    at = {"x@0": random.standard_normal(n), "w@0": random.standard_normal(n)}
    s = 1 / (1 + np.exp(-at["x@0"]))
    for op in (linop.add(both, a, b), linop.clear(both, b), linop.copy(both, a[:2], b[1:3])):
        F = chain(sigmoid(x, "h"), op, sigmoid(h, "g"))
        g = 1 / (1 + np.exp(-op({"h@0": s, "w@0": at["w@0"]})["h@0"]))
        wanted = op.H({"h@0": g * (1 - g), "w@0": np.ones(n)})["h@0"] * s * (1 - s)

        def main(backend: Any, F: Map = F) -> Any:
            program = F.compile(backend, ["x@0"])
            for _ in range(3):
                program(at)
                found = program.gradient()
            return found["x@0"]

        J = F.jacobian(at, ["x@0"])
        ones = {r.name: np.ones(n) for r in J.codomain.regions}
        alone = F.compile(linop.backends.get("reference"), ["x@0"])
        alone(at)
        for slope in (J.H(ones), linop.launch(main, 1)[0], alone.gradient()["x@0"]):
            assert np.abs(slope - wanted).max() < 1e-15


def test_a_map_may_stand_in_a_chain_twice() -> None:
    twice = sigmoid(tensor("x", (2, 3)), name="x")
    F = chain(twice, twice)
    x = np.linspace(-2, 2, 6).reshape(2, 3)
    y = 1 / (1 + np.exp(-x))
    z = 1 / (1 + np.exp(-y))
    wanted = z * (1 - z) * y * (1 - y)
    assert np.abs(F.jacobian(x).H(np.ones((2, 3))) - wanted).max() < 1e-15

    def main(backend: Any) -> Any:
        program = F.compile(backend)
        program(x)
        return program.gradient()["x@0"]

    for slope in (main(linop.backends.get("reference")), linop.launch(main, 1)[0]):
        assert np.abs(slope - wanted).max() < 1e-15


def test_values_are_memory_of_their_own() -> None:
    F = sigmoid(tensor("x", (3,)))

    def main(backend: Any) -> Any:
        program = F.compile(backend)
        y = program(np.zeros(3))
        y -= 0.5
        return program.gradient()["x@0"]

    for slope in (main(linop.backends.get("reference")), linop.launch(main, 1)[0]):
        assert np.array_equal(slope, np.full(3, 0.25))


def test_a_refused_call_leaves_no_point() -> None:
    def main(backend: Any) -> None:
        program = sigmoid(tensor("x", (3,))).compile(backend)
        program(np.zeros(3))
        with pytest.raises(ShapeError):
            program(np.zeros(4))
        with pytest.raises(BackendError, match="call the program first"):
            program.gradient()

    main(linop.backends.get("reference"))
    main(linop.backends.get("threads", workers=1))


def test_relu_of_infinities() -> None:
    x = np.array([-np.inf, np.inf, np.nan])
    assert np.array_equal(relu(tensor("x", (3,)))(x), [0, np.inf, np.nan], equal_nan=True)


def test_what_depends_on_nothing_has_no_derivative() -> None:
    F = chain(sigmoid(tensor("x", (2,)), name="a"), sigmoid(tensor("w", (3,)), name="b"))
    J = F.jacobian(point(F), ["w@0"])
    assert J.shape == (5, 3)
    assert np.count_nonzero(J.to_matrix().toarray()) == 3
    assert F.jacobian(point(F), []).shape == (5, 0)


def test_a_jacobian_keeps_its_point() -> None:
    F = sigmoid(tensor("x", (3,)))
    x = np.array([0.0, 1.0, 2.0])
    J = F.jacobian(x)
    before = J(np.ones(3))
    x[:] = 5
    F(x)
    assert np.array_equal(J(np.ones(3)), before)


def test_large_scores_do_not_overflow() -> None:
    z, t = tensor("z", (2, 3)), tensor("t", (2, 3))
    loss = softmax_cross_entropy(z, t, scale=1)
    at = {"z@0": np.array([[1e4, 0, 0], [-1e4, -1e4, -1e4]]), "t@0": np.eye(3)[[1, 0]]}
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        value = loss(at)
        J = loss.jacobian(at, ["z@0"]).to_matrix().toarray()
    assert np.allclose(value, 1e4 + np.log(3))
    assert np.allclose(J, [[1, -1, 0, 1 / 3 - 1, 1 / 3, 1 / 3]])


def test_a_gradient_before_a_value_is_an_error() -> None:
    program = sigmoid(tensor("x", (3,))).compile(linop.backends.get("threads", workers=1))
    with pytest.raises(BackendError, match="call the program first"):
        program.gradient()


X, W = tensor("x", (4, 3), 0, LINE), tensor("W", (3, 2), COPIES, LINE)
Y, Z = tensor("y", (4, 3), 0, LINE), tensor("z", (4, 3), 1, LINE)
INTEGERS = tensor("k", (4, 3), dtype=np.int64)
SUMMED = tensor("W", (3, 2), 0, LINE), tensor("b", (2,), COPIES, LINE)
Y, Z = tensor("y", (4, 3), 0, LINE), tensor("z", (4, 3), 1, LINE)
INTEGERS = tensor("k", (4, 3), dtype=np.int64)
SUMMED = tensor("W", (3, 2), 0, LINE), tensor("b", (2,), COPIES, LINE)
REFUSED: list[tuple[type[LinopError], Callable[[], Any], str]] = [
    (ArgumentError, lambda: linear(X, np.ones((3, 2))), "expected a TensorSpace"),
    (ArgumentError, lambda: chain(X), "expected maps and operators"),
    (ArgumentError, chain, "at least one"),
    (
        ShapeError,
        lambda: linear(X, tensor("W", (4, 2), COPIES, LINE)),
        r"X \(n, k\) and W \(k, m\)",
    ),
    (PartitionError, lambda: linear(X, tensor("W", (3, 2))), "tensors on one grid expected"),
    (PartitionError, lambda: linear(X, tensor("W", (3, 2), REPLICATED, LINE)), "linop.broadcast"),
    (PartitionError, lambda: linear(X, tensor("W", (3, 2), 1, LINE)), "grid axis 0 has role 0"),
    (
        PartitionError,
        lambda: linear(
            tensor("x", (4, 3), 1, LINE),
            tensor("W", (3, 2), 0, LINE),
            tensor("b", (2,), COPIES, LINE),
        ),
        "every worker would add the bias",
    ),
    (PartitionError, lambda: linear(X, W, tensor("b", (2,), REPLICATED, LINE)), "roles"),
    (ShapeError, lambda: linear(X, W, tensor("b", (3,), COPIES, LINE)), r"shape \(2,\) expected"),
    (SpaceError, lambda: linear(X, tensor("W", (3, 2), COPIES, LINE, np.float32)), "one dtype"),
    (
        ShapeError,
        lambda: softmax_cross_entropy(Z, tensor("t", (4, 3), 1, LINE)),
        "whole",
    ),
    (PartitionError, lambda: squared_loss(X, tensor("t", (4, 3), COPIES, LINE)), "divided alike"),
    (RegionError, lambda: chain(sigmoid(X), sigmoid(X, "g")), "which an earlier map has taken"),
    (
        RegionError,
        lambda: chain(sigmoid(X, "a"), sigmoid(Y, "a")),
        "name",
    ),
    (RegionError, lambda: sigmoid(X).jacobian(point(sigmoid(X)), ["q"]), "no such region"),
    (DTypeError, lambda: sigmoid(INTEGERS), "floating-point numbers expected"),
    (DTypeError, lambda: softmax_cross_entropy(INTEGERS, INTEGERS), "floating-point"),
    (DTypeError, lambda: squared_loss(INTEGERS, INTEGERS, 0.5), "cannot hold 0.5"),
    (SpaceError, lambda: chain(sigmoid(X), relu(tensor("q", (2,), dtype=np.float32))), "dtypes"),
]


@pytest.mark.parametrize(("error", "make", "text"), REFUSED)
def test_mistakes_are_refused(error: type[LinopError], make: Callable[[], Any], text: str) -> None:
    with pytest.raises(error, match=text):
        make()
