"""Batches of workers that take part in each other's steps: as many on each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import TypeVar

from linop.backends import Backend
from linop.errors import ArgumentError, BackendError, expect
from linop.layers.agreement.input_agreement import agreement_of
from linop.strategies.data.replicas import agree
from linop.strategies.mesh import Axis

Batch = TypeVar("Batch")


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
    """
    backend = expect("equal_batches: axis", axis, Axis).backend
    agreement, doing = agreement_of(backend), "iterate linop.strategies.equal_batches"
    own, end = iterated(batches, backend, "equal_batches", f"drop_last={drop_last!r}"), object()
    for number in count():
        batch = next(own, end)
        there = agreement.sum(batch is not end, doing)
        if there == axis.size:
            yield batch  # type: ignore[misc]
            continue
        if there and not drop_last:
            said = agreement.gather_objects(batch is not end, doing)
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
