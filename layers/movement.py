"""Data movement as modules: each applies one operator, which is built for the input's shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from linop.errors import PartitionError
from linop.layers.layer import Function, Layer
from linop.operators import collectives, halo
from linop.operators.halo import PerDim
from linop.operators.operator import LinearOperator
from linop.spaces.decomposition import COPIES, Axis, Role
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace


class Movement(Layer):
    """Base class of modules that apply one movement operator, without local compute.

    The result is new memory, even where nothing moves. It requires a gradient on all workers, or,
    if no worker's argument does, on none, and backward sends no messages. A subclass says which
    operator it is.

    Args:
        P_x: the partition of the input; grid axis k splits dimension k.
        P_y: the partition of the output; by default `P_x`.
        preserve_batch: True: zero-volume results have shape (batch, 0); False: (0,).

    Example:
        >>> class Shift(layers.Movement):  # of blocks, to the next worker
        ...     def operator(self, X):
        ...         return linop.shift(X, 1)
        >>> P, x = linop.Partition((2,)), torch.arange(4.0).chunk(2)
        >>> linop.launch(lambda b: Shift(P)(x[b.worker]).tolist(), workers=2)
        [[2.0, 3.0], [0.0, 1.0]]
    """

    def __init__(
        self, P_x: Partition, P_y: Partition | None = None, preserve_batch: bool = True
    ) -> None:
        P_y = P_x if P_y is None else P_y
        super().__init__([P_x], P_y)
        self.P_y = P_y
        self.preserve_batch = preserve_batch

    def operator(self, X: TensorSpace) -> LinearOperator:
        """The operator on the space of the global input.

        Raises:
            LinopError: it is not defined on X; on every worker.
        """
        raise NotImplementedError

    def bind(self, *inputs: TensorSpace) -> Function:
        return self.applied(self.operator(*inputs), of=0)

    def extra_repr(self) -> str:
        return f"{self.inputs[0]} → {self.P_y}"


class _Matching(Movement):
    """Base class of operators between two partitions whose grid axes match from the right."""

    matched: Callable[..., LinearOperator]

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        transpose_src: bool = False,
        transpose_dest: bool = False,
        preserve_batch: bool = True,
    ) -> None:
        super().__init__(P_x, P_y, preserve_batch)
        self.transpose_src, self.transpose_dest = transpose_src, transpose_dest
        # Raises now if the grids do not match.
        self.operator(TensorSpace((), P_x, axes=[COPIES] * P_x.ndim))

    def operator(self, X: TensorSpace) -> LinearOperator:
        return self.matched(X, self.P_y, self.transpose_src, self.transpose_dest)


class Broadcast(_Matching):
    """Every block copied to all workers of `P_y` that it matches; see `linop.broadcast`. The
    gradient is the sum-reduction.

    Args:
        P_x: the partition of the input; grid axis k splits dimension k, or, of tensors with fewer
            dimensions, holds independent blocks.
        P_y: the partition of the output. Grid axes match from the right, as in NumPy: equal, or 1
            in `P_x`.
        transpose_src, transpose_dest: reverse the grid of `P_x`, or `P_y`, before that.
        preserve_batch: True: zero-volume results have shape (batch, 0); False: (0,).

    Example:
        >>> P, Q = linop.Partition((1,)), linop.Partition((2,))
        >>> x = [torch.ones(2, requires_grad=True), None]  # worker 0 has it
        >>> def main(backend):
        ...     y = layers.Broadcast(P, Q)(x[backend.worker])
        ...     y.sum().backward()
        ...     return y.tolist()
        >>> linop.launch(main, workers=2)
        [[1.0, 1.0], [1.0, 1.0]]
        >>> x[0].grad.tolist()  # the sum of both gradients
        [2.0, 2.0]
    """

    matched = staticmethod(collectives.broadcast)

    def axes(self, number: int, ndim: int) -> Sequence[Axis]:
        grid = self.inputs[0].shape
        return [k if k < ndim and n > 1 else COPIES for k, n in enumerate(grid)]


class SumReduce(_Matching):
    """The blocks along some grid axes summed; see `linop.sum_reduce`. The gradient is the
    broadcast.

    Args:
        P_x: the partition of the input. Its grid axes that `P_y` does not have, or of which it has
            1, are summed; all blocks along them have one shape. Along any other, grid axis k splits
            dimension k, or, of tensors with fewer dimensions, holds independent blocks.
        P_y: the partition of the output. Grid axes match from the right, as in NumPy: equal, or 1.
        transpose_src, transpose_dest: reverse the grid of `P_x`, or `P_y`, before that.
        preserve_batch: True: zero-volume results have shape (batch, 0); False: (0,).

    Example:
        >>> P, Q = linop.Partition((2,)), linop.Partition((1,))
        >>> x = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
        >>> linop.launch(lambda b: layers.SumReduce(P, Q)(x[b.worker]).tolist(), workers=2)
        [[11.0, 22.0], [[], []]]
    """

    matched = staticmethod(collectives.sum_reduce)

    def axes(self, number: int, ndim: int) -> Sequence[Axis]:
        large, small = self.inputs[0].shape, self.P_y.shape
        if self.transpose_dest:
            small = small[::-1]
        if self.transpose_src:
            large = large[::-1]
        small = (1,) * (len(large) - len(small)) + small
        kept = [m == n > 1 for m, n in zip(small, large, strict=True)]
        if self.transpose_src:
            kept.reverse()
        return [k if keep and k < ndim else COPIES for k, keep in enumerate(kept)]


class AllReduce(Movement):
    """Every block becomes the sum of those along some grid axes; see `linop.all_reduce`.

    Args:
        P_x: the partition of input and output.
        grid_axes: along which the blocks, all of one shape, are summed; by default all. Along any
            other, grid axis k splits dimension k, or holds independent blocks.

    Example:
        >>> P = linop.Partition((2,))
        >>> x = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
        >>> linop.launch(lambda b: layers.AllReduce(P)(x[b.worker]).tolist(), workers=2)
        [[11.0, 22.0], [11.0, 22.0]]
    """

    def __init__(self, P_x: Partition, grid_axes: int | Sequence[int] | None = None) -> None:
        super().__init__(P_x)
        self.grid_axes = _grid_axes("AllReduce", P_x, grid_axes)

    def axes(self, number: int, ndim: int) -> Sequence[Axis]:
        return _copies_along(self.inputs[0], self.grid_axes, ndim)

    def operator(self, X: TensorSpace) -> LinearOperator:
        return collectives.all_reduce(X, self.grid_axes)


class AllGather(Movement):
    """Every worker gets the concatenated blocks along some grid axes; see `linop.all_gather`.

    Args:
        P_x: the partition of input and output; grid axis k splits dimension k.
        grid_axes: along which blocks are concatenated; by default all.
        into: `linop.COPIES`: workers compute different results from their copies, and the gradient
            is the reduce-scatter; or `linop.REPLICATED`: all compute the same, and the gradient is
            a local slice.

    Example:
        >>> P, x = linop.Partition((2,)), torch.arange(4.0).chunk(2)
        >>> linop.launch(lambda b: layers.AllGather(P)(x[b.worker]).tolist(), workers=2)
        [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]]
    """

    def __init__(
        self,
        P_x: Partition,
        grid_axes: int | Sequence[int] | None = None,
        into: Role = COPIES,
    ) -> None:
        super().__init__(P_x)
        self.grid_axes, self.into = _grid_axes("AllGather", P_x, grid_axes), into

    def operator(self, X: TensorSpace) -> LinearOperator:
        return collectives.all_gather(X, self.grid_axes, self.into)


class ReduceScatter(Movement):
    """The blocks along some grid axes summed, and the sum cut along the same axes; see
    `linop.reduce_scatter`. The gradient is the all-gather.

    Args:
        P_x: the partition of input and output.
        grid_axes: along which the blocks, all of one shape, are summed; by default all.
        dims: the dimension that each of them splits afterwards; by default grid axis k splits k.

    Example:
        >>> P = linop.Partition((2,))
        >>> x = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
        >>> linop.launch(lambda b: layers.ReduceScatter(P)(x[b.worker]).tolist(), workers=2)
        [[11.0], [22.0]]
    """

    def __init__(
        self,
        P_x: Partition,
        grid_axes: int | Sequence[int] | None = None,
        dims: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(P_x)
        self.grid_axes, self.dims = _grid_axes("ReduceScatter", P_x, grid_axes), dims

    def axes(self, number: int, ndim: int) -> Sequence[Axis]:
        return _copies_along(self.inputs[0], self.grid_axes, ndim)

    def operator(self, X: TensorSpace) -> LinearOperator:
        return collectives.reduce_scatter(X, self.grid_axes, self.dims)


class Repartition(Movement):
    """The same global tensor in other blocks, on the same workers, others, or both; see
    `linop.repartition`. The gradient is the repartition back.

    Args:
        P_x, P_y: the partitions; grid axis k splits dimension k, `P_y` into balanced blocks.
        preserve_batch: True: zero-volume results have shape (batch, 0); False: (0,).

    Example:
        >>> P, Q = linop.Partition((2, 1)), linop.Partition((1, 2))  # by rows, by columns
        >>> x = torch.arange(4.0).view(2, 2).chunk(2)
        >>> linop.launch(lambda b: layers.Repartition(P, Q)(x[b.worker]).tolist(), workers=2)
        [[[0.0], [2.0]], [[1.0], [3.0]]]
    """

    def __init__(self, P_x: Partition, P_y: Partition, preserve_batch: bool = True) -> None:
        super().__init__(P_x, P_y, preserve_batch)

    def operator(self, X: TensorSpace) -> LinearOperator:
        return collectives.repartition(X, self.P_y)


class HaloExchange(Movement):
    """Every worker gets the input range of its block of a sliding kernel's output, without boundary
    padding; see `linop.halo_exchange`. The gradient adds the halos back to their owners.

    Args:
        P_x: the partition; grid axis k splits dimension k.
        kernel_size, stride, padding, dilation: of the kernel: one number, or one per dimension.

    Example:
        >>> P, x = linop.Partition((2,)), [torch.arange(4.0).requires_grad_() for _ in range(2)]
        >>> def main(backend):
        ...     y = layers.HaloExchange(P, kernel_size=3, padding=1)(x[backend.worker])
        ...     y.sum().backward()
        ...     return y.tolist()
        >>> linop.launch(main, workers=2)  # with an edge of the neighbour's
        [[0.0, 1.0, 2.0, 3.0, 0.0], [3.0, 0.0, 1.0, 2.0, 3.0]]
        >>> [block.grad.tolist() for block in x]  # both workers have read these edges
        [[1.0, 1.0, 1.0, 2.0], [2.0, 1.0, 1.0, 1.0]]
    """

    def __init__(
        self,
        P_x: Partition,
        kernel_size: PerDim,
        stride: PerDim = 1,
        padding: PerDim = 0,
        dilation: PerDim = 1,
    ) -> None:
        super().__init__(P_x)
        self.kernel = kernel_size, stride, padding, dilation

    def operator(self, X: TensorSpace) -> LinearOperator:
        return halo.halo_exchange(X, *self.kernel)


def _grid_axes(name: str, P: Partition, axes: int | Sequence[int] | None) -> tuple[int, ...]:
    given = range(P.ndim) if axes is None else (axes,) if isinstance(axes, int) else tuple(axes)
    if any(not isinstance(k, int) or not -P.ndim <= k < P.ndim for k in given):
        raise PartitionError(f"{name}: grid axes {axes!r} of {P!r}, which has {P.ndim}")
    return tuple(k % P.ndim for k in given)


def _copies_along(P: Partition, axes: Sequence[int], ndim: int) -> list[Axis]:
    return [COPIES if k in axes or k >= ndim else k for k in range(P.ndim)]
