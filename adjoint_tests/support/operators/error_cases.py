"""Cases of wrong use and their errors: the table of `test_errors`, and its names."""

from __future__ import annotations

from typing import Any

import numpy as np

import linop
from linop import COPIES, REPLICATED, Partition, Region, Space, TensorSpace

a, b, c, y = Region("a", (4, 3)), Region("b", (4, 3), 1), Region("c", 3), Region("y", 2)
AB, C = Space([a, b]), Space(c)
WHOLE = Space(c, int)
IAB, IC, IW = linop.identity(AB), linop.identity(C), linop.identity(WHOLE)
v = C.zeros()

LINE = Partition((3,))
X, X2 = TensorSpace((6,), LINE), TensorSpace((6, 6), Partition((2, 2)))
OVER = TensorSpace((6,), LINE, axes=(COPIES,))
SAME = TensorSpace((6,), LINE, axes=(REPLICATED,))
TWO = Partition((2,))
GAP = TensorSpace((6,), TWO, bounds={0: ((0, 2), (3, 6))})
OVERLAP = TensorSpace((6,), TWO, bounds={0: ((0, 4), (3, 6))})
WAVES = TensorSpace((6, 6), Partition((2, 2)), complex)
LONG = linop.local(c, y, lambda x: x, lambda z: z)
SHORT = linop.local(c, Region("z", 3), lambda x: x.astype(np.float32), lambda z: z)
BARE = linop.local(C, Space([y, Region("z", 3)]), lambda x: x, lambda z: z["z"])


class Foreign:
    """An array in another kind of memory."""

    shape, dtype = (3,), np.dtype(float)


