"""Sums of parameters' gradients over the workers that cut space, of many parameters together.

A parameter is used beside blocks as copies, E θ, on each worker; its gradient is E.H of those of
the copies, a sum over workers. In a backward that adds gradients to ``grad``, sums wait for others,
as each is a message: gradients are put one after the other, in the order in which backward gets to
them, which is one on all workers, and E.H of so long a tensor is applied to them together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from linop.backends.autograd.functions import apply
from linop.operators.operator import LinearOperator
from linop.strategies.data.bucket import Flat
from linop.strategies.data.bucket import Layout as Places
from linop.strategies.space.layout import Axis

if TYPE_CHECKING:
    from linop.strategies.space.grid import Grid

CAP = 2**20
"""Bytes of gradients that are summed together, at most, unless one has more."""


class _Waiting:
    """Gradients of a backward that are not summed yet.

    Args:
        size: bytes of those there.
    """

    def __init__(self) -> None:
        self.size = 0
        self.gradients: list[tuple[Tensor, Tensor]] = []
        """Parameters, and their gradients on this worker."""


class Sums:
    """Context of a forward whose parameters' gradients are summed together.

    Args:
        grid: the workers.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._copies: dict[Any, tuple[Tensor, Tensor]] = {}
        """By parameter, it and its copy in this forward."""
        self._plans: dict[Any, Flat] = {}
        self._waiting: dict[int, dict[Any, _Waiting]] = {}
        """By backward."""
        self._before: Sums | None = None

    def __deepcopy__(self, memo: object) -> Sums:
        return Sums(self._grid)

    def __enter__(self) -> Sums:
        self._before, _HERE.sums = _HERE.sums, self
        return self

    def __exit__(self, *error: object) -> None:
        _HERE.sums = self._before
        self._copies.clear()

    def copy(self, p: Tensor, axes: tuple[Axis, ...], adjoint: LinearOperator) -> Tensor:
        """The copy of a parameter, for all its uses in this forward.

        Args:
            axes: of the layout of the copy.
            adjoint: E.H, of the parameter's shape.
        """
        key = id(p), axes
        known = self._copies.get(key)
        if known is None:
            copy = p.view_as(p)
            assert copy.grad_fn is not None
            copy.grad_fn.register_prehook(partial(self._hook, p, axes, adjoint))
            known = self._copies[key] = p, copy
        return known[1]

    def _hook(
        self, p: Tensor, axes: tuple[Axis, ...], adjoint: LinearOperator, gradients: Any
    ) -> tuple[Tensor | None]:
        """The gradient that goes on to the parameter; None for one that is added later."""
        (g,) = gradients
        if g is None:
            return (None,)
        if not _is_added(p, g):
            return (apply(adjoint, g, self._grid.backend),)
        self._add(p, axes, g)
        return (None,)

    def _add(self, p: Tensor, axes: tuple[Axis, ...], g: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._waiting:
            while len(self._waiting) > _NESTED:  # those left by backwards that have failed
                del self._waiting[next(iter(self._waiting))]
            self._waiting[task] = {}
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(self._end, task))
        waiting = self._waiting[task].setdefault((axes, g.dtype), _Waiting())
        size = g.numel() * g.element_size()
        if waiting.gradients and waiting.size + size > CAP:
            self._sum(axes, waiting)
        waiting.gradients.append((p, g))
        waiting.size += size
        if waiting.size >= CAP:
            self._sum(axes, waiting)

    def _end(self, task: int) -> None:
        for (axes, _), waiting in self._waiting.pop(task).items():
            if waiting.gradients:
                self._sum(axes, waiting)

    def _sum(self, axes: tuple[Axis, ...], waiting: _Waiting) -> None:
        gradients, waiting.gradients, waiting.size = waiting.gradients, [], 0
        places = Places([g for _, g in gradients])
        if len(gradients) == 1:
            flat = gradients[0][1].reshape(-1)
        else:
            flat = torch.cat([g.reshape(-1) for _, g in gradients])
        key = places.size, flat.dtype, axes
        if key not in self._plans:
            self._plans[key] = self._plan(*key)
        total = self._plans[key](flat)
        assert total is not None
        for (p, _), part in zip(gradients, places.views(total), strict=True):
            with torch.no_grad():
                if p.grad is None:
                    p.grad = part
                else:
                    p.grad.add_(part)

    def _plan(self, size: int, dtype: torch.dtype, axes: tuple[Axis, ...]) -> Flat:
        whole = self._grid.whole((size,))
        E = self._grid.operator(whole, whole.changed(axes=axes), (), dtype)
        assert E is not None
        return Flat(E.H, self._grid.backend, dtype)


_NESTED = 8


def _is_added(p: Any, g: Tensor) -> bool:
    """True for a gradient that torch adds to ``grad`` unseen by others."""
    if torch.is_grad_enabled() or g.requires_grad or g.layout is not torch.strided:
        return False
    if p._backward_hooks or p._post_accumulate_grad_hooks or g.numel() != p.numel():
        return False
    try:
        runs: Callable[[Any], bool] = torch._C._will_engine_execute_node
        return runs(get_gradient_edge(p).node)
    except RuntimeError:  # of autograd.grad
        return False


class _Here(threading.local):
    sums: Sums | None = None


_HERE = _Here()


def sums() -> Sums | None:
    """The sums of the forward that this thread is in."""
    return _HERE.sums
