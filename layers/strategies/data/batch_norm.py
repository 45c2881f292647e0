"""Batch normalisation by the statistics of all workers' rows: torch's SyncBatchNorm, with sums that
are operators."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linop.backends.autograd.dtypes import summed_dtype
from linop.backends.autograd.functions import apply, hindrance, new_anchor, new_key
from linop.backends.autograd.real_calls import is_tracing, really
from linop.errors import ArgumentError, expect
from linop.operators.algebra import in_steps
from linop.operators.operator import LinearOperator
from linop.spaces.partition import Partition
from linop.strategies.data.operators import replication
from linop.strategies.data.shapes_only import only_shapes
from linop.strategies.mesh import Axis


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """torch's module, whose mean and variance in training are of the rows of all workers of an
    axis, however many each has. `sync_batch_norm` makes it, of one of torch's: it is called, and
    saved, as that is. Collective in training; in evaluation, as torch's, each worker's own, with
    the statistics of its own rows if none are tracked.

    The sums are E E.H of each worker's: an all-reduce of copies, which is its own adjoint.
    """

    _axis: Axis
    _sums: dict[Any, LinearOperator]
    _key: str
    _anchor: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """The normalised rows of this worker.

        Args:
            input: of shape (rows, channels, …).

        Raises:
            ValueError: it has fewer dimensions; or all workers together have one value for each
                channel.
        """
        if self._axis.size == 1 or not self.training:
            # Not that of torch's SyncBatchNorm, which asks torch.distributed for workers.
            return super(torch.nn.SyncBatchNorm, self).forward(input)
        if torch.compiler.is_dynamo_compiling() and not hindrance():
            from linop.backends.autograd.traced import followed

            return followed(self, self._key, self._anchor, input)  # type: ignore[no-any-return]
        return self.recorded(input)

    def recorded(self, input: Tensor) -> Tensor:
        """`forward` in training, by torch's tracers, too."""
        self._check_input_dim(input)
        if only_shapes():
            return torch.zeros_like(input)  # others do not come, and one row is enough
        dtype = summed_dtype(input.dtype)
        x = input.to(dtype)
        dims, shape = [d for d in range(x.ndim) if d != 1], (1, -1, *[1] * (x.ndim - 2))
        rows = x.new_full((1,), x.numel() / max(1, x.shape[1]))
        total = self._total(torch.cat([x.sum(dims), rows]))
        count = total[-1].detach()
        really(self, _enough, (), count)
        mean = total[:-1] / count
        centered = x - mean.view(shape)
        variance = self._total(centered.square().sum(dims)) / count
        rows_of_all = count if is_tracing() else float(count)
        self._track(mean.detach(), variance.detach(), rows_of_all)
        scale = (variance + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight
        y = centered * scale.view(shape)
        if self.bias is not None:
            y = y + self.bias.view(shape)
        return y.to(input.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled, it is torch's, which another program converts again."""
        return _torchs, (self._torchs_state(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        copied: Any = _torchs({})
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self._torchs_state(), memo))
        copied.__class__ = SyncBatchNorm
        copied._axis, copied._sums = self._axis, {}
        copied._key, copied._anchor = new_key(), new_anchor()
        return copied  # type: ignore[no-any-return]

    def _torchs_state(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in _OWN}

    def _total(self, x: Tensor) -> Tensor:
        """The sum over the workers, on each of them."""
        key = x.numel(), x.dtype
        if key not in self._sums:
            E = replication(*key, Partition((self._axis.size,)))
            self._sums[key] = in_steps(E, E.H)
        total: Tensor = apply(self._sums[key], x, self._axis.backend, "SyncBatchNorm")
        return total

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Any) -> None:
        if not (self.training and self.track_running_stats):
            return
        assert self.running_mean is not None
        assert self.running_var is not None
        factor: Any = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                batches = self.num_batches_tracked
                factor = 1 / (batches.double() if is_tracing() else float(batches))
        unbiased = variance * (count / (count - 1))
        for running, value in (self.running_mean, mean), (self.running_var, unbiased):
            value = value.to(running.dtype)
            if isinstance(factor, Tensor):  # in graphs, which do not know its value
                running.mul_(1 - factor).add_(value * factor)
            else:
                running.mul_(1 - factor).add_(value, alpha=factor)


_OWN = "_axis", "_sums", "_key", "_anchor", "_real_calls"
"""Attributes that torch's module has not."""


def _enough(count: Tensor) -> Sequence[Tensor]:
    """Nothing.

    Raises:
        ValueError: there is one value for each channel.
    """
    if count <= 1:
        raise ValueError("Expected more than 1 value per channel when training")
    return ()


def as_torchs(module: Any) -> None:
    """Let a norm of an axis be torch's again, in place; others stay."""
    kind: Any = type(module)
    if kind is SyncBatchNorm:
        module.__class__ = torch.nn.SyncBatchNorm
        for name in _OWN:
            module.__dict__.pop(name, None)


def _torchs(state: dict[str, Any]) -> torch.nn.SyncBatchNorm:
    made = torch.nn.SyncBatchNorm.__new__(torch.nn.SyncBatchNorm)
    made.__dict__.update(state)
    return made


def sync_batch_norm(net: Any, axis: Axis) -> Any:
    """Let the batch norms of a module take their statistics over the workers of an axis, in place:
    those of torch.nn, lazy ones apart, and its SyncBatchNorm. `DataParallel` does it for modules of
    ``torch.nn.SyncBatchNorm.convert_sync_batchnorm``.

    Args:
        net: the same on all workers.
        axis: such as ``mesh["dp"]``: workers that have parts of one batch.

    Returns:
        The module; parameters, buffers and hooks of its norms stay.

    Raises:
        ArgumentError: it is no module, or the axis is none.

    Example:
        The mean is that of all four rows, of which each worker has two:

        >>> x = torch.tensor([[0.0], [2.0], [4.0], [6.0]])
        >>> def program(backend):
        ...     net = torch.nn.BatchNorm1d(1, momentum=1.0)
        ...     strategies.sync_batch_norm(net, strategies.Mesh(dp=2)["dp"])
        ...     net(x.chunk(2)[backend.worker])
        ...     return net.running_mean.tolist()
        >>> linop.launch(program, workers=2)
        [[3.0], [3.0]]
    """
    expect("sync_batch_norm: net", net, torch.nn.Module)
    expect("sync_batch_norm: axis", axis, Axis)
    for module in net.modules():
        kind = type(module)
        if kind in _KINDS or (kind is SyncBatchNorm and module._axis is not axis):
            if getattr(module, "process_group", None) is not None:
                raise ArgumentError(
                    "sync_batch_norm: a torch.nn.SyncBatchNorm has a process_group of "
                    "torch.distributed; convert without one: the axis says which workers"
                )
            module.__class__ = SyncBatchNorm
            module._axis, module._sums = axis, {}
            module._key, module._anchor = new_key(), new_anchor()
            module.__dict__.setdefault("process_group", None)
    return net


def is_torchs(module: Any) -> bool:
    """True for torch's SyncBatchNorm, that some module asks for."""
    return type(module) is torch.nn.SyncBatchNorm


_KINDS = (
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
    torch.nn.SyncBatchNorm,
)