MISTAKES = """
# Regions and spaces

Region("", 1)
    ArgumentError: a region's name is a non-empty string; given ''
Region(3, 1)
    ArgumentError: non-empty string; given 3
Region("x", -1)
    SpaceError: shape of region 'x': (-1,) has a negative number
Region("x", 1.5)
    ArgumentError: expected whole numbers, given 1.5
Region("x", 1, ())
    SpaceError: region 'x' is held by no worker; give at least one
Region("x", 1, (1, 1))
    SpaceError: region 'x' names a worker twice: (1, 1)
Region("x", 1, 0, "disk")
    ArgumentError: region 'x': memory is one of 'default', 'host', 'device'; given 'disk'
Region("x", 1, memory=0)
    ArgumentError: region 'x': memory is one of 'default', 'host', 'device'; given 0
X.in_memory("gpu")
    ArgumentError: memory is one of 'default', 'host', 'device'; given 'gpu'
AB.in_memory(None)
    ArgumentError: memory is one of 'default', 'host', 'device'; given None
TensorSpace((6,), LINE, memory="ram")
    ArgumentError: tensor 'x': memory is one of 'default', 'host', 'device'; given 'ram'
list(a)
    ArgumentError: region 'a' is not iterable; index it with slices
a[5:]
    SubsetError: region 'a', dimension 0 of extent 4: 5:None is out of bounds
a[:, 0:9]
    SubsetError: dimension 1 of extent 3: 0:9 is out of bounds
a[-9:]
    SubsetError: dimension 0 of extent 4: -9:None is out of bounds
a[::2]
    SubsetError: step 2 given; subsets have unit steps
a[0]
    SubsetError: index 0 given; a subset keeps all dimensions, so give a slice: i:i+1
a[:, :, :]
    SubsetError: region 'a' has 2 dimensions; 3 indices given
a[..., ...]
    SubsetError: region 'a': more than one '...'
a[3:1]
    SubsetError: 3:1 ends before it starts
a[1.5:]
    SubsetError: 1.5
Space([a, Region("a", 1)])
    RegionError: duplicate region 'a' in a space: ['a', 'a']
Space(["a"])
    ArgumentError: a Space is made of Regions; given 'a'
Space(a, "U3")
    DTypeError: a space holds numbers; given dtype <U3
Space(a, bool)
    DTypeError: a space holds numbers; given dtype bool
AB["z"]
    RegionError: unknown region 'z'; this space has 'a', 'b'
v["z"]
    RegionError: unknown region 'z'; this space has 'c'

# Operators

linop.add(AB, a, c)
    RegionError: unknown region 'c'; this space has 'a', 'b'
linop.add(AB, a, a)
    SpaceError: add a to a: they overlap; go through a region between
linop.add(AB, a[:3], a[2:])
    ShapeError: shapes (3, 3) and (2, 3) must be equal
linop.add(AB, a[:2], b)
    ShapeError: add a[0:2, 0:3] to b: shapes (2, 3) and (4, 3) must
linop.clear(AB, Region("a", 9))
    RegionError: this space is Region(name='a', shape=(4, 3)
linop.clear(AB, "a")
    ArgumentError: expected a Region or a Subset of one, given 'a'
linop.allocate(AB, Region("a", 9))
    RegionError: the space has a region 'a' already
linop.allocate(C, a[:1])
    ArgumentError: allocate: expected a whole Region, given Subset
linop.allocate(C)
    ArgumentError: allocate: expected at least one region
linop.move(AB, a, Region("a", (4, 3), 0, "host"))
    RegionError: given Region(name='a', shape=(4, 3), workers=(0,), memory='host')
linop.offload(a)
    ArgumentError: offload: expected a Space, given Region
linop.offload(AB, "disk")
    ArgumentError: memory is one of 'default', 'host', 'device'; given 'disk'
IAB @ linop.identity(AB.in_memory("host"))
    SpaceError: 'a' shape (4, 3) on worker 0  ≠  'a' shape (4, 3) on worker 0:host
linop.deallocate(AB, c)
    RegionError: unknown region 'c'
linop.move(Space(a), a[:1], Region("n", (1, 3)))
    SpaceError: only a whole region can leave
IC @ LONG
    SpaceError: composition (I) @ (L): left domain, right codomain
linop.copy(Space(a), a, b) ** 2
    SpaceError: power: the spaces differ
IC**2.5
    ArgumentError: power: expected a whole number, given 2.5
IC**-1
    ArgumentError: power: expected a whole number from 0, given -1
IC * IC
    ArgumentError: op * op: compose operators with @; * takes a scalar
IW * 1j
    DTypeError: complex scalar 1j on a space of dtype int64
linop.real(X)
    DTypeError: Re: a complex space expected, given one of dtype float64
IC * np.inf
    ArgumentError: a scalar multiple needs a finite number, given inf
IC * np.nan
    ArgumentError: a scalar multiple needs a finite number, given nan
IW * 0.5
    DTypeError: fraction 0.5 on a space of dtype int64
IW / 2
    DTypeError: fraction 0.5 on a space of dtype int64
IW * np.nan
    LinopError: nan
IC.equals(3)
    ArgumentError: equals: expected an operator, given 3
IC.compile("threads")
    ArgumentError: given 'threads'; make one with linop.backends.get(name)
linop.zero(C, WHOLE)
    SpaceError: keeps the dtype: domain float64, codomain int64
linop.identity(3)
    ArgumentError: an operator maps a Space to a Space; given 3
linop.direct_sum()
    ArgumentError: direct_sum: expected at least one operator
linop.direct_sum(IC, 3)
    ArgumentError: direct_sum: expected operators, given 3
linop.direct_sum(IC, IC)
    RegionError: duplicate region 'c' in a space: ['c', 'c']
linop.direct_sum(IAB, IW)
    SpaceError: a direct sum keeps the dtype; given ['float64', 'int64']
linop.hstack(IC, IAB)
    SpaceError: sum of operators, codomains: the spaces differ
linop.vstack(IC, IC)
    RegionError: duplicate region 'c'
LONG.movement()
    UndecidableError: not data movement alone: it contains the local operators L
LONG.equals(linop.local(c, y, abs, abs))
    UndecidableError: the matrix of L is not known
linop.testing.check_adjoint(3)
    ArgumentError: check_adjoint: expected an operator, given 3
linop.testing.check_exact(3)
    ArgumentError: check_exact: expected an operator, given 3

# Vectors and applying

IC(np.ones(4))
    ShapeError: array of region 'c': shape (4,) given, (3,) expected
IC(np.ones(3, np.float32))
    DTypeError: float32 given, float64 expected; convert it with .astype('float64')
IC(Foreign())
    ArgumentError: support.operators.error_cases.Foreign given, numpy.ndarray expected
IC([1, 2])
    ShapeError: shape (2,) given, (3,) expected
IC([1, 2, 3j])
    DTypeError: region 'c'
WHOLE.vector([0.5, 1, 2])
    DTypeError: region 'c'
IC(AB.zeros())
    SpaceError: argument of an operator: the spaces differ
IAB(np.ones(3))
    ArgumentError: space of one region; this one has 2: give a dict by region name (a, b)
IAB({"a": np.ones((4, 3))})
    SpaceError: needs all 2 regions, this vector holds ['a']
IAB({"z": 1})
    RegionError: unknown region 'z'; this space has 'a', 'b'
v * 1j
    DTypeError: complex scalar 1j on a space of dtype float64
WHOLE.zeros() * 0.5
    DTypeError: fraction 0.5 on a space of dtype int64
WHOLE.zeros() / 2
    DTypeError: fraction 0.5 on a space of dtype int64
v + AB.zeros()
    SpaceError: vector arithmetic: the spaces differ
v.inner(AB.zeros())
    SpaceError: inner product, right side: the spaces differ
v.inner(3)
    ArgumentError: given 3
C.unflatten([1j, 2, 3])
    DTypeError: flat vector: [1j, 2, 3] given, numbers of dtype float64 expected
WHOLE.unflatten([0.5, 2, 3])
    DTypeError: flat vector: [0.5, 2, 3] given, numbers of dtype int64 expected
C.unflatten([1, 2])
    ShapeError: flat vector of size 2 given, 3 expected
C.flatten(AB.zeros())
    SpaceError: flatten: the spaces differ
IC.to_scipy() @ (1j * np.ones(3))
    DTypeError: complex128 given, numbers of dtype float64 expected
OVER.gather(OVER.random(0))
    SpaceError: block 'x@0' differs from another copy of its elements
OVERLAP.gather(OVERLAP.random(0))
    SpaceError: differs from another copy of its elements
GAP.gather(GAP.zeros())
    SpaceError: leave out elements of the tensor
X.gather(v)
    SpaceError: gather: the spaces differ
X.gather({"x@0": np.ones(2)})
    SpaceError: gather needs all 3 regions
X.scatter(np.ones(5))
    ShapeError: global array of shape (5,) given, (6,) expected
X.scatter(1j * np.ones(6))
    DTypeError: dtype complex128 given, float64 expected
LONG(np.ones(3))
    ShapeError: local operator L returned: array of region 'y': shape (3,)
SHORT(np.ones(3))
    DTypeError: local operator L returned: array of region 'z': dtype float32
BARE(np.ones(3))
    ShapeError: returned ndarray; expected arrays for the regions ['y', 'z']

# Partitions and collectives

Partition((0,))
    PartitionError: axes have at least one worker; given (0,)
Partition((2,), [0])
    PartitionError: shape (2,) has 2 workers; 1 given
Partition((2,), [0, 0])
    PartitionError: names a worker twice: (0, 0)
Partition(2.5)
    ArgumentError: expected whole numbers, given 2.5
LINE.coordinates(5)
    PartitionError: worker 5 is not in Partition((3,))
LINE.worker(3)
    PartitionError: coordinates (3,) are outside of a grid of shape (3,)
LINE.extend(0)
    PartitionError: cannot extend a partition of 1 axes to 0
LINE[5]
    PartitionError: index 5 into a grid of shape (3,)
TensorSpace(6, Partition((2, 2)))
    PartitionError: grid axis 1 of Partition((2, 2)) splits dimension 1
TensorSpace(6, TWO, axes=(0, 0))
    PartitionError: axes (0, 0) for a grid of 1 axes; give one
TensorSpace((6, 6), Partition((2, 2)), axes=(0, 0))
    PartitionError: split the same tensor
TensorSpace(6, TWO, axes=("x",))
    ArgumentError: COPIES or REPLICATED; given 'x'
TensorSpace(6, TWO, sizes={0: (1, 2)})
    PartitionError: blocks (1, 2) of dimension 0 do not sum to 6
TensorSpace(6, TWO, sizes={0: (1, 2, 3)})
    PartitionError: 3 blocks of dimension 0 for 2 grid
TensorSpace(6, TWO, bounds={0: ((0, 3), (3, 9))})
    PartitionError: leave its extent 6
TensorSpace(6, "2")
    ArgumentError: expected a Partition, given '2'
X.region(7)
    PartitionError: worker 7 is not in Partition((3,))
linop.broadcast(TensorSpace(6, TWO), LINE)
    PartitionError: grid axis 0 does not match: 2 in the source
linop.broadcast(X2, TWO)
    PartitionError: source grid 2×2 has more axes (2) than the destination
linop.broadcast(AB, LINE)
    ArgumentError: broadcast: expected a TensorSpace, given Space(
linop.sum_reduce(X, Partition((1,)))
    PartitionError: it splits dimension 0; give axes= with COPIES
linop.sum_reduce(OVER, TWO)
    PartitionError: grid axis 0 does not match: 2 in the destination
linop.all_reduce(X, 0)
    PartitionError: all_reduce: grid axis 0 does not hold independent copies
linop.all_reduce(X, (0, 0))
    PartitionError: grid axes (0, 0) name an axis twice
linop.all_gather(OVER, 0)
    PartitionError: all_gather: grid axis 0 splits nothing: it is COPIES
linop.all_gather(X, into=0)
    ArgumentError: into is COPIES or REPLICATED; given 0
linop.reduce_scatter(OVER, 0, (0, 1))
    ArgumentError: 2 dims for 1 grid axes
linop.all_to_all(X2, 0, 1)
    PartitionError: two grid axes split the same tensor dimension
linop.repartition(OVER, TWO)
    PartitionError: holds elements more than once
linop.repartition(X, TensorSpace(6, TWO, int))
    PartitionError: dtype int64 given, (6,) and float64
linop.scatter(X, TWO)
    PartitionError: the tensor is on workers (0, 1, 2); expected one
linop.shift(SAME, 1)
    PartitionError: along grid axis 0 all workers hold the same block
linop.shift(X, 0.5)
    ArgumentError: 0.5
linop.halo_exchange(X, 9)
    ShapeError: extent 6: a kernel of size 9, dilation 1 and padding 0 does not
linop.halo_exchange(X, 3, stride=0)
    ShapeError: stride: (0,); each is at least 1
linop.halo_exchange(X, (3, 3))
    ShapeError: kernel_size: 2 numbers for 1 dimensions: (3, 3)
linop.pad(X, 1)
    ShapeError: pad: widths 1 for a tensor of shape (6,); (left, right)
linop.pad(X, [(1, 0.5)])
    ShapeError: pad: widths [(1, 0.5)] for a tensor of shape (6,); (left, right)
linop.halo_geometry(6, Partition((2, 2)), 3)
    PartitionError: grid axis 1 of Partition((2, 2))

# Costs
linop.planning.Network(latency=-1e-6)
    ArgumentError: network: latency is a number of seconds from 0; given -1e-06
linop.planning.Network(per_byte=float("nan"))
    ArgumentError: network: per_byte is a number of seconds from 0; given nan
linop.planning.Network(between=1e-6)
    ArgumentError: network: between: expected a Link, given 1e-06
linop.planning.Link(latency=None)
    ArgumentError: link: latency is a number of seconds from 0; given None
linop.planning.Link(per_byte_of_machine="x")
    ArgumentError: link: per_byte_of_machine is a number of seconds from 0; given 'x'
linop.planning.Placement([[0, 1]])
    ArgumentError: placement: expected a machine for each worker, numbers or names such as [0, 0, 1
linop.planning.Placement(["a", 0])
    ArgumentError: numbers or names such as [0, 0, 1, 1]; given ['a', 0]
linop.planning.Placement.read(None)
    ArgumentError: machine file None: cannot be read
linop.planning.traffic_matrix(linop.shift(X, 1)).by_machine([0, 0, 1])
    ArgumentError: placement: expected a Placement, given [0, 0, 1]
linop.planning.Placement([0.5, 1])
    ArgumentError: numbers or names such as [0, 0, 1, 1]; given [0.5, 1]
linop.planning.Placement.of_blocks(4, 0)
    ArgumentError: placement: workers per machine is a number from 1; given 0
linop.simulate(linop.shift(X, 1), placement=[0, 0, 1])
    ArgumentError: placement: expected a Placement, given [0, 0, 1]
linop.shift(X, 1).cost(placement=linop.planning.Placement([0, 1]))
    ArgumentError: placement: of 2 workers, and worker 2 takes part; give the machine of every worke
linop.planning.Placement.read("no such file")
    ArgumentError: machine file no such file: cannot be read

# Local operators

linop.local_operators.matrix(np.ones((2, 3)), y, y)
    ShapeError: shape (2, 3) given for y[2]@0 -> y[2]@0, which needs (2, 2)
linop.local_operators.matrix(np.ones(3))
    ShapeError: matrix: expected two dimensions, given shape (3,)
linop.local_operators.matrix(np.ones((12, 12)), a, b)
    SpaceError: its regions are on different workers: a[4, 3]@0 -> b[4, 3]@1
linop.local_operators.matrix(1j * np.ones((3, 3)), C, C)
    DTypeError: an array of complex128 given, numbers of dtype float64 expected
linop.local_operators.matrix(np.ones((3, 3)) / 2, WHOLE, WHOLE)
    DTypeError: an array of float64 given, numbers of dtype int64 expected
linop.local_operators.matrix(np.ones((2, 3)), "x")
    ArgumentError: expected a Region or a Space, given 'x'
linop.local_operators.diagonal(np.ones(2), c)
    ShapeError: diagonal: shape (2,) given for the space c[3]@0
linop.local_operators.fft(C)
    DTypeError: fft: a space of dtype float64 given, a complex one expected
linop.local_operators.fft(AB)
    SpaceError: fft: a space of one region expected, given a[4, 3]@0 ⊕ b[4, 3]@1
linop.local_operators.fft(Space(c, complex), axes=1)
    ArgumentError: fft: axes (1,) of a tensor of 1 dimensions
linop.local_operators.fft(Space(c, complex), axes=(0, -1))
    ArgumentError: fft: axes (0, -1) name a dimension twice
linop.local_operators.fft(Space(c, complex), norm="unitary")
    ArgumentError: fft: norm is one of backward, ortho, forward; given 'unitary'
linop.fft(X)
    DTypeError: fft: a space of dtype float64 given, a complex one expected
linop.fft(WAVES, route="bricks")
    ArgumentError: fft: route is 'auto', 'slab' or 'pencil'; given 'bricks'
linop.fft(WAVES, out="other")
    ArgumentError: fft: out is 'same' or 'transposed'; given 'other'
linop.fft(WAVES, out="transposed", codomain=WAVES)
    ArgumentError: fft: out='transposed' and codomain= both say where the result is
linop.fft(WAVES, codomain=X2)
    PartitionError: fft: global shape (6, 6) and dtype float64 given, (6, 6) and complex128 expected
linop.fft(WAVES, codomain=C)
    ArgumentError: fft: codomain: expected a TensorSpace, given
linop.fft(TensorSpace((6,), TWO, complex, bounds={0: ((0, 4), (3, 6))}))
    PartitionError: overlap, or leave elements out; repartition it first
linop.fft(TensorSpace((6,), TWO, complex, axes=(COPIES,)), codomain=WAVES)
    PartitionError: fft: codomain= is for a tensor without copies
linop.fourier.low_modes(WAVES, 7)
    ShapeError: low_modes: 7 modes of dimensions (0, 1), of lengths (6, 6)
linop.fourier.low_modes(WAVES, (2, 2, 2))
    ShapeError: low_modes: (2, 2, 2) modes of dimensions (0, 1), of lengths (6, 6)
linop.fourier.spectral_convolution(WAVES, np.ones((2, 6, 3)), channels=1)
    ShapeError: spectral_convolution: weights of shape (2, 6, 3) from
linop.local_operators.restriction(c, [5])
    ShapeError: indices outside of a region of 3 elements
linop.local_operators.restriction(c, [0.5])
    LinopError: whole numbers
linop.local_operators.convolution(np.ones(2), a, b)
    ShapeError: kernel of shape (2,) for a region of shape (4, 3)
linop.local_operators.convolution(np.ones(2), c, c)
    ShapeError: output of shape (2,); (3,) given
linop.local(c, b, abs, abs)
    SpaceError: a local operator stays inside one worker
linop.local_operators.from_scipy(LONG.to_scipy(), c, c)
    ShapeError: which needs (3, 3)

# Numbers that are none, or too large
Region("x", float("inf"))
    ArgumentError: shape of region 'x': expected whole numbers, given inf
Region("x", 2**63)
    SpaceError: shape of region 'x': (9223372036854775808,) has a number above 2**63 - 1
Region("x", 3, (0, float("inf")))
    ArgumentError: workers of region 'x': expected whole numbers
linop.copy(Space(Region("x", 2**60)), Region("x", 2**60), Region("y", 2**60, 1)).cost()
    SpaceError: simulate: 2**63 bytes or more are moved
linop.all_gather(TensorSpace((2**40, 2**20), Partition((3,)))).cost()
    SpaceError: simulate: 2**63 bytes or more are moved
a[:: np.ones(2)]
    SubsetError: bounds are whole numbers
Partition(10**20)
    PartitionError: has a number above 2**63 - 1
LINE.coordinates([1])
    ArgumentError: worker: expected a whole number, given [1]
X.region({1})
    ArgumentError: worker: expected a whole number, given {1}
Space(5)
    ArgumentError: a Space is made of Regions; given 5
Space(c, "words")
    DTypeError: a space holds numbers; given 'words', which is no dtype
Space(c, 1.5)
    DTypeError: a space holds numbers; given 1.5, which is no dtype
C.random("one")
    ArgumentError: seed: expected a whole number, given 'one'
C.random(-1)
    ArgumentError: seed: a whole number from 0 expected, given -1
TensorSpace((4, 4), TWO, axes=1)
    ArgumentError: axes: expected one for each of 1, given 1
TensorSpace((4,), TWO, bounds={0: ((0, None), (2, 4))})
    ArgumentError: bounds of dimension 0: expected whole numbers, given (0, None)
TensorSpace((4,), TWO, bounds={0: ((0, 1, 2), (2, 4))})
    PartitionError: bounds of dimension 0: (start, stop) of each block expected
linop.all_gather(X, 1.0)
    ArgumentError: all_gather: grid axes: expected a whole number, given 1.0
linop.shift(X, 1.5)
    ArgumentError: shift: steps: expected a whole number, given 1.5
linop.all_to_all(X2, 0, None)
    ArgumentError: all_to_all: dim: expected a whole number, given None
linop.simulate(IC, 3)
    ArgumentError: network: expected a Network, given 3
linop.planning.Network(float("nan"))
    ArgumentError: network: latency is a number of seconds from 0; given nan
linop.planning.Network("2")
    ArgumentError: network: latency is a number of seconds from 0; given '2'
linop.backends.get(["threads"])
    ArgumentError: backend: expected one of reference, threads, mpi, cupy, torch; given ['threads']
linop.backends.get("threads", workers=1.5)
    ArgumentError: workers: expected a whole number, given 1.5
linop.launch(len, 0.5)
    ArgumentError: launch: workers: expected a whole number, given 0.5
linop.testing.check_adjoint(IC, seed="one")
    ArgumentError: seed: expected a whole number, given 'one'
linop.testing.check_adjoint(IC, trials=0)
    ArgumentError: seed from 0 and trials from 1 expected, given 0, 0
v[["c"]]
    RegionError: unknown region ['c']; this space has 'c'
linop.broadcast(X2, Partition((2, 1)))
    PartitionError: in the destination grid 2×1; in the source grid 1 expected

# What a conversion would lose
IW(np.ones(3))
    DTypeError: a conversion would lose fractions: build the space with dtype='float64'
IC(np.ones(3, complex))
    DTypeError: a conversion would lose imaginary parts: build the space with dtype='complex128'
IC(np.array(["a", "b", "c"]))
    DTypeError: float64 expected; give numbers
linop.identity(Space(c, "uint8"))(np.ones(3, int))
    DTypeError: a conversion would lose signs: build the space with dtype='int64'
"""
"""An expression; then the error that it raises, and a part of its words."""


def error_cases() -> list[tuple[str, str, str]]:
    """The rows of the table: expression, name of the error, words."""
    rows = [line for line in MISTAKES.splitlines() if line and not line.startswith("#")]
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return [(made, *told.strip().split(": ", 1)) for made, told in pairs]  # type: ignore[misc]


def make(expression: str) -> Any:
    """The value of an expression of the table."""
    return eval(expression)
