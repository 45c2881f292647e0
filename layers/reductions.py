"""Reductions of a tensor in blocks over some of its dimensions, which may be split, as layers; and
the sums that losses share.

Each is torch's on the worker's block, then a movement of what is left of it, then torch again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf, prod

import torch
from torch import Tensor

from linop.backends.autograd.dtypes import torch_dtype
from linop.errors import ArgumentError, ShapeError
from linop.layers.layer import Function, Layer
from linop.layers.moments import wide
from linop.layers.zero_volume import zero_volume_result
from linop.operators.collectives import all_gather, all_reduce, repartition
from linop.operators.named_movement import collective
from linop.spaces.decomposition import COPIES, REPLICATED, Axis, Bounds
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace


def summed_over(layer: Layer, X: TensorSpace, dims: Collection[int], into: Axis) -> Function:
    """Function from this worker's sums over some dimensions of X to those of all workers, both with
    extent 1 in these dimensions. Collective.

    Args:
        into: `linop.REPLICATED` for one result that counts once, as that of a layer; `linop.COPIES`
            for one that workers go on with in different ways: then their gradients are summed.
    """
    parts = TensorSpace(
        [1 if d in dims else n for d, n in enumerate(X.global_shape)],
        X.partition,
        wide(layer, X),
        [COPIES if axis in dims else axis for axis in X.axes],
        bounds=_others(X, dims),
    )
    if into is COPIES:
        return layer.moved(all_reduce, parts, [k for k, axis in enumerate(X.axes) if axis in dims])
    roles = [into if axis in dims else axis for axis in X.axes]
    return layer.moved(
        collective, "R", "1", parts, parts.like(X.partition, roles, _others(X, dims))
    )


def gathered_over(
    layer: Layer, X: TensorSpace, dims: Collection[int], into: Axis, numbers: int = 1
) -> Function:
    """Function from some numbers of this worker's block, for each element of the dimensions that
    are not in `dims`, to those of all blocks along `dims`. Collective.

    It takes a tensor with extent 1 in `dims` and a last dimension of `numbers`, and gives one with
    a dimension of all blocks before the last.

    Args:
        into: as for `summed_over`.
    """
    roles: list[Axis] = [COPIES if axis in dims else axis for axis in X.axes]
    axes = [k for k, n in enumerate(X.partition.shape) if X.axes[k] in dims and n > 1]
    for place, k in enumerate(axes):
        roles[k] = X.ndim + place  # a dimension of blocks for each grid axis
    cuts = [X.partition.shape[k] for k in axes]
    shape = [1 if d in dims else n for d, n in enumerate(X.global_shape)]
    each = TensorSpace(
        [*shape, *cuts, numbers], X.partition, wide(layer, X), roles, bounds=_others(X, dims)
    )
    gather = layer.moved(all_gather, each, axes, into) if axes else lambda x: x

    def gathered(x: Tensor) -> Tensor:
        one = x.reshape(*x.shape[:-1], *[1] * len(cuts), numbers)
        return gather(one).reshape(*x.shape[:-1], prod(cuts), numbers)

    return gathered


def spread_over(layer: Layer, X: TensorSpace) -> Function:
    """Function from a block of X, which is replicated along some grid axes, to one that each worker
    goes on with in its own way: the gradient is the sum of theirs. Collective."""
    here = X.with_dtype(wide(layer, X))
    roles = [COPIES if axis is REPLICATED else axis for axis in X.axes]
    return layer.moved(repartition, here, here.like(X.partition, roles, dict(enumerate(X.bounds))))


def _others(X: TensorSpace, dims: Collection[int]) -> dict[int, Bounds]:
    return {d: X.bounds[d] for d in range(X.ndim) if d not in dims}


class Reduction(Layer):
    """Base class of reductions over some dimensions of a tensor in blocks.

    The result is cut as the input is, and replicated along the grid axes that split the reduced
    dimensions: all their workers have it, and it counts once. With `P_y` it is in balanced blocks
    on that grid instead, whose axis k splits dimension k of the result.

    Args:
        P_x: the partition of the input; grid axis k splits dimension k.
        dim: the dimension, or dimensions, that are reduced; by default all.
        keepdim: whether they stay, with extent 1.
        P_y: the partition of the result; by default the workers of `P_x`, as said above.
        x_axes: roles of the grid axes of `P_x`, where they are others, as in `linop.TensorSpace`.

    Raises:
        ShapeError: from a call, the input lacks such a dimension, or has no elements to reduce.
            DTypeError: it is not of a floating-point dtype. Both on every worker.

    Example:
        >>> P, x = linop.Partition((1, 2)), torch.ones(3, 4).chunk(2, dim=1)
        >>> linop.launch(lambda b: layers.Sum(P, dim=1)(x[b.worker]).tolist(), workers=2)
        [[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]
        >>> Q = linop.Partition((2,))
        >>> linop.launch(lambda b: layers.Sum(P, dim=1, P_y=Q)(x[b.worker]).tolist(), workers=2)
        [[4.0, 4.0], [4.0]]
    """

    needs_elements = False
    """True if there is no result of no elements."""

    def __init__(
        self,
        P_x: Partition,
        dim: int | Sequence[int] | None = None,
        keepdim: bool = False,
        *,
        P_y: Partition | None = None,
        x_axes: Sequence[Axis] | None = None,
    ) -> None:
        super().__init__([P_x], P_x if P_y is None else P_y)
        self.P_y, self.x_axes, self.keepdim = P_y, x_axes, keepdim
        given = () if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
        if len({d for d in given if isinstance(d, int)}) < len(given):
            raise ArgumentError(f"{self._name}: dim={dim!r}; different whole numbers expected")
        self.dim: tuple[int, ...] = given
        self.preserve_batch = bool(given) and 0 not in given

    # To be overridden

    def reduced(self, X: TensorSpace, dims: tuple[int, ...]) -> Function:
        """Function from this worker's block to the reduction of the whole, with extent 1 in `dims`,
        replicated along the grid axes that split these. Collective; its result is called on workers
        of `P_x` only."""
        raise NotImplementedError

    # Binding

    def output_axes(self, grid: Partition, ndim: int) -> Sequence[Axis]:
        return self._output_axes  # set before the first output is there

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        dims = self._dims(X)
        kept = [d for d in range(X.ndim) if self.keepdim or d not in dims]
        shape = [1 if d in dims else X.global_shape[d] for d in kept]
        roles = [
            REPLICATED if axis in dims else kept.index(axis) if isinstance(axis, int) else axis
            for axis in X.axes
        ]
        cut = {k: X.bounds[d] for k, d in enumerate(kept) if d not in dims}
        dtype, result = torch_dtype(wide(self, X)), torch_dtype(X.dtype)
        Y = TensorSpace(shape, X.partition, wide(self, X), roles, bounds=cut)
        place: Function = _itself
        if self.P_y is not None:
            wanted = TensorSpace(shape, self.P_y, Y.dtype)
            place, Y = self.moved(repartition, Y, wanted), wanted
        self._output_axes = Y.axes
        reduce, inside = self.reduced(X, dims), self.worker in X.partition

        def call(x: Tensor) -> Tensor:
            if inside:
                y = reduce(x.to(dtype))
                y = y if self.keepdim else y.squeeze(dims)
            else:
                y = zero_volume_result(X, x).to(dtype)
            return place(y).to(result)

        return call

    def _dims(self, X: TensorSpace) -> tuple[int, ...]:
        dims = [d + X.ndim if d < 0 else d for d in self.dim] or range(X.ndim)
        if len(set(dims)) < len(dims) or any(d not in range(X.ndim) for d in dims):
            raise ShapeError(
                f"{self._name}: dim={self.dim} for an input of shape {X.global_shape}; different "
                f"dimensions of it expected"
            )
        if self.needs_elements and 0 in (X.global_shape[d] for d in dims):
            raise ShapeError(
                f"{self._name}: an input of shape {X.global_shape}; elements along "
                f"dimensions {tuple(dims)} expected"
            )
        return tuple(sorted(dims))

    def extra_repr(self) -> str:
        dims = f"dim={self.dim}" if self.dim else "all dimensions"
        to = "" if self.P_y is None else f" → {self.P_y}"
        return f"{self.inputs[0]}{to}, {dims}, keepdim={self.keepdim}"


class Sum(Reduction):
    """The sum over some dimensions, as `torch.sum`. See `Reduction`.

    Example:
        >>> P, x = linop.Partition((2,)), torch.arange(1.0, 5.0)
        >>> linop.launch(lambda b: layers.Sum(P)(x.chunk(2)[b.worker]).item(), workers=2)
        [10.0, 10.0]
        >>> x.sum().item()
        10.0
    """

    def reduced(self, X: TensorSpace, dims: tuple[int, ...]) -> Function:
        total = summed_over(self, X, dims, REPLICATED)
        return lambda x: total(x.sum(dims, keepdim=True))


class Mean(Sum):
    """The mean over some dimensions, as `torch.mean`. See `Reduction`.

    Example:
        >>> P, x = linop.Partition((2,)), torch.arange(1.0, 5.0)
        >>> linop.launch(lambda b: layers.Mean(P)(x.chunk(2)[b.worker]).item(), workers=2)
        [2.5, 2.5]
        >>> x.mean().item()
        2.5
    """

    def reduced(self, X: TensorSpace, dims: tuple[int, ...]) -> Function:
        total, count = super().reduced(X, dims), prod(X.global_shape[d] for d in dims)
        return lambda x: total(x) / count


class Prod(Reduction):
    """The product over some dimensions; `torch.prod` takes one, or all. See `Reduction`.

    Example:
        >>> P, x = linop.Partition((2,)), torch.arange(1.0, 5.0)
        >>> linop.launch(lambda b: layers.Prod(P)(x.chunk(2)[b.worker]).item(), workers=2)
        [24.0, 24.0]
        >>> x.prod().item()
        24.0
    """

    def reduced(self, X: TensorSpace, dims: tuple[int, ...]) -> Function:
        gather = gathered_over(self, X, dims, REPLICATED)

        def product(x: Tensor) -> Tensor:
            for d in dims:
                x = x.prod(d, keepdim=True)
            return gather(x.unsqueeze(-1)).squeeze(-1).prod(-1)

        return product


class Amax(Reduction):
    """The largest element over some dimensions, as `torch.amax`: the gradient is spread evenly over
    all that are the largest. See `Reduction`.

    Example:
        >>> P, x = linop.Partition((2,)), torch.arange(1.0, 5.0)
        >>> linop.launch(lambda b: layers.Amax(P)(x.chunk(2)[b.worker]).item(), workers=2)
        [4.0, 4.0]
        >>> x.amax().item()
        4.0
    """

    needs_elements = True

    def reduced(self, X: TensorSpace, dims: tuple[int, ...]) -> Function:
        return largest(self, X, dims)


class Amin(Reduction):
    """The smallest element over some dimensions, as `torch.amin`: the gradient is spread evenly
    over all that are the smallest. See `Reduction`.

    Example:
        >>> P, x = linop.Partition((2,)), torch.arange(1.0, 5.0)
        >>> linop.launch(lambda b: layers.Amin(P)(x.chunk(2)[b.worker]).item(), workers=2)
        [1.0, 1.0]
        >>> x.amin().item()
        1.0
    """

    needs_elements = True

    def reduced(self, X: TensorSpace, dims: tuple[int, ...]) -> Function:
        of_negative = largest(self, X, dims)
        return lambda x: -of_negative(-x)


class LogSumExp(Reduction):
    """The logarithm of the sum of exponentials over some dimensions, as `torch.logsumexp`, without
    overflow: workers exchange the largest elements first. See `Reduction`.

    Example:
        >>> P, x = linop.Partition((2,)), torch.tensor([0.0, 200.0, 0.0, 100.0])
        >>> linop.launch(lambda b: layers.LogSumExp(P)(x.chunk(2)[b.worker]).item(), workers=2)
        [200.0, 200.0]
        >>> x.logsumexp(0).item()
        200.0
    """

    def reduced(self, X: TensorSpace, dims: tuple[int, ...]) -> Function:
        gather = gathered_over(self, X, dims, COPIES)
        total = summed_over(self, X, dims, REPLICATED)

        def logarithm(x: Tensor) -> Tensor:
            with torch.no_grad():
                top = gather(_top(x, dims).unsqueeze(-1)).squeeze(-1).amax(-1)
                top = torch.where(top.isfinite(), top, 0)
            return total((x - top).exp().sum(dims, keepdim=True)).log() + top

        return logarithm


class Var(Reduction):
    """The variance over some dimensions, as `torch.var`, in two passes: the squares are of
    differences from the mean. See `Reduction`.

    Args:
        P_x, dim, keepdim, P_y, x_axes: as for `Reduction`.
        correction: the sum of squares is divided by the number of elements less this.

    Example:
        >>> P, x = linop.Partition((2,)), torch.tensor([0.0, 2.0, 4.0])
        >>> linop.launch(lambda b: layers.Var(P)(x.chunk(2)[b.worker]).item(), workers=2)
        [4.0, 4.0]
        >>> x.var().item()
        4.0
    """

    def __init__(
        self,
        P_x: Partition,
        dim: int | Sequence[int] | None = None,
        *,
        correction: float = 1,
        keepdim: bool = False,
        P_y: Partition | None = None,
        x_axes: Sequence[Axis] | None = None,
    ) -> None:
        super().__init__(P_x, dim, keepdim, P_y=P_y, x_axes=x_axes)
        self.correction = correction

    def reduced(self, X: TensorSpace, dims: tuple[int, ...]) -> Function:
        mean_of = summed_over(self, X, dims, COPIES)
        total = summed_over(self, X, dims, REPLICATED)
        count = prod(X.global_shape[d] for d in dims)
        divisor = max(0, count - self.correction)

        def variance(x: Tensor) -> Tensor:
            x = x - mean_of(x.sum(dims, keepdim=True)) / count
            return total(x.square().sum(dims, keepdim=True)) / divisor

        return variance


class Std(Var):
    """The standard deviation over some dimensions, as `torch.std`; see `Var`. Where it is 0, so is
    the gradient.

    Example:
        >>> P, x = linop.Partition((2,)), torch.tensor([0.0, 2.0, 4.0])
        >>> linop.launch(lambda b: layers.Std(P)(x.chunk(2)[b.worker]).item(), workers=2)
        [2.0, 2.0]
        >>> x.std().item()
        2.0
    """

    def reduced(self, X: TensorSpace, dims: tuple[int, ...]) -> Function:
        variance = super().reduced(X, dims)

        def deviation(x: Tensor) -> Tensor:
            square = variance(x)
            none = square == 0  # the root's derivative is infinite there
            return torch.where(none, square, torch.where(none, 1, square).sqrt())

        return deviation


class Norm(Reduction):
    """The norm of vectors along some dimensions, as `torch.linalg.vector_norm`. See `Reduction`.

    Args:
        P_x, dim, keepdim, P_y, x_axes: as for `Reduction`.
        ord: of the norm: a number, or plus or minus infinity.

    Example:
        >>> P, x = linop.Partition((2,)), torch.tensor([3.0, 4.0])
        >>> linop.launch(lambda b: layers.Norm(P)(x.chunk(2)[b.worker]).item(), workers=2)
        [5.0, 5.0]
        >>> torch.linalg.vector_norm(x).item()
        5.0
    """

    def __init__(
        self,
        P_x: Partition,
        ord: float = 2,
        dim: int | Sequence[int] | None = None,
        keepdim: bool = False,
        *,
        P_y: Partition | None = None,
        x_axes: Sequence[Axis] | None = None,
    ) -> None:
        super().__init__(P_x, dim, keepdim, P_y=P_y, x_axes=x_axes)
        if isinstance(ord, bool) or not isinstance(ord, int | float):
            raise ArgumentError(f"{self._name}: ord={ord!r}; a number expected")
        self.ord = float(ord)
        self.needs_elements = self.ord < 0 or self.ord == inf

    def reduced(self, X: TensorSpace, dims: tuple[int, ...]) -> Function:
        norms = norms_over(self, X, dims, self.ord)
        return lambda x: norms(x).squeeze(-1)


def norms_over(
    layer: Layer, X: TensorSpace, dims: tuple[int, ...], ord: float, numbers: int = 1
) -> Function:
    """Function from some blocks of spaces like X to the norms of each along some dimensions of the
    whole, in a last dimension, with extent 1 in `dims`, replicated along the grid axes that split
    these. Collective."""
    if ord in (inf, -inf):
        top = largest(layer, X, dims)
        sign = 1 if ord > 0 else -1
        return lambda *xs: torch.stack([sign * top(sign * x.abs()) for x in xs], -1)
    gather = gathered_over(layer, X, dims, REPLICATED, numbers)

    def norms(*xs: Tensor) -> Tensor:  # those of the blocks' norms; of order 0 they are counts
        each = [torch.linalg.vector_norm(x, ord, dims, keepdim=True) for x in xs]
        blocks = gather(torch.stack(each, -1))
        if blocks.shape[-2] == 1:
            return blocks.squeeze(-2)
        return torch.linalg.vector_norm(blocks, ord, -2) if ord else blocks.sum(-2)

    return norms


def largest(layer: Layer, X: TensorSpace, dims: tuple[int, ...]) -> Function:
    """Function from a block to the largest elements of the whole along some dimensions, as
    `norms_over`. The gradient goes evenly to all elements that are the largest, on any worker: each
    worker's largest has a share by the number of its largest elements. Collective."""
    gather = gathered_over(layer, X, dims, COPIES, numbers=2)
    total = summed_over(layer, X, dims, REPLICATED)

    def top_of_all(x: Tensor) -> Tensor:
        mine = _top(x, dims)
        with torch.no_grad():
            number = (x == mine).sum(dims, keepdim=True).to(x.dtype)
            tops, numbers = gather(torch.stack([mine, number], -1)).unbind(-1)
            top = tops.amax(-1)
            among = torch.where(tops == top.unsqueeze(-1), numbers, 0).sum(-1)
            holds = (mine == top) & (number > 0)
            share = torch.where(holds, number / among, 0)
        found = total(torch.where(holds, mine * share, 0))
        with torch.no_grad():  # shares of a number add up to it but for rounding
            rest = torch.where(top.isfinite(), top - found, torch.where(top.isnan(), top, 0))
        return found + rest

    return top_of_all


def _top(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The largest elements of a block; minus infinity where it has none."""
    if all(x.shape[d] for d in dims):
        return x.amax(dims, keepdim=True)
    return x.sum(dims, keepdim=True) - inf  # depends on x, whose backward is collective


def _itself(x: Tensor) -> Tensor:
    return x
