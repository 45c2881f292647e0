"""Hypothesis strategies of regions, spaces, tensors, vectors and operators, for property tests.

    @given(op=strategies.operators(workers=4))
    def test_mine(op): ...

Objects are built from small drawn descriptions, so that they shrink well. Extents may be 0, and
workers may hold several regions or none. Values are whole numbers, so that sums of products are
exact and can be compared with ``==``. A failing example prints as code that rebuilds it
(`linop.testing.code`), which can be pasted into `hypothesis.example`.

Workers are numbered from 0 to ``workers - 1``. All strategies combine with Hypothesis's own
(``.filter``, ``.map``, ``.flatmap``, ``st.composite``). This module is the public interface; the
drawing of descriptions is in `linop.testing.factories`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from linop.errors import MissingExtraError

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise MissingExtraError(
        f"linop.testing.strategies needs Hypothesis: pip install 'linop-algebra[testing]' ({error})"
    ) from None

# isort: split
from linop.operators.operator import LinearOperator
from linop.spaces.partition import Partition
from linop.spaces.region import Region, Subset
from linop.spaces.space import Space
from linop.spaces.tensor import TensorSpace
from linop.spaces.vector import Vector
from linop.testing import describing, factories
from linop.testing.code import code
from linop.testing.describing import COMPUTED, Description

__all__ = [
    "kernels",
    "operators",
    "operators_on",
    "pairs",
    "partitions",
    "parts",
    "regions",
    "shapes",
    "spaces",
    "tensors",
    "vectors",
]


def _prints_as_code(given: Any, printer: Any, cycle: bool) -> None:
    printer.text(code(given))


_KINDS: tuple[Any, ...] = (LinearOperator, Partition, Region, Space, Subset, Vector)
for _kind in _KINDS:
    # Hypothesis, like IPython, prefers this method to ``__repr__``.
    _kind._repr_pretty_ = _prints_as_code


def shapes(
    ndim: int | None = None, most: int = 4, least: int = 0
) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of arrays.

    Args:
        ndim: number of dimensions; by default 0 to 3.
        least, most: bounds of each extent.

    Example:
        The smallest shape without an empty dimension:

        >>> from hypothesis import find
        >>> from linop.testing import strategies
        >>> find(strategies.shapes(ndim=2), lambda shape: 0 not in shape)
        (1, 1)
    """
    extents = st.integers(least, most)
    if ndim is not None:
        return st.tuples(*[extents] * ndim)
    return st.integers(0, 3).flatmap(lambda n: st.tuples(*[extents] * n))


def partitions(workers: int = 4, ndim: int | None = None) -> st.SearchStrategy[Partition]:
    """Partitions: grids of at most `workers` workers, in any order.

    Args:
        workers: number of workers to choose from.
        ndim: number of grid axes; by default 1 to 3.

    Example:
        >>> from hypothesis import find
        >>> from linop.testing import strategies
        >>> find(strategies.partitions(workers=4, ndim=1), lambda P: len(P.workers) == 3)
        Partition((3,))
    """
    least, most = (1, 3) if ndim is None else (ndim, ndim)

    def placed(grid: tuple[int, ...]) -> st.SearchStrategy[Partition]:
        order = describing.orders(workers, int(np.prod(grid)))
        return order.map(lambda held: Partition(grid, held))

    return describing.grids(workers, least, most).flatmap(placed)


def regions(
    workers: int = 4,
    name: str = "x",
    ndim: int | None = None,
    memories: Sequence[str] = ("default",),
) -> st.SearchStrategy[Region]:
    """Regions on one worker, or replicated on several.

    Args:
        workers: number of workers to choose from.
        name: of the region.
        ndim: number of dimensions; by default 0 to 3.
        memories: kinds of memory to choose from, of `linop.spaces.region.MEMORIES`.

    Example:
        >>> from hypothesis import find
        >>> from linop.testing import strategies
        >>> find(strategies.regions(workers=2, ndim=1), lambda region: region.replicated).workers
        (0, 1)
    """
    placement = describing.placements(workers, memories)
    return st.tuples(shapes(ndim), placement).map(lambda drawn: Region(name, drawn[0], *drawn[1]))


