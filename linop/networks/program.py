"""A map as a program of workers: its value, and products with its Jacobian there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from linop.errors import LinopError
from linop.networks.derivatives import CurrentPoint
from linop.normal_form.maps import bare_or_dict
from linop.operators.operator import LinearOperator
from linop.spaces.region import Region
from linop.spaces.scalars import Array
from linop.spaces.space import Space


class Program:
    """A map bound to a backend; `linop.networks.Map.compile` makes it.

    Arguments and results are as of a plan: a bare array where a worker has one region, a dict of
    arrays by region name where it has several. All methods are collective.

    Example:
        >>> X, x = linop.TensorSpace((4,), linop.Partition((2,))), np.array([-1.0, 2.0, -3.0, 4.0])
        >>> F = linop.networks.relu(X)
        >>> def main(backend):
        ...     program = F.compile(backend)
        ...     y = program(x[X.slices(backend.worker)])
        ...     return y.tolist(), program.vjp(np.array([10.0, 20.0])).tolist()
        >>> linop.launch(main, workers=2)  # the values, and the gradients, of each block
        [([0.0, 2.0], [0.0, 20.0]), ([0.0, 4.0], [0.0, 20.0])]
    """

    def __init__(
        self,
        value: LinearOperator,
        jacobian: LinearOperator,
        backend: Any,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self._forget = forget
        self._value = value.compile(backend)
        self._jacobian = jacobian.compile(backend)
        self._points: dict[CurrentPoint, Sequence[Array]] = {}
        made = _held(value.codomain, backend)
        self._ones = bare_or_dict(made, [np.ones(r.shape, value.dtype) for r in made])
        self._names = [r.name for r in _held(jacobian.domain, backend)]

    def __call__(self, x: Any) -> Any:
        """The value at x, whose arrays must not change before derivatives there are taken."""
        self._points.clear()
        self._forget()
        y = self._run(self._value, x)
        # The functions keep their values for the derivatives.
        if isinstance(y, dict):
            return {name: array.copy() for name, array in y.items()}
        return None if y is None else y.copy()

    def jvp(self, v: Any) -> Any:
        """J v, the Jacobian where the map was last evaluated times a vector of its domain.

        Raises:
            BackendError: the map was not evaluated.
        """
        return self._run(self._jacobian, v)

    def vjp(self, g: Any) -> Any:
        """Jᴴ g, its adjoint times a vector of its codomain. Raises: as `jvp`."""
        return self._run(self._jacobian.H, g)

    def gradient(self) -> dict[str, Array]:
        """The gradient of the sum of all values, Jᴴ 1: arrays of the regions that this worker
        holds, always by name. Raises: as `jvp`."""
        found = self.vjp(self._ones)
        if len(self._names) == 1:
            return {self._names[0]: found}
        return found or {}

    def refuse(self, wrong: LinopError) -> None:
        """Raise an error of this worker's argument, in place of a call: on every worker."""
        self._value.enter(wrong)

    def _run(self, plan: Any, x: Any) -> Any:
        outer = getattr(CurrentPoint.running, "points", None)
        CurrentPoint.running.points = self._points
        try:
            return plan(x)
        finally:
            CurrentPoint.running.points = outer


def _held(space: Space, backend: Any) -> Sequence[Region]:
    return space.regions if backend.worker is None else space.on(backend.worker)
