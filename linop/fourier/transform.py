"""The discrete Fourier transform of a tensor in blocks, composed of local transforms and
repartitions. Its adjoint is derived from theirs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

from linop.errors import ArgumentError, PartitionError, expect
from linop.fourier.layouts import Layouts, Way
from linop.local_operators.fourier import Norm, transformed_axes
from linop.local_operators.fourier import fft as local_fft
from linop.local_operators.functions import RegionOrSpace
from linop.operators.algebra import DirectSum, Named
from linop.operators.expressions import Identity, compose
from linop.operators.grids import axes_text, target_space
from linop.operators.operator import LinearOperator, TensorOperator
from linop.planning.network import Network
from linop.planning.prediction.simulation import simulate
from linop.provenance import records_origin
from linop.spaces.blocks import axes_of_copies
from linop.spaces.space import Space
from linop.spaces.tensor import TensorSpace

Out = Literal["same", "transposed"]
PER_BYTE = 1e-9
"""Seconds of a local transform along one axis, per byte: the order of magnitude of pocketfft's on
cores of this decade (complex128, 256³). It weighs how evenly a route divides the work."""


@records_origin
def fft(
    X: RegionOrSpace,
    axes: int | Sequence[int] | None = None,
    norm: Norm = "ortho",
    *,
    out: Out = "same",
    codomain: Space | None = None,
    route: Way | Literal["auto"] = "auto",
    network: Network | None = None,
) -> LinearOperator:
    """F: the n-d discrete Fourier transform of a global tensor, cut into blocks in any way. With
    the norm ``"ortho"`` it is unitary: its adjoint is its inverse.

    Dimensions that are whole on each worker are transformed there; a repartition makes others
    whole, until all are done. Each copy of a tensor is transformed by itself; all workers of a
    replicated block compute. A tensor whose only dimension is cut is transformed on one worker.

    Args:
        X: a `TensorSpace` of a complex dtype, whose blocks do not overlap. A region, or a space of
            one region, is transformed as by `linop.local_operators.fft`.
        axes: dimensions to transform along; by default all.
        norm: ``"ortho"``, ``"backward"`` (not scaled) or ``"forward"`` (divided by the number n of
            transformed elements), as NumPy's. The adjoint is the inverse times 1, n or 1/n.
        out: ``"same"``: the result is in the blocks of X. ``"transposed"``: it stays in those of
            the last local transform, which saves a repartition; see the operator's `codomain`.
        codomain: another tensor space for the result; for X without copies.
        route: ``"slab"``: one repartition makes all dimensions whole that are left to transform.
            ``"pencil"``: one dimension at a time, in smaller groups of workers. ``"auto"``: the one
            of the two that is predicted to be faster.
        network: the one that times are predicted for; by default the one that passes assume.

    Returns:
        The operator from X to the result's space.

    Raises:
        DTypeError: the dtype is not complex. PartitionError: blocks of X overlap, or leave gaps; or
            the codomain does not fit.
        ArgumentError: axes, norm, out or route is none of the above; or there are `out` and
            `codomain`.

    Example:
        >>> X = linop.TensorSpace((2, 2), linop.Partition(2), complex)
        >>> F = linop.fft(X)
        >>> bool(np.allclose(F @ np.ones((2, 2), complex), [[2, 0], [0, 0]]))
        True
        >>> bool(linop.testing.check_unitary(F)), F.cost().stages
        (True, 2)
        >>> linop.fft(X, out="transposed").cost().stages
        1
    """
    if not isinstance(X, TensorSpace):
        return local_fft(X, codomain, axes=axes, norm=norm)
    dims = transformed_axes(X.dtype, axes, X.ndim, norm)
    ways = ways_of(route)
    if out not in get_args(Out):
        raise ArgumentError(f"fft: out is 'same' or 'transposed'; given {out!r}")
    if out == "transposed" and codomain is not None:
        raise ArgumentError("fft: out='transposed' and codomain= both say where the result is")
    end = None if out == "transposed" else end_of(X, codomain)
    return transformed("F", Layouts(X), dims, dims, ways, end, norm, network)


def ways_of(route: Way | Literal["auto"]) -> tuple[Way, ...]:
    """The ways that are compared.

    Raises:
        ArgumentError: it is none of these.
    """
    if route not in ("auto", *get_args(Way)):
        raise ArgumentError(f"fft: route is 'auto', 'slab' or 'pencil'; given {route!r}")
    return get_args(Way) if route == "auto" else (route,)


def transformed(
    name: str,
    layouts: Layouts,
    dims: Sequence[int],
    whole: Sequence[int],
    ways: Sequence[Way],
    end: TensorSpace | None,
    norm: Norm,
    network: Network | None = None,
) -> TensorOperator:
    """The transform along `dims` by the way that is predicted to be the fastest.

    Args:
        whole: the dimensions that no block of the last layout cuts; with `dims`.
        end: the space of the result; None for the last layout.
    """
    steps = _steps(layouts, fastest(layouts, dims, whole, ways, end, network), dims, whole, end)
    return Named(name, axes_text(dims), _composed(layouts, steps, norm))


def fastest(
    layouts: Layouts,
    dims: Sequence[int],
    whole: Sequence[int],
    ways: Sequence[Way],
    end: TensorSpace | None,
    network: Network | None = None,
) -> Way:
    """The way that is predicted to be the fastest, by the arguments of `transformed`."""
    routes = [_steps(layouts, way, dims, whole, end) for way in ways]
    if len(ways) == 1 or _cuts(routes[0]) == _cuts(routes[1]):
        return ways[0]
    times = [_seconds(layouts, steps, network) for steps in routes]
    return ways[times.index(min(times))]


Step = tuple[TensorSpace, tuple[int, ...]]
"""A layout, and the dimensions that are transformed in it."""


def end_of(X: TensorSpace, codomain: Space | None) -> TensorSpace:
    """The space of the result.

    Raises:
        PartitionError: it is of another shape or dtype, or X has copies. ArgumentError: it is no
            tensor space.
    """
    if codomain is None or codomain is X:
        return X
    if axes_of_copies(X):
        raise PartitionError(f"fft: codomain= is for a tensor without copies; given {X!r}")
    return target_space("fft", X, expect("fft: codomain", codomain, TensorSpace))


def _steps(
    layouts: Layouts,
    way: Way,
    dims: Sequence[int],
    whole: Sequence[int],
    end: TensorSpace | None,
) -> list[Step]:
    """The layouts of a route, the last of them the space of the result."""
    steps: list[Step] = []
    done: list[int] = []
    cuts = layouts.start
    for cuts, now in layouts.route(way, whole):
        steps.append((layouts.space(cuts, done), tuple(d for d in now if d in dims)))
        done += now
    end = layouts.space(cuts, done) if end is None else end
    return steps if end.made_from == steps[-1][0].made_from else [*steps, (end, ())]


def _composed(layouts: Layouts, steps: Sequence[Step], norm: Norm) -> LinearOperator:
    """The product of the local transforms and the repartitions between them."""
    factors = [_local(*steps[0], norm)]
    for (before, _), (space, dims) in pairwise(steps):
        factors.append(layouts.move(before, space))
        if dims:
            factors.append(_local(space, dims, norm))
    return compose(*reversed(factors))


def _local(space: TensorSpace, dims: Sequence[int], norm: Norm) -> LinearOperator:
    """Transforms of all blocks along dimensions that are whole in each."""
    if not dims:
        return Identity(space)
    blocks = [Space(region, space.dtype) for region in space.regions]
    return DirectSum([local_fft(b, b, axes=dims, norm=norm) for b in blocks], space, space)


def _cuts(steps: Sequence[Step]) -> list[tuple[Any, ...]]:
    """The layouts of a route, to compare it with another one."""
    return [space.made_from for space, _ in steps]


def _seconds(layouts: Layouts, steps: Sequence[Step], network: Network | None) -> float:
    """The predicted time of a route: its repartitions, one after the other, and the local
    transforms of the largest blocks."""
    moves = [layouts.move(before, after) for (before, _), (after, _) in pairwise(steps)]
    seconds = sum(simulate(move, network).time for move in moves)
    for space, dims in steps:
        largest = float(space.numbering.shapes.prod(axis=1).max(initial=0))
        seconds += PER_BYTE * len(dims) * largest * space.dtype.itemsize
    return seconds