def spaces(
    workers: int = 4,
    dtypes: Sequence[str] = COMPUTED,
    *,
    ndim: int | None = None,
    least: int = 1,
    most: int = 3,
    prefix: str = "x",
    memories: Sequence[str] = ("default",),
) -> st.SearchStrategy[Space]:
    """Spaces of a few regions, x0, x1, …, with equal numbers of dimensions.

    Args:
        workers: number of workers to choose from.
        dtypes: names of dtypes to choose from.
        ndim: number of dimensions of every region; by default 0 to 3.
        least, most: bounds of the number of regions.
        prefix: of the regions' names.
        memories: kinds of memory to choose from for each region, of `linop.spaces.region.MEMORIES`.

    Example:
        >>> from hypothesis import given, settings
        >>> from linop.testing import strategies
        >>> @settings(max_examples=5, deadline=None)
        ... @given(strategies.spaces(workers=2))
        ... def test_flattened_and_back(X):
        ...     x = X.random(0)
        ...     assert X.unflatten(X.flatten(x)).equals(x)
        >>> test_flattened_and_back()
    """
    drawn = describing.spaces(workers, dtypes, ndim, least, most, prefix, memories)
    return drawn.map(describing.space_of)


def parts(space: Space) -> st.SearchStrategy[Subset]:
    """Subsets of the regions of a space; they shrink to whole regions.

    Example:
        >>> from hypothesis import find
        >>> from linop.testing import strategies
        >>> X = linop.Space(linop.Region("x", (3,)))
        >>> find(strategies.parts(X), lambda part: part.shape == (2,)).slices
        (slice(0, 2, None),)
    """
    return st.sampled_from(space.regions).flatmap(
        lambda region: describing.boxes(region.shape).map(
            lambda box: describing.box_in(region, box)
        )
    )


def pairs(space: Space) -> st.SearchStrategy[tuple[Subset, Subset]]:
    """Pairs of disjoint subsets of a space with equal shapes: arguments of add, copy and move.

    Example:
        The adjoint of adding a to b adds b to a:

        >>> from hypothesis import given, settings
        >>> from linop.testing import strategies
        >>> X = linop.Space(linop.Region("x", (3,)))
        >>> @settings(max_examples=5, deadline=None)
        ... @given(strategies.pairs(X))
        ... def test_adjoint_of_add(pair):
        ...     a, b = pair
        ...     assert linop.add(X, a, b).H.equals(linop.add(X, b, a))
        >>> test_adjoint_of_add()
    """
    drawn = describing.pairs(_described(space))
    return drawn.map(
        lambda two: (describing.part_of(space, two[0]), describing.part_of(space, two[1]))
    )


def tensors(
    workers: int = 4,
    dtypes: Sequence[str] = COMPUTED,
    *,
    roles: Sequence[str] = ("split", "copies", "replicated"),
    ndim: int | None = None,
    shape: tuple[int, ...] | None = None,
    grid: tuple[int, ...] | None = None,
    uneven: bool = True,
    name: str = "x",
    memories: Sequence[str] = ("default",),
) -> st.SearchStrategy[TensorSpace]:
    """Tensor spaces: global tensors in blocks.

    Args:
        workers: number of workers to choose from.
        dtypes: names of dtypes to choose from.
        roles: roles of grid axes to choose from: "split", "copies", "replicated".
        ndim: number of dimensions of the tensor; by default 0 to 3.
        shape: of the tensor; drawn by default.
        grid: shape of the partition; drawn by default.
        uneven: True if blocks may be unbalanced.
        name: of the tensor.
        memories: kinds of memory to choose from, one for all blocks, of
            `linop.spaces.region.MEMORIES`.

    Example:
        >>> from hypothesis import given, settings
        >>> from linop.testing import strategies
        >>> @settings(max_examples=5, deadline=None)
        ... @given(strategies.tensors(workers=2, dtypes=["float64"], roles=["split"]))
        ... def test_scatter_and_gather(X):
        ...     a = np.ones(X.global_shape)
        ...     assert np.array_equal(X.gather(X.scatter(a)), a)
        >>> test_scatter_and_gather()
    """
    drawn = describing.tensors(
        workers,
        dtypes=dtypes,
        roles=roles,
        ndim=ndim,
        shape=shape,
        grid=grid,
        uneven=uneven,
        name=name,
        memories=memories,
    )
    return drawn.map(describing.tensor_of)


