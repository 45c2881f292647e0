"""Parameters of a unit that no worker has used: they have no gradient, as in one process, and not
one of zeros, which an optimizer with weight decay or momentum would move them by.

Beside a unit's parameters travels a row of numbers of each worker, one for each parameter, and then
a note to the other workers. Forward gathers the notes; in backward a worker gives ones for the
parameters that it has a gradient for, and the sum over the workers comes back with those of the
gradients. So one node of torch's graph is all that a unit adds to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from linop.caching import cached_property
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace

_NAME = "uses of parameters"
"""No parameter has such a name."""
_ROWS = 8
"""Rows that are kept: notes of successive steps are equal."""


def use_space(members: Sequence[TensorSpace], more: int) -> TensorSpace:
    """Space of the numbers, a row on each worker.

    Args:
        members: spaces of the parameters.
        more: length of a note.
    """
    group: Partition = members[0].partition
    return TensorSpace((group.size, len(members) + more), group, members[0].dtype, [0], _NAME)


class _Beside:
    """A bridge that adds a row to its arguments, and takes that of its results. To
    `linop.backends.autograd.functions` it is a bridge of the parameters alone; other attributes are
    the inner one's.

    Args:
        inner: a `Bridge` of some parameters and of the rows, or one that is converted.
        more: length of a note.
    """

    materializes = False

    def __init__(self, inner: Any, parameters: int, more: int) -> None:
        self._inner, self._parameters, self._more = inner, parameters, more
        self.plan, self.order, self.anchor = inner.plan, inner.order, inner.anchor
        self.closing = inner.closing
        self._rows: dict[tuple[float, ...], Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def results(self) -> list[tuple[tuple[int, ...], Any]]:
        """Shape and dtype of each result."""
        return self._inner.results[:-1]  # type: ignore[no-any-return]

    def zeros(self) -> list[Any]:
        """A zero argument, as tensors."""
        return self._inner.zeros()[:-1]  # type: ignore[no-any-return]

    def empty(self, tensors: Sequence[Any]) -> None:
        """See `Bridge.empty`: every worker has rows."""

    def start(self, tensors: Sequence[Any]) -> None:
        """Start what `finish` completes."""
        self._inner.start([*tensors, self._row()])

    def finish(self) -> tuple[Any, ...]:
        """The results of what was started."""
        return self._out_of(self._inner.finish())

    def run(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """The results for these arguments; of what was started, if something was."""
        if self._inner.is_started:
            return self.finish()
        return self._out_of(self._inner.run([*tensors, self._row()]))

    def filled(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Gradients of results of the adjoint, with zeros for those that there are not."""
        return [self._inner.zero(k) if g is None else g for k, g in enumerate(gradients)]

    def _row(self) -> Tensor:
        """The row of this run."""
        numbers = self._numbers()
        row = self._rows.get(numbers)
        if row is None:
            form = self._inner.zero(-1)
            row = form.new_tensor(numbers).expand(form.shape).contiguous()
            if len(self._rows) == _ROWS:
                self._rows.clear()
            self._rows[numbers] = row
        return row

    def _numbers(self) -> tuple[float, ...]:
        raise NotImplementedError

    def _out_of(self, results: Sequence[Any]) -> tuple[Any, ...]:
        raise NotImplementedError


class Gathering(_Beside):
    """G: whole parameters of shards.

    Attributes:
        terms: the number n that sums of gradients are divided by, in the dtype of the shards: parts
            of half precision would be rounded before they are summed.
        note: of the next run, to the other workers; afterwards one of zeros.
        notes: of all workers in the last run, in rows, which begin with a zero for each parameter.
    """

    terms = 1
    notes: Tensor

    def __init__(self, inner: Any, parameters: int, more: int) -> None:
        super().__init__(inner, parameters, more)
        self.note = self._silent = (0.0,) * more

    @cached_property
    def adjoint(self) -> Summing:
        """The bridge of G.H, whose plan is made when it is first asked for."""
        return Summing(self._inner.adjoint, self)

    def _numbers(self) -> tuple[float, ...]:
        note, self.note = self.note, self._silent
        return (0.0,) * self._parameters + note

    def _out_of(self, results: Sequence[Any]) -> tuple[Any, ...]:
        self.notes = results[-1]
        return tuple(results[:-1])


class Summing(_Beside):
    """G.H / n: the gradients of shards, None of those that no worker has one for."""

    def __init__(self, inner: Any, of: Gathering) -> None:
        super().__init__(inner, of._parameters, of._more)
        self._of = of
        self._every, self._note = (1.0,) * self._parameters, (0.0,) * self._more
        self._used = self._every

    @property
    def terms(self) -> int:
        """See `Gathering`."""
        return self._of.terms

    @cached_property
    def adjoint(self) -> _Divided:
        """The bridge of its own adjoint, G / n."""
        return _Divided(self)

    def filled(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """The gradients of whole parameters; they say which ones the next run counts."""
        if any(gradient is None for gradient in gradients):
            self._used = tuple(float(gradient is not None) for gradient in gradients)
            gradients = super().filled(gradients)
        return gradients

    def _numbers(self) -> tuple[float, ...]:
        used, self._used = self._used, self._every
        return used + self._note

    def _out_of(self, results: Sequence[Any]) -> tuple[Any, ...]:
        pairs = zip(results[:-1], results[-1].tolist()[0], strict=False)  # no gradient of a note
        sums = tuple([gradient if count else None for gradient, count in pairs])
        return sums if self.terms == 1 else _divided(sums, self.terms)


class _Divided(Gathering):
    """G / n, which derivatives of gradients go through."""

    def __init__(self, sums: Summing) -> None:
        super().__init__(sums._inner.adjoint, sums._parameters, sums._more)
        self._sums = sums

    @property
    def adjoint(self) -> Summing:
        """The bridge that it is the adjoint of."""
        return self._sums

    def _out_of(self, results: Sequence[Any]) -> tuple[Any, ...]:
        wholes, terms = super()._out_of(results), self._sums.terms
        return wholes if terms == 1 else _divided(wholes, terms)


def _divided(tensors: Sequence[Any], n: int) -> tuple[Any, ...]:
    return tuple([None if one is None else one / n for one in tensors])
