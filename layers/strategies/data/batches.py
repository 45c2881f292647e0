"""Batches of workers that take part in each other's steps: as many on each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any, TypeVar

from linop.backends import Backend
from linop.errors import ArgumentError, BackendError, expect
from linop.layers.agreement.input_agreement import agreement_of
from linop.strategies.data.replicas import agree
from linop.strategies.mesh import Axis

Batch = TypeVar("Batch")
END = object()
"""In the place of a batch, of a worker that has none."""
_FAILED = 2**32
"""Number that is added for a worker whose batches end in an error."""


def equal_batches(
    batches: Iterable[Batch], axis: Axis, *, drop_last: bool = False
) -> Iterator[Batch]:
    """This worker's batches, of which the workers of an axis have equal numbers. Collective: an
    all-reduce of 16 bytes for each batch.

    All workers of sharded modules, and of pipelines, take part in each other's steps: one that has
    no batch left would be waited for. (`DataParallel.joined` goes on without.)

    Args:
        axis: such as ``mesh["dp"]``, or ``mesh["dp", "pp"]``.
        drop_last: end where the first worker has no batch left; False: that is an error if others
            have one.

    Raises:
        ArgumentError: another axis, or no batches, on a worker. BackendError: workers have unequal
            numbers of batches. On every worker of the axis, before the step of that batch.

    Example:
        Worker 0 has a batch more than worker 1, which would be waited for:

        >>> def program(backend):
        ...     batches = [[1, 2, 3], [4, 5]][backend.worker]
        ...     dp = strategies.Mesh(dp=2)["dp"]
        ...     return [*strategies.equal_batches(batches, dp, drop_last=True)]
        >>> linop.launch(program, workers=2)
        [[1, 2], [4, 5]]
    """
    backend = expect("equal_batches: axis", axis, Axis).backend
    agreement, name = agreement_of(backend), "equal_batches"
    own = iterated(batches, backend, name, f"drop_last={drop_last!r}")
    for number in count():
        batch, there = next_batch(own, backend, name)
        if there == axis.size:
            yield batch
            continue
        if there and not drop_last:
            said = agreement.gather_objects(batch is not END, _doing(name))
            without = [worker for worker, has in enumerate(said) if not has]
            raise BackendError(
                f"equal_batches: workers {without} of {axis.name!r} have {number} batches, others "
                f"more; as many on each expected: take part in all steps, or give drop_last=True"
            )
        return


def iterated(
    batches: Iterable[Batch], backend: Backend, name: str, said: str = ""
) -> Iterator[Batch]:
    """An iterator over batches, where all workers have one, and say the same. Collective."""

    def checked() -> tuple[Iterator[Batch], str]:
        try:
            return iter(batches), said
        except TypeError as error:
            raise ArgumentError(f"an iterable of batches expected, given {batches!r}") from error

    return agree(backend, name, checked)


def next_batch(own: Iterator[Any], backend: Backend, name: str) -> tuple[Any, int]:
    """This worker's next batch, or `END`; and the number of workers that have one. Collective: an
    all-reduce of 16 bytes.

    Raises:
        LinopError: the batches of a worker end in an error; on every worker.
    """
    agreement, problem = agreement_of(backend), None
    try:
        batch = next(own, END)
    except Exception as error:  # of whatever the user gives
        batch, problem = END, error
    mine = _FAILED if problem else int(batch is not END)
    there = agreement.sum(mine, _doing(name))
    if there >= _FAILED:
        agreement.each(lambda: _raised(problem), name, _doing(name))
    return batch, there


def _raised(problem: Exception | None) -> None:
    if problem is not None:
        raise problem


def _doing(name: str) -> str:
    return f"iterate linop.strategies.{name}"
