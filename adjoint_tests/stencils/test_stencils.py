"""Stencils against numpy.pad and slices, and against SciPy's correlation; what travels against a
count of elements. Whole numbers, compared with ``==``."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy
from hypothesis import example, given
from hypothesis import strategies as st

import linop
from linop import Partition, Space, TensorSpace
from linop.errors import ArgumentError, DTypeError, LinopError, PartitionError, ShapeError
from linop.testing.describing import Description, grids, seeds, shapes, tensor_of, whole_numbers
from linop.testing.factories import build, describe
from support.contracts.stencils import (
    by_slices,
    coefficients_of_own_blocks,
    global_taps,
    is_its_oracle,
    small_tiles,
)
from support.requirements import needs_mpi
from support.workers import EVERY_ROAD, on_ranks, on_threads

SCIPY = {
    "zero": "constant",
    "periodic": "grid-wrap",
    "reflect": "mirror",
    "symmetric": "reflect",
    "edge": "nearest",
}
UNEVEN: Description = {
    "source": {
        "shape": (7, 5),
        "grid": (2, 2),
        "workers": (3, 1, 0, 2),
        "axes": (1, 0),
        "dtype": "int64",
        "name": "x",
    }
}
VARYING = (((3, -3), "array", 1), ((-3, 0), "vector", 2), ((0, 3), "function", 3))


# The map


@example({**UNEVEN, "boundary": ("reflect", "edge"), "taps": VARYING}, 0)
@given(describe("stencil"), seeds)
def test_every_partition_is_the_global_stencil(described: Description, seed: int) -> None:
    is_its_oracle(linop.backends.get("reference"), described, seed)
    with small_tiles():
        is_its_oracle(linop.backends.get("threads"), described, seed)


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
@given(data=st.data(), seed=seeds)
def test_on_threads(workers: int, data: st.DataObject, seed: int) -> None:
    on_threads(workers, is_its_oracle, data.draw(describe("stencil", workers)), seed)


@needs_mpi
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@given(data=st.data(), seed=seeds)
def test_on_ranks(ranks: int, data: st.DataObject, seed: int) -> None:
    road = EVERY_ROAD[data.draw(st.sampled_from(sorted(EVERY_ROAD)))]
    on_ranks(ranks, is_its_oracle, data.draw(describe("stencil", ranks)), seed, **road)


def test_workers_give_their_own_coefficients() -> None:
    for workers in (1, 4):
        on_threads(workers, coefficients_of_own_blocks)


@needs_mpi
def test_ranks_give_their_own_coefficients() -> None:
    on_ranks(3, coefficients_of_own_blocks)


@given(describe("stencil"))
def test_the_matrix_is_the_stencil_of_unit_vectors(described: Description) -> None:
    """One region for the whole tensor: its flat order is the global one."""
    shape = described["source"]["shape"]
    X = TensorSpace(shape, Partition((1,)), described["source"]["dtype"], [linop.COPIES])
    taps = global_taps(described)
    S = linop.stencil(X, taps, described["boundary"])
    units = np.eye(X.size, dtype=X.dtype).reshape((X.size, *shape))
    columns = [by_slices(unit, taps, described["boundary"]).ravel() for unit in units]
    wanted = np.array(columns, X.dtype).reshape(X.size, X.size).T
    assert (S.to_matrix() == wanted).all()
    assert (S.H.to_matrix() == wanted.conj().T).all()


@given(
    sides=st.lists(st.sampled_from([1, 3, 5]), min_size=1, max_size=3),
    mode=st.sampled_from(sorted(SCIPY)),
    dtype=st.sampled_from(["int64", "float64", "complex128"]),
    data=st.data(),
    seed=seeds,
)
def test_arrays_of_weights_are_scipys(
    sides: list[int], mode: Any, dtype: str, data: st.DataObject, seed: int
) -> None:
    shape = tuple(data.draw(st.integers(1, 6)) for _ in sides)
    X = TensorSpace(shape, Partition(data.draw(grids(8, most=len(sides)))), dtype)
    weights, x = whole_numbers(sides, dtype, seed), whole_numbers(shape, dtype, seed + 1, 9)
    wanted = scipy.ndimage.correlate(x, weights.conj(), mode=SCIPY[mode])  # it conjugates them
    assert (X.gather(linop.stencil(X, weights, mode)(X.scatter(x))) == wanted).all()


@given(st.integers(1, 6), st.data(), seeds)
def test_an_origin_moves_the_middle(n: int, data: st.DataObject, seed: int) -> None:
    X = TensorSpace((5, 6), Partition((2, 2)), np.int64)
    weights = whole_numbers((n, 2), np.int64, seed)
    origin = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, 1))
    S = linop.stencil(X, weights, "periodic", origin=origin)
    taps = {(i - origin[0], j - origin[1]): w for (i, j), w in np.ndenumerate(weights)}
    assert S.equals(linop.stencil(X, taps, "periodic"))
    x = whole_numbers((5, 6), np.int64, seed, 9)
    assert (X.gather(S(X.scatter(x))) == by_slices(x, taps, ["periodic"] * 2)).all()


def test_blocks_of_many_tiles() -> None:
    """Also that elements are the same, to the last bit, on any partition."""
    x, c = (np.random.default_rng(k).standard_normal((400, 300)) for k in (0, 1))
    taps = {(0, 0): c, **{(k, 0): 0.3 for k in (-4, 4, 1)}, (0, -2): -1.0, (2, 5): 0.7}
    found = []
    for grid in ((1, 1), (3, 1), (2, 2)):
        X = TensorSpace((400, 300), Partition(grid))
        S = linop.stencil(X, taps, ("edge", "periodic"))
        found.append(X.gather(S(X.scatter(x))))
        u, v = X.scatter(x), X.scatter(c)
        np.testing.assert_allclose(v.inner(S(u)), S.H(v).inner(u), rtol=1e-12)
    np.testing.assert_allclose(found[0], by_slices(x, taps, ("edge", "periodic")), atol=1e-14)
    assert all((other == found[0]).all() for other in found)


def test_taps_of_one_array_are_summed_first() -> None:
    """Of one worker and of many; the array is multiplied once, and kept once."""
    c = whole_numbers((7, 5), np.int64, 1, 9)
    taps = {(0, 0): c + 1, (1, 0): c, (-1, 0): c, (0, 2): 3, (2, -1): c}
    x, y = (whole_numbers((7, 5), np.int64, seed, 9) for seed in (2, 3))
    for grid in ((1, 1), (3, 2)):
        X = TensorSpace((7, 5), Partition(grid), np.int64)
        S = linop.stencil(X, taps, "periodic")
        assert (X.gather(S(X.scatter(x))) == by_slices(x, taps, ["periodic"] * 2)).all()
        assert X.scatter(y).inner(S(X.scatter(x))) == S.H(X.scatter(y)).inner(X.scatter(x))
    given = S.origin.arguments[1] if S.origin else {}
    assert given[1, 0] is given[-1, 0] and given[1, 0] is not c


def test_zeros_of_varying_coefficients_multiply_nothing() -> None:
    X = TensorSpace(6, Partition(2))
    x, c = np.array([1, 2, np.nan, 4, np.inf, 6]), np.array([1.0, 0, 2, 0, 3, 1])
    S = linop.stencil(X, {1: c, 0: 1.0})
    finite = [np.isfinite(X.gather(op(X.scatter(x)))).tolist() for op in (S, S.H)]
    assert finite == [
        [True, True, False, True, False, True],
        [True, True, False, False, False, False],
    ]


# What travels


def counted(
    X: TensorSpace, offsets: list[tuple[int, ...]], boundary: tuple[str, ...]
) -> dict[tuple[int, int], int]:
    """Elements that each worker needs of each other one, each once."""
    index = np.arange(X.size).reshape(X.global_shape)
    owner = np.zeros(X.global_shape, int)
    for worker in X.workers:
        owner[X.slices(worker)] = worker
    found: dict[tuple[int, int], int] = {}
    for worker in X.workers:
        reads = [by_slices(index + 1, {at: 1}, boundary)[X.slices(worker)] for at in offsets]
        needed = np.unique(np.concatenate([np.ravel(read) for read in reads])) - 1
        for k in needed[needed >= 0]:
            pair = int(owner.flat[k]), worker
            found[pair] = found.get(pair, 0) + 1
    return {pair: n for pair, n in found.items() if pair[0] != pair[1]}


@given(
    shape=shapes(2, 7).filter(all),
    offsets=st.lists(st.tuples(*[st.integers(-3, 3)] * 2), min_size=1, max_size=6, unique=True),
    data=st.data(),
)
def test_no_element_travels_that_no_tap_reads_and_none_twice(
    shape: tuple[int, int], offsets: list[tuple[int, ...]], data: st.DataObject
) -> None:
    boundary = tuple(data.draw(st.sampled_from(sorted(SCIPY))) for _ in shape)
    X = TensorSpace(shape, Partition(data.draw(grids(8, least=2, most=2))), np.int64)
    cost = linop.stencil(X, dict.fromkeys(offsets, 1), boundary).cost()
    wanted = counted(X, offsets, boundary)
    assert cost.messages == len(wanted)
    assert cost.bytes == 8 * sum(wanted.values())


def test_halos_of_a_star_have_no_corners() -> None:
    X = TensorSpace((64, 64), Partition((4, 4)))
    star = {(k, 0): 1.0 for k in range(-4, 5)} | {(0, k): 1.0 for k in range(-4, 5)}
    S = linop.stencil(X, star, "periodic")
    assert S.cost().messages == S.H.cost().messages == 16 * 4
    assert S.cost().bytes == S.H.cost().bytes == 16 * 4 * (4 * 16) * 8
    square = linop.stencil(X, np.ones((9, 9)), "periodic")
    assert square.cost().messages == 16 * 8
    assert square.cost().bytes == 16 * (24 * 24 - 16 * 16) * 8
    assert linop.stencil(X, {(0, 0): 2.0}).cost().messages == 0
    assert linop.stencil(X, {(0, 0): 2.0, (3, 0): 0.0}).cost().messages == 0  # zeros are skipped


# The operator


def test_it_maps_a_tensor_space_to_itself() -> None:
    X = TensorSpace((6, 5), Partition((2, 2)))
    S = linop.stencil(X, np.ones((3, 3)), name="A")
    assert S.domain is X and S.codomain is X
    assert str(S) == "A" and str(S.H) == "A*"
    assert (S**2).domain is X
    assert pickle.loads(pickle.dumps(S)).equals(S)
    assert (
        str(linop.stencil(TensorSpace((), Partition((1,)), axes=[linop.COPIES]), {(): 2.0})) == "St"
    )


def test_users_arrays_are_copied() -> None:
    X = TensorSpace(4, Partition(2))
    c, v = np.ones(4), X.scatter(np.ones(4))
    S = linop.stencil(X, {0: c, 1: v})
    c[:] = 7
    v["x@0"][:] = 7
    assert (X.gather(S(X.scatter(np.ones(4)))) == [2, 2, 2, 1]).all()


def test_many_workers_are_planned_at_once() -> None:
    X = TensorSpace((256, 256), Partition((8, 8)))
    star = {(k, 0): 1.0 for k in range(-4, 5)} | {(0, k): 1.0 for k in range(-4, 5)}
    assert linop.stencil(X, star).cost().messages == 2 * 2 * 8 * 7


# Rejected, with the reason

X = TensorSpace((6, 4), Partition((2, 2)))
GAP = TensorSpace(6, Partition(2), bounds={0: ((0, 2), (3, 6))})
BAD: dict[str, tuple[Callable[[], Any], type[LinopError], str]] = {
    "no tensor": (lambda: linop.stencil(Space([]), {}), ArgumentError,  # type: ignore[arg-type]
                  "stencil: expected a TensorSpace, given "),
    "gap": (lambda: linop.stencil(GAP, {0: 1}), PartitionError,
            "stencil: the blocks of X must follow one another"),
    "boundary": (lambda: linop.stencil(X, {}, "wrap"), ArgumentError,  # type: ignore[arg-type]
                 "stencil: boundary 'wrap' given; there are zero, periodic, reflect, symmetric"),
    "boundaries": (lambda: linop.stencil(X, {}, ["zero"]), ShapeError,
                   "stencil: 1 boundaries for 2 dimensions"),
    "offset": (lambda: linop.stencil(X, {1: 2.0}), ShapeError,
               "stencil: offset 1 in a tensor of 2 dimensions"),
    "fraction": (lambda: linop.stencil(X, {(0, 0.5): 2.0}), ArgumentError,
                 "stencil: offset: expected a whole number, given 0.5"),
    "even": (lambda: linop.stencil(X, np.ones((2, 3))), ShapeError,
             "stencil: weights of shape (2, 3), which have no middle; give origin="),
    "dimensions": (lambda: linop.stencil(X, np.ones(3)), ShapeError,
                   "stencil: weights of shape (3,) for a tensor of shape (6, 4); one side for"),
    "origin": (lambda: linop.stencil(X, {(0, 0): 1}, origin=(0, 0)), ArgumentError,
               "stencil: origin is for an array of weights; a dict has offsets"),
    "complex": (lambda: linop.stencil(X, {(0, 0): 1j}), DTypeError,
                "stencil: 1j given, numbers of dtype float64 expected"),
    "shape": (lambda: linop.stencil(X, {(0, 0): np.ones((4, 6))}), ShapeError,
              "stencil: coefficients of shape (4, 6); a number, or an array of shape (6, 4)"),
    "vector": (lambda: linop.stencil(X, {(0, 0): GAP.zeros()}), LinopError,
               "stencil: coefficients"),
    "block": (lambda: linop.stencil(X, {(0, 0): lambda at: np.ones(3)})(X.zeros()), ShapeError,
              "stencil: the function of coefficients returned shape (3,) for the block "),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_stencils_are_named(case: str) -> None:
    attempt, error, message = BAD[case]
    with pytest.raises(error) as caught:
        attempt()
    assert message in str(caught.value)


def test_the_oracle_notices_a_wrong_operator() -> None:
    described = {**UNEVEN, "boundary": ("zero", "zero"), "taps": (((0, 1), "array", 1),)}
    other = {**described, "boundary": ("edge", "edge")}
    x = whole_numbers((7, 5), np.int64, 0, 9)
    Z = tensor_of(described["source"])
    found = Z.gather(build("stencil", other)(Z.scatter(x)))
    assert (found != by_slices(x, global_taps(described), ("zero", "zero"))).any()
