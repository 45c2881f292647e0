"""Plans of operators that are linear over the real numbers alone: a plan on rows of real parts
(`linop.spaces.real_parts`), whose arguments and results are seen as the numbers that they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from linop.backends.engine.arrays.arguments import Unfit, held, held_arrays
from linop.backends.engine.base import BoundPlan
from linop.errors import LinopError
from linop.operators.operator import LinearOperator
from linop.spaces.real_parts import in_parts, of_parts
from linop.spaces.scalars import Array
from linop.spaces.space import Space
from linop.spaces.vector import Vector


class PartsPlan(BoundPlan):
    """A plan whose arrays are views of another plan's.

    Args:
        op: the operator.
        plan: the plan of ``op.over_reals()``.
    """

    def __init__(self, op: LinearOperator, plan: BoundPlan) -> None:
        self.op = op
        self.plan = plan
        self.backend = plan.backend
        self.lock = plan.lock
        self.number = plan.number
        self.counters = plan.counters
        self._adjoint = None
        self._here = plan.backend.worker
        self._single = [self._only(space) for space in (op.domain, op.codomain)]

    def _only(self, space: Space) -> tuple[type[Any], tuple[int, ...]] | None:
        """The class and shape of the only array held here; None of several or none."""
        regions = held(space, self._here)
        if len(regions) != 1:
            return None
        return self.backend.arrays.of(regions[0].memory).ndarray, regions[0].shape

    def __reduce_ex__(self, protocol: object) -> Any:
        self.plan.__reduce_ex__(protocol)  # or raises
        return self.backend.compile, (self.op,)

    @property
    def is_broken(self) -> bool:
        return self.plan.is_broken

    @property
    def receives_early(self) -> bool:
        return self.plan.receives_early

    def _bind_adjoint(self, op: LinearOperator) -> BoundPlan:
        form = op.over_reals()  # with Riesz maps, it is not the adjoint of rows of parts alone
        plain = form is self.plan.op.H
        return PartsPlan(op, self.plan.H if plain else self.plan._bind_adjoint(form))

    @property
    def H(self) -> BoundPlan:
        if self._adjoint is None:
            self._adjoint = self._bind_adjoint(self.op.H)
            self._adjoint._adjoint = self
        return self._adjoint

    def __call__(self, x: Any = None, *, out: Any = None) -> Any:
        rows = self._rows(x, 0)
        if out is None:
            return self._numbers(self.plan(rows))
        self.plan(rows, out=rows if out is x else self._rows(out, 1))
        return out

    def in_any_order(self) -> None:
        self.plan.in_any_order()

    def start(self, x: Any = None, *, out: Any = None) -> None:
        rows = self._rows(x, 0)
        into = None if out is None else rows if out is x else self._rows(out, 1)
        self.plan.start(rows, out=into)
        self._given = out

    def finish(self) -> Any:
        result = self.plan.finish()
        out, self._given = self._given, None
        return self._numbers(result) if out is None else out

    def meet(self, call: int) -> None:
        self.plan.meet(call)

    def describe(self) -> str:
        return self.plan.describe()

    def fail(self, error: BaseException) -> None:
        self.plan.fail(error)

    def release(self) -> None:
        self.plan.release()

    def _begin(self, x: Any, out: Any) -> None:
        self.plan._begin(self._rows(x, 0), out)

    def _end(self) -> Sequence[Array]:
        dtype = self.op.codomain.dtype
        return [of_parts(array, dtype) for array in self.plan._end()]

    def _rows(self, x: Any, side: int) -> Any:
        """An argument (of the side 0) or ``out`` (1), as rows of parts. What does not fit is left
        to the plan, which raises its error on every worker."""
        space = self.op.codomain if side else self.op.domain
        only = self._single[side]
        if only is not None and type(x) is only[0] and x.shape == only[1]:
            if x.dtype == space.dtype:
                return in_parts(x)
        try:
            given = held_arrays(space, self._here, x, self.backend.arrays)
        except LinopError as error:
            return Unfit(error)
        if side and not isinstance(x, Vector):
            for array in given.values():
                if not any(array is one for one in (x.values() if isinstance(x, Mapping) else [x])):
                    return x  # converted: no memory to write to, as the plan says
        rows = {name: in_parts(array) for name, array in given.items()}
        if isinstance(x, Vector):
            return Vector(space.over_reals(), rows, x.shared)
        return rows if len(rows) > 1 else next(iter(rows.values()), None)

    def _numbers(self, result: Any) -> Any:
        """Results as the numbers whose parts they are."""
        space = self.op.codomain
        if isinstance(result, Vector):
            arrays = {name: of_parts(rows, space.dtype) for name, rows in result.arrays.items()}
            return Vector(space, arrays, result.shared)
        if isinstance(result, Mapping):
            return {name: of_parts(rows, space.dtype) for name, rows in result.items()}
        return None if result is None else of_parts(result, space.dtype)
