"""Padding of distributed tensors as data movement, and cropping, by negative widths.

Reflected and circular edges are copies of elements that may be on other workers. As an operator,
padding has a derived adjoint, which is the gradient of a padded tensor. Padding inside one worker's
memory is an argument of `linop.local_operators.convolution`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Literal, get_args

from linop.errors import ArgumentError, PartitionError, ShapeError, expect
from linop.normal_form.matching import Segment, separate_copies
from linop.operators.named_movement import collective
from linop.operators.operator import TensorOperator
from linop.provenance import records_origin
from linop.spaces.blocks import is_tiled
from linop.spaces.tensor import TensorSpace

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
Widths = Sequence[tuple[int, int]]
"""(left, right) of each dimension, in elements; a negative width crops."""


@records_origin
def pad(X: TensorSpace, widths: Widths, mode: PaddingMode = "zeros") -> TensorOperator:
    """Padding of a distributed tensor, as by ``numpy.pad`` and by torch.nn's padding layers.

    Args:
        X: the blocks; grid axes may also hold copies.
        widths: (left, right) of each dimension, in elements; a negative width crops.
        mode: the edges are ``zeros``; ``reflect``: mirrored at the outermost element, which is not
            repeated; ``replicate``: copies of the outermost element; or ``circular``: copies from
            the other end of the tensor.

    Returns:
        The operator from X to the padded tensor on the same grid. The first and the last block of a
        dimension are longer by its edges. Its adjoint adds each edge to the elements of which it is
        a copy.

    Raises:
        ShapeError: the widths do not fit the shape. ArgumentError: unknown mode. PartitionError:
            the blocks of X overlap, leave gaps, or are not in order.

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition(2))
        >>> A = linop.pad(X, [(1, 1)], mode="reflect")
        >>> (A @ np.arange(4.0)).tolist()
        [1.0, 0.0, 1.0, 2.0, 3.0, 2.0]
        >>> (A.H @ np.ones(6)).tolist()
        [1.0, 2.0, 2.0, 1.0]
    """
    X = expect("pad", X, TensorSpace)
    if not is_tiled(X):
        raise PartitionError(f"pad: the blocks of X must follow one another; {X.bounds}")
    shape = padded_shape(X, widths)
    bounds = {}
    for d, (left, right) in enumerate(widths):
        cuts = [[a + left, b + left] for a, b in X.bounds[d]]
        cuts[0][0], cuts[-1][1] = 0, X.global_shape[d] + left + right
        bounds[d] = tuple((min(max(a, 0), shape[d]), min(max(b, 0), shape[d])) for a, b in cuts)
    Y = TensorSpace(shape, X.partition, X.dtype, X.axes, X.name, bounds=bounds, memory=X.memory)
    return collective("Pad", mode, X, Y, separate_copies(X), edges(X.global_shape, widths, mode))


def padded_shape(X: TensorSpace, widths: Widths) -> tuple[int, ...]:
    """The global shape of a padded tensor.

    Raises:
        ShapeError: `widths` is not a pair of integers for each dimension, or crops more than the
            tensor's extent.
    """
    try:
        lengths = [len([index(width) for width in pair]) for pair in widths]
    except TypeError:
        lengths = None
    if lengths != [2] * X.ndim:
        raise ShapeError(
            f"pad: widths {widths!r} for a tensor of shape {X.global_shape}; (left, right) "
            f"expected for each of its {X.ndim} dimensions"
        )
    shape = tuple(a + n + b for n, (a, b) in zip(X.global_shape, widths, strict=True))
    if any(m < 0 for m in shape):
        raise ShapeError(f"pad: widths {widths!r} cut off more than the shape {X.global_shape}")
    return shape


def edges(
    shape: Sequence[int], widths: Widths, mode: PaddingMode
) -> dict[int, tuple[Segment, ...]]:
    """Source index of each index of the padded tensor, by dimension, as runs of consecutive
    indices. Indices in no run are zero.

    Raises:
        ArgumentError: unknown mode. ShapeError: an edge is wider than the range that it copies.
    """
    if mode not in get_args(PaddingMode):
        known = ", ".join(get_args(PaddingMode))
        raise ArgumentError(f"pad: mode {mode!r} given; there are {known}")
    return {d: _edges(d, n, *widths[d], mode) for d, n in enumerate(shape)}


def _edges(d: int, n: int, left: int, right: int, mode: PaddingMode) -> tuple[Segment, ...]:
    before, after = max(left, 0), max(right, 0)
    # The cropped tensor is first:last; circular edges are copies of it.
    first, last = max(-left, 0), n - max(-right, 0)
    if first > last:
        raise ShapeError(
            f"pad: dimension {d} of extent {n} with widths {left} and {right}, which cut off more "
            f"than that"
        )
    most = {
        "reflect": max(n - 1, 0),
        "circular": last - first,
        "replicate": before + after if n else 0,
    }
    if max(before, after) > most.get(mode, before + after):
        raise ShapeError(
            f"pad: dimension {d} of extent {n} with {mode} edges of width {left} and {right}; at "
            f"most {most[mode]} each"
        )
    # Target indices relative to the unpadded tensor: the edges are -before:0 and n:n+after.
    whole = [Segment(first, first, last - first)]
    if mode == "circular":
        whole += [Segment(-before, last - before, before), Segment(n, first, after)]
    elif mode == "reflect":
        whole += [Segment(-k, k, 1) for k in range(1, before + 1)]
        whole += [Segment(n - 1 + k, n - 1 - k, 1) for k in range(1, after + 1)]
    elif mode == "replicate":
        whole += [Segment(-k, 0, 1) for k in range(1, before + 1)]
        whole += [Segment(n - 1 + k, n - 1, 1) for k in range(1, after + 1)]
    return tuple(Segment(s.at + left, s.of, s.length) for s in whole if s.length)