def vectors(space: Space, most: int = describing.LARGEST) -> st.SearchStrategy[Vector]:
    """Vectors of whole numbers from -most to most, from 0 in unsigned dtypes, in real and imaginary
    parts alike; they shrink to zeros.

    Args:
        space: of at most a few dozen elements, since each is drawn separately.
        most: the largest number.

    Example:
        The smallest vector that is longer than 1:

        >>> from hypothesis import find
        >>> from linop.testing import strategies
        >>> X = linop.Space(linop.Region("x", (3,)))
        >>> find(strategies.vectors(X), lambda x: x.norm() > 1)["x"].tolist()
        [0.0, 0.0, 2.0]
    """
    number: st.SearchStrategy[Any] = st.integers(-most, most)
    if space.dtype.kind == "c":
        number = st.builds(complex, number, number)
    if space.dtype.kind == "u":
        number = st.integers(0, most)
    values = st.lists(number, min_size=space.size, max_size=space.size)
    return values.map(lambda drawn: space.unflatten(np.array(drawn, space.dtype)))


def kernels(ndim: int) -> st.SearchStrategy[dict[str, tuple[int, ...]]]:
    """Sliding kernels, as keyword arguments of `linop.halo_exchange`: kernel_size, stride, padding
    and dilation, each a tuple of one number per dimension.

    Example:
        >>> from hypothesis import given, settings
        >>> from linop.testing import strategies
        >>> X = linop.TensorSpace((9,), linop.Partition((2,)))
        >>> @settings(max_examples=5, deadline=None)
        ... @given(strategies.kernels(ndim=1))
        ... def test_halo_exchange(kernel):
        ...     linop.testing.assert_exact(linop.halo_exchange(X, **kernel))
        >>> test_halo_exchange()
    """
    return factories.collectives.kernels(ndim)


def operators(
    workers: int = 4, kinds: Sequence[str] | None = None
) -> st.SearchStrategy[LinearOperator]:
    """Operators: random programs of memory operators and local maps, their sums, products and
    adjoints, collectives, halo exchanges, padding; on regions in any kind of memory. With several
    workers, more than half of the operators send messages, and a quarter in two stages or more.

    Args:
        workers: number of workers to choose from.
        kinds: keys of `linop.testing.factories.FACTORIES` to choose from, including factories that
            you registered; by default all.

    Example:
        >>> from hypothesis import given, settings
        >>> from linop.testing import strategies
        >>> @settings(max_examples=5, deadline=None)
        ... @given(strategies.operators(workers=2))
        ... def test_adjoint(op):
        ...     linop.testing.assert_adjoint(op)
        >>> test_adjoint()
    """

    def drawn(names: Iterable[str]) -> st.SearchStrategy[LinearOperator]:
        return st.sampled_from(list(names)).flatmap(lambda name: factories.operators(name, workers))

    if kinds is not None:
        return drawn(kinds)
    # Most kinds stay in one worker's memory: if drawn evenly, few operators would send messages.
    return st.one_of(*map(drawn, (factories.FACTORIES, _COLLECTIVE, _STAGED, _STAGED)))


def operators_on(space: Space, most: int = 4) -> st.SearchStrategy[LinearOperator]:
    """Programs of a few memory operators and local maps from a space to itself, to be composed with
    your operators on that space.

    Args:
        space: the domain and codomain.
        most: largest number of steps; programs shrink to the identity.

    Example:
        >>> from hypothesis import given, settings
        >>> from linop.testing import strategies
        >>> X = linop.Space(linop.Region("x", (3,)))
        >>> @settings(max_examples=5, deadline=None)
        ... @given(strategies.operators_on(X), strategies.operators_on(X))
        ... def test_adjoint_of_product(A, B):
        ...     assert (A @ B).H.equals(B.H @ A.H)
        >>> test_adjoint_of_product()
    """
    return factories.memory.steps_in_place(_described(space), most, 1).map(
        lambda steps: factories.memory.program(space, steps)
    )


_COLLECTIVE = (
    *("all_reduce", "broadcast", "gather", "halo_exchange", "repartition", "send_recv"),
    *("all_to_all", "reduce_scatter", "ring_all_reduce", "scatter", "sum_reduce"),
)
"""Factories of operators that mostly send messages."""
_STAGED = ("pipeline", "there_and_back", "fft_after_gather")
"""Factories of operators that mostly send messages in several stages."""


def _described(space: Space) -> Description:
    regions = tuple((r.name, r.shape, r.workers, r.memory) for r in space.regions)
    return {"regions": regions, "dtype": space.dtype.name}
