"""What users do wrong, and what they are told: the kind of error, and its words.

Wrong arguments of plans are in `test_backends`; missing workers and other failures of programs in
`test_launch`; wrong plans in `test_verify`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg

import linop
from linop import COPIES, REPLICATED, LinopError, Partition, Region, Space, TensorSpace, errors
from linop.backends import Backend, threads
from linop.errors import (
    ArgumentError,
    DTypeError,
    PartitionError,
    RegionError,
    ShapeError,
    SpaceError,
    SubsetError,
    UndecidableError,
)

a, b, c, y = Region("a", (4, 3)), Region("b", (4, 3), 1), Region("c", 3), Region("y", 2)
AB, C = Space([a, b]), Space(c)
WHOLE = Space(c, int)
I, IC, IW = linop.identity(AB), linop.identity(C), linop.identity(WHOLE)
v = C.zeros()

LINE = Partition((3,))
X, X2 = TensorSpace((6,), LINE), TensorSpace((6, 6), Partition((2, 2)))
OVER = TensorSpace((6,), LINE, axes=(COPIES,))
SAME = TensorSpace((6,), LINE, axes=(REPLICATED,))
TWO = Partition((2,))
GAP = TensorSpace((6,), TWO, bounds={0: ((0, 2), (3, 6))})
OVERLAP = TensorSpace((6,), TWO, bounds={0: ((0, 4), (3, 6))})
LONG = linop.local(c, y, lambda x: x, lambda z: z)
SHORT = linop.local(c, Region("z", 3), lambda x: x.astype(np.float32), lambda z: z)
BARE = linop.local(C, Space([y, Region("z", 3)]), lambda x: x, lambda z: z["z"])


class Foreign:
    """An array in another kind of memory."""

    shape, dtype = (3,), np.dtype(float)


BUILT_IN = {
    "SpaceError": ValueError,
    "RegionError": KeyError,
    "SubsetError": IndexError,
    "ShapeError": ValueError,
    "DTypeError": TypeError,
    "ArgumentError": TypeError,
    "PartitionError": ValueError,
    "UndecidableError": RuntimeError,
    "PlanError": RuntimeError,
    "BackendError": RuntimeError,
    "DeadlockError": RuntimeError,
    "MissingExtraError": ImportError,
}
"""The built-in error that each error of linop is, too."""

Case = tuple[Callable[[], Any], type[LinopError], str]

# fmt: off
REGIONS: list[Case] = [
    (lambda: Region("", 1), ArgumentError, "a region's name is a non-empty string; given ''"),
    (lambda: Region(3, 1), ArgumentError, "non-empty string; given 3"),  # type: ignore[arg-type]
    (lambda: Region("x", -1), SpaceError, "shape of region 'x': (-1,) has a negative number"),
    (lambda: Region("x", 1.5), ArgumentError, "expected whole numbers, given 1.5"),  # type: ignore[arg-type]
    (lambda: Region("x", 1, ()), SpaceError, "region 'x' is held by no worker; give at least one"),
    (lambda: Region("x", 1, (1, 1)), SpaceError, "region 'x' names a worker twice: (1, 1)"),
    (lambda: Region("x", 1, -1), SpaceError, "workers of region 'x': (-1,) has a negative number"),
    (lambda: list(a), ArgumentError, "region 'a' is not iterable; index it with slices"),
    (lambda: a[5:], SubsetError, "region 'a', dimension 0 of extent 4: 5:None is out of bounds"),
    (lambda: a[:, 0:9], SubsetError, "dimension 1 of extent 3: 0:9 is out of bounds"),
    (lambda: a[-9:], SubsetError, "dimension 0 of extent 4: -9:None is out of bounds"),
    (lambda: a[::2], SubsetError, "step 2 given; subsets have unit steps"),
    (lambda: a[0], SubsetError, "index 0 given; a subset keeps all dimensions, so give a slice: i:i+1"),  # type: ignore[index]  # noqa: E501
    (lambda: a[:, :, :], SubsetError, "region 'a' has 2 dimensions; 3 indices given"),
    (lambda: a[..., ...], SubsetError, "region 'a': more than one '...'"),
    (lambda: a[3:1], SubsetError, "3:1 ends before it starts"),
    (lambda: a[1.5:], SubsetError, "1.5"),
    (lambda: a["x":], SubsetError, "'x'"),  # type: ignore[misc]
    (lambda: Space([a, Region("a", 1)]), RegionError, "duplicate region 'a' in a space: ['a', 'a']"),
    (lambda: Space(["a"]), ArgumentError, "a Space is made of Regions; given 'a'"),  # type: ignore[list-item]
    (lambda: Space(a, "U3"), DTypeError, "a space holds numbers; given dtype <U3"),
    (lambda: Space(a, bool), DTypeError, "a space holds numbers; given dtype bool"),
    (lambda: AB["z"], RegionError, "unknown region 'z'; this space has 'a', 'b'"),
    (lambda: v["z"], RegionError, "unknown region 'z'; this space has 'c'"),
]

OPERATORS: list[Case] = [
    (lambda: linop.add(AB, a, c), RegionError, "unknown region 'c'; this space has 'a', 'b'"),
    (lambda: linop.add(AB, a, a), SpaceError, "add a to a: they overlap; go through a region between"),
    (lambda: linop.add(AB, a[:3], a[2:]), ShapeError, "shapes (3, 3) and (2, 3) must be equal"),
    (lambda: linop.add(AB, a[:2], b), ShapeError, "add a[0:2, 0:3] to b: shapes (2, 3) and (4, 3) must"),
    (lambda: linop.clear(AB, Region("a", 9)), RegionError, "this space is Region(name='a', shape=(4, 3)"),
    (lambda: linop.clear(AB, "a"), ArgumentError, "expected a Region or a Subset of one, given 'a'"),  # type: ignore[arg-type]  # noqa: E501
    (lambda: linop.allocate(AB, Region("a", 9)), RegionError, "the space has a region 'a' already"),
    (lambda: linop.allocate(C, a[:1]), ArgumentError, "allocate: expected a whole Region, given Subset"),  # type: ignore[arg-type]  # noqa: E501
    (lambda: linop.allocate(C), ArgumentError, "allocate: expected at least one region"),
    (lambda: linop.deallocate(AB, c), RegionError, "unknown region 'c'"),
    (lambda: linop.move(Space(a), a[:1], Region("n", (1, 3))), SpaceError, "only a whole region can leave"),
    (lambda: IC @ LONG, SpaceError, "composition (I) @ (L): left domain, right codomain"),
    (lambda: linop.copy(Space(a), a, b) ** 2, SpaceError, "power: the spaces differ"),
    (lambda: IC**2.5, ArgumentError, "power: expected a whole number from 0, given 2.5"),  # type: ignore[operator]
    (lambda: IC**-1, ArgumentError, "power: expected a whole number from 0, given -1"),
    (lambda: IC * IC, ArgumentError, "op * op: compose operators with @; * takes a scalar"),  # type: ignore[operator]
    (lambda: IC * 1j, DTypeError, "complex scalar 1j on a space of dtype float64"),
    (lambda: IC * math.inf, ArgumentError, "a scalar multiple needs a finite number, given inf"),
    (lambda: IC * math.nan, ArgumentError, "a scalar multiple needs a finite number, given nan"),
    (lambda: IW * 0.5, DTypeError, "fraction 0.5 on a space of dtype int64"),
    (lambda: IW / 2, DTypeError, "fraction 0.5 on a space of dtype int64"),
    (lambda: IW * math.nan, LinopError, "nan"),
    (lambda: IW * math.inf, LinopError, "inf"),
    (lambda: IC.equals(3), ArgumentError, "equals: expected an operator, given 3"),  # type: ignore[arg-type]
    (lambda: IC.compile("threads"), ArgumentError, "given 'threads'; make one with linop.backends.get(name)"),  # type: ignore[arg-type]  # noqa: E501
    (lambda: linop.zero(C, WHOLE), SpaceError, "keeps the dtype: domain float64, codomain int64"),
    (lambda: linop.identity(3), ArgumentError, "an operator maps a Space to a Space; given 3"),  # type: ignore[arg-type]
    (lambda: linop.direct_sum(), ArgumentError, "direct_sum: expected at least one operator"),
    (lambda: linop.direct_sum(IC, 3), ArgumentError, "direct_sum: expected operators, given 3"),  # type: ignore[arg-type]
    (lambda: linop.direct_sum(IC, IC), RegionError, "duplicate region 'c' in a space: ['c', 'c']"),
    (lambda: linop.direct_sum(I, IW), SpaceError, "a direct sum keeps the dtype; given ['float64', 'int64']"),
    (lambda: linop.hstack(IC, I), SpaceError, "sum of operators, codomains: the spaces differ"),
    (lambda: linop.vstack(IC, IC), RegionError, "duplicate region 'c'"),
    (lambda: LONG.movement(), UndecidableError, "not data movement alone: it contains the local operators L"),
    (lambda: LONG.equals(linop.local(c, y, abs, abs)), UndecidableError, "the matrix of L is not known"),
    (lambda: linop.testing.check_adjoint(3), ArgumentError, "check_adjoint: expected an operator, given 3"),  # type: ignore[arg-type]  # noqa: E501
    (lambda: linop.testing.check_exact(3), ArgumentError, "check_exact: expected an operator, given 3"),  # type: ignore[arg-type]  # noqa: E501
]

VECTORS: list[Case] = [
    (lambda: IC(np.ones(4)), ShapeError, "array of region 'c': shape (4,) given, (3,) expected"),
    (lambda: IC(np.ones(3, np.float32)), DTypeError, "float32 given, float64 expected; convert it with .astype('float64')"),  # noqa: E501
    (lambda: IC(Foreign()), ArgumentError, "test_bad_input.Foreign given, numpy.ndarray expected"),
    (lambda: IC([1, 2]), ShapeError, "shape (2,) given, (3,) expected"),
    (lambda: IC([1, 2, 3j]), DTypeError, "region 'c'"),
    (lambda: IC("abc"), DTypeError, "region 'c'"),
    (lambda: WHOLE.vector([0.5, 1, 2]), DTypeError, "region 'c'"),
    (lambda: IC(AB.zeros()), SpaceError, "argument of an operator: the spaces differ"),
    (lambda: I(np.ones(3)), ArgumentError, "space of one region; this one has 2: give a dict by region name (a, b)"),  # noqa: E501
    (lambda: I({"a": np.ones((4, 3))}), SpaceError, "needs all 2 regions, this vector holds ['a']"),
    (lambda: I({"z": 1}), RegionError, "unknown region 'z'; this space has 'a', 'b'"),
    (lambda: v * 1j, DTypeError, "complex scalar 1j on a space of dtype float64"),
    (lambda: WHOLE.zeros() * 0.5, DTypeError, "fraction 0.5 on a space of dtype int64"),
    (lambda: WHOLE.zeros() / 2, DTypeError, "fraction 0.5 on a space of dtype int64"),
    (lambda: v + AB.zeros(), SpaceError, "vector arithmetic: the spaces differ"),
    (lambda: v.inner(AB.zeros()), SpaceError, "inner product, right side: the spaces differ"),
    (lambda: v.inner(3), ArgumentError, "given 3"),  # type: ignore[arg-type]
    (lambda: C.unflatten([1j, 2, 3]), DTypeError, "flat vector of dtype complex128 given, float64 expected"),
    (lambda: WHOLE.unflatten([0.5, 2, 3]), DTypeError, "flat vector of dtype float64 given, int64 expected"),
    (lambda: C.unflatten([1, 2]), ShapeError, "flat vector of size 2 given, 3 expected"),
    (lambda: C.flatten(AB.zeros()), SpaceError, "flatten: the spaces differ"),
    (lambda: IC.to_scipy() @ (1j * np.ones(3)), DTypeError, "complex128 given, float64 expected"),
    (lambda: OVER.gather(OVER.random(0)), SpaceError, "block 'x@0' differs from another copy of its elements"),
    (lambda: OVERLAP.gather(OVERLAP.random(0)), SpaceError, "differs from another copy of its elements"),
    (lambda: GAP.gather(GAP.zeros()), SpaceError, "leave out elements of the tensor"),
    (lambda: X.gather(v), SpaceError, "gather: the spaces differ"),
    (lambda: X.gather({"x@0": np.ones(2)}), SpaceError, "gather needs all 3 regions"),
    (lambda: X.scatter(np.ones(5)), ShapeError, "global array of shape (5,) given, (6,) expected"),
    (lambda: X.scatter(1j * np.ones(6)), DTypeError, "dtype complex128 given, float64 expected"),
    (lambda: LONG(np.ones(3)), ShapeError, "local operator L returned: array of region 'y': shape (3,)"),
    (lambda: SHORT(np.ones(3)), DTypeError, "local operator L returned: array of region 'z': dtype float32"),
    (lambda: BARE(np.ones(3)), ShapeError, "returned ndarray; expected arrays for the regions ['y', 'z']"),
]

PARTITIONS: list[Case] = [
    (lambda: Partition((0,)), PartitionError, "axes have at least one worker; given (0,)"),
    (lambda: Partition((2,), [0]), PartitionError, "shape (2,) has 2 workers; 1 given"),
    (lambda: Partition((2,), [0, 0]), PartitionError, "names a worker twice: (0, 0)"),
    (lambda: Partition(2.5), ArgumentError, "expected whole numbers, given 2.5"),  # type: ignore[arg-type]
    (lambda: LINE.coordinates(5), PartitionError, "worker 5 is not in Partition((3,))"),
    (lambda: LINE.worker(3), PartitionError, "coordinates (3,) are outside of a grid of shape (3,)"),
    (lambda: LINE.extend(0), PartitionError, "cannot extend a partition of 1 axes to 0"),
    (lambda: LINE[5], PartitionError, "index 5 into a grid of shape (3,)"),
    (lambda: TensorSpace(6, Partition((2, 2))), PartitionError, "grid axis 1 of Partition((2, 2)) splits dimension 1"),  # noqa: E501
    (lambda: TensorSpace(6, TWO, axes=(0, 0)), PartitionError, "axes (0, 0) for a grid of 1 axes; give one"),
    (lambda: TensorSpace((6, 6), Partition((2, 2)), axes=(0, 0)), PartitionError, "split the same tensor"),
    (lambda: TensorSpace(6, TWO, axes=("x",)), ArgumentError, "COPIES or REPLICATED; given 'x'"),  # type: ignore[arg-type]
    (lambda: TensorSpace(6, TWO, sizes={0: (1, 2)}), PartitionError, "blocks (1, 2) of dimension 0 do not sum to 6"),  # noqa: E501
    (lambda: TensorSpace(6, TWO, sizes={0: (1, 2, 3)}), PartitionError, "3 blocks of dimension 0 for 2 grid"),
    (lambda: TensorSpace(6, TWO, bounds={0: ((0, 3), (3, 9))}), PartitionError, "leave its extent 6"),
    (lambda: TensorSpace(6, (2,)), ArgumentError, "expected a Partition, given (2,)"),  # type: ignore[arg-type]
    (lambda: X.region(7), PartitionError, "worker 7 is not in Partition((3,))"),
    (lambda: linop.broadcast(TensorSpace(6, TWO), LINE), PartitionError, "grid axis 0 does not match: 2 in the source"),  # noqa: E501
    (lambda: linop.broadcast(X2, TWO), PartitionError, "source grid 2×2 has more axes (2) than the destination"),
    (lambda: linop.broadcast(AB, LINE), ArgumentError, "broadcast: expected a TensorSpace, given Space("),  # type: ignore[arg-type]  # noqa: E501
    (lambda: linop.sum_reduce(X, Partition((1,))), PartitionError, "it splits dimension 0; give axes= with COPIES"),  # noqa: E501
    (lambda: linop.sum_reduce(OVER, TWO), PartitionError, "grid axis 0 does not match: 2 in the destination"),
    (lambda: linop.all_reduce(X, 0), PartitionError, "all_reduce: grid axis 0 does not hold independent copies"),
    (lambda: linop.all_reduce(X, 5), PartitionError, "grid axes (5,) of Partition((3,)), which has 1"),
    (lambda: linop.all_reduce(X, (0, 0)), PartitionError, "grid axes (0, 0) name an axis twice"),
    (lambda: linop.all_gather(OVER, 0), PartitionError, "all_gather: grid axis 0 splits nothing: it is COPIES"),
    (lambda: linop.all_gather(X, into=0), ArgumentError, "into is COPIES or REPLICATED; given 0"),
    (lambda: linop.reduce_scatter(OVER, 0, (0, 1)), ArgumentError, "2 dims for 1 grid axes"),
    (lambda: linop.all_to_all(X2, 0, 1), PartitionError, "two grid axes split the same tensor dimension"),
    (lambda: linop.repartition(OVER, TWO), PartitionError, "holds elements more than once"),
    (lambda: linop.repartition(X, TensorSpace(7, TWO)), PartitionError, "global shape (7,) and dtype float64 given, (6,)"),  # noqa: E501
    (lambda: linop.repartition(X, TensorSpace(6, TWO, int)), PartitionError, "dtype int64 given, (6,) and float64"),  # noqa: E501
    (lambda: linop.scatter(X, TWO), PartitionError, "the tensor is on workers (0, 1, 2); expected one"),
    (lambda: linop.shift(SAME, 1), PartitionError, "along grid axis 0 all workers hold the same block"),
    (lambda: linop.shift(X, 0.5), ArgumentError, "0.5"),  # type: ignore[arg-type]
    (lambda: linop.halo_exchange(X, 9), ShapeError, "extent 6: a kernel of size 9, dilation 1 and padding 0 does not"),  # noqa: E501
    (lambda: linop.halo_exchange(X, 3, stride=0), ShapeError, "stride: (0,); each is at least 1"),
    (lambda: linop.halo_exchange(X, (3, 3)), ShapeError, "kernel_size: 2 numbers for 1 dimensions: (3, 3)"),
    (lambda: linop.halo_geometry(6, Partition((2, 2)), 3), PartitionError, "grid axis 1 of Partition((2, 2))"),
]

LOCAL: list[Case] = [
    (lambda: linop.matrix(np.ones((2, 3)), y, y), ShapeError, "shape (2, 3) given for y[2]@0 -> y[2]@0, which needs (2, 2)"),  # noqa: E501
    (lambda: linop.matrix(np.ones(3)), ShapeError, "matrix: expected two dimensions, given shape (3,)"),
    (lambda: linop.matrix(np.ones((12, 12)), a, b), SpaceError, "its regions are on different workers: a[4, 3]@0 -> b[4, 3]@1"),  # noqa: E501
    (lambda: linop.matrix(1j * np.ones((3, 3)), C, C), DTypeError, "complex128 on a space of dtype float64"),
    (lambda: linop.matrix(np.ones((3, 3)) / 2, WHOLE, WHOLE), DTypeError, "float64 on a space of dtype int64"),
    (lambda: linop.matrix(np.ones((2, 3)), "x"), ArgumentError, "expected a Region or a Space, given 'x'"),  # type: ignore[arg-type]  # noqa: E501
    (lambda: linop.diagonal(np.ones(2), c), ShapeError, "diagonal: shape (2,) given for the space c[3]@0"),
    (lambda: linop.fft(C), DTypeError, "fft: a space of dtype float64 given, a complex one expected"),
    (lambda: linop.fft(AB), SpaceError, "fft: a space of one region expected, given a[4, 3]@0 ⊕ b[4, 3]@1"),
    (lambda: linop.restriction(c, [5]), ShapeError, "indices outside of a region of 3 elements"),
    (lambda: linop.restriction(c, [0.5]), LinopError, "whole numbers"),
    (lambda: linop.convolution(np.ones(2), a, b), ShapeError, "kernel of shape (2,) for a region of (4, 3)"),
    (lambda: linop.convolution(np.ones(2), c, c), ShapeError, "output of shape (2,); (3,) given"),
    (lambda: linop.local(c, b, abs, abs), SpaceError, "a local operator stays inside one worker"),
    (lambda: linop.from_scipy(scipy.sparse.linalg.aslinearoperator(np.ones((2, 3))), c, c), ShapeError, "which needs (3, 3)"),  # noqa: E501
]
# fmt: on

CASES = {
    f"{name}-{k}": case
    for name, cases in (
        ("regions", REGIONS),
        ("operators", OPERATORS),
        ("vectors", VECTORS),
        ("partitions", PARTITIONS),
        ("local", LOCAL),
    )
    for k, case in enumerate(cases)
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_mistake_is_told(case: Case) -> None:
    make, error, text = case
    with pytest.raises(error, match=re.escape(text)):
        make()


def test_every_error_is_the_fitting_built_in() -> None:
    family = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, LinopError) and kind is not LinopError
    }
    assert family.keys() == BUILT_IN.keys()
    for name, kind in family.items():
        assert issubclass(kind, BUILT_IN[name])
        assert str(kind("the text\nof it")) == "the text\nof it"  # not its repr, as KeyError's


def test_spaces_that_differ_are_shown_side_by_side() -> None:
    other = Space([Region("a", (4, 3), (0, 2)), c, Region("b", (4, 3), 1)], np.float32)
    with pytest.raises(SpaceError) as caught:
        linop.identity(AB) @ linop.identity(other)
    assert str(caught.value).splitlines() == [
        "composition (I) @ (I): left domain, right codomain: the spaces differ",
        "  dtype float64                 ≠  dtype float32",
        "  'a' shape (4, 3) on worker 0  ≠  'a' shape (4, 3) on worker 0,2",
        "  (no 'c')                      ≠  'c' shape (3,) on worker 0",
    ]
    with pytest.raises(SpaceError, match="sum of operators, domains: the spaces differ\n .* ≠  "):
        linop.identity(AB) + linop.identity(other)


def test_many_differences_are_cut_short() -> None:
    many = Space([Region(f"r{k}", k) for k in range(100)])
    with pytest.raises(SpaceError) as caught:
        many.zeros() + v
    assert len(str(caught.value).splitlines()) == 13


@pytest.mark.parametrize(
    "make",
    [
        lambda: IC + 1,
        lambda: 1 + IC,
        lambda: IC / IC,
        lambda: IC * "x",
        lambda: IC * np.ones(3),
        lambda: v * IC,
        lambda: v * v,
        lambda: v + 1,
        lambda: v / v,
        lambda: v @ v,
    ],
)
def test_nonsense_arithmetic_is_a_type_error(make: Callable[[], Any]) -> None:
    """As Python says it of operands that do not know each other."""
    with pytest.raises(TypeError):
        make()


def test_errors_come_before_any_message(monkeypatch: pytest.MonkeyPatch) -> None:
    put, tags = threads.Group.put, []

    def recorded(group: Any, sender: int, receiver: int, tag: int, item: Any) -> None:
        tags.append(tag)
        put(group, sender, receiver, tag, item)

    monkeypatch.setattr(threads.Group, "put", recorded)

    def main(backend: Backend) -> None:
        plan = linop.shift(X, 1).compile(backend)
        tags.clear()
        with pytest.raises(ShapeError):
            plan(np.ones(7))

    linop.launch(main, workers=3)
    assert all(tag < 0 for tag in tags)  # those that compare operators, and none of a plan
