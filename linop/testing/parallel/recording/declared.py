"""Placements that a program declares: of DTensors, of plain tensors that it makes DTensors of, and
of their gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from linop.testing.parallel.recording.records import Declared, Placed
from linop.testing.parallel.recording.tensors import DISTRIBUTED, numbers, users_line

_OF_TORCH = "a gradient, in the backward pass of to_local() without grad_placements"


@contextmanager
def declarations(
    add: Callable[[Declared], None], aside: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Context in which DTensors that are declared to be replicated are recorded.

    Args:
        aside: returns a context of work that is not recorded.
    """
    if not DISTRIBUTED:
        yield
        return
    kind: Any = DISTRIBUTED[0]
    before = kind.__dict__["from_local"]
    plain = before.__func__

    def from_local(local: Any, *args: Any, **kwargs: Any) -> Any:
        made = plain(local, *args, **kwargs)
        with aside():
            if (found := _declared(made, local)) is not None:
                add(found)
        return made

    kind.from_local = staticmethod(from_local)
    try:
        yield
    finally:
        kind.from_local = before


def _declared(made: Any, local: torch.Tensor) -> Declared | None:
    """A DTensor that is declared to be replicated over dimensions of its mesh; None of others."""
    mesh = made.device_mesh
    at = mesh.get_coordinate()
    whole = [one.is_replicate() for one in made.placements]
    if at is None or not any(whole):
        return None
    chosen = (slice(None) if of else k for of, k in zip(whole, at, strict=True))
    copies = tuple(mesh.mesh[tuple(chosen)].reshape(-1).tolist())
    in_forward = torch._C._current_graph_task_id() == -1
    line = ": ".join(filter(None, users_line())) if in_forward else ""
    return Declared(line or _OF_TORCH, copies, numbers(local))


def placed(kind: Any, args: Any) -> Placed | None:
    """The placements of a call of a function of DTensor; None of another function's.

    Args:
        kind: the class of the function.
        args: those of its ``apply``.
    """
    if not kind.__module__.startswith("torch.distributed.tensor."):
        return None
    names = list(inspect.signature(kind.forward).parameters)[1:]
    given = dict(zip(names, args, strict=False))
    made = given.get("input")
    mesh = getattr(made, "device_mesh", None) or given.get("device_mesh")
    if made is None or mesh is None or mesh.get_coordinate() is None:
        return None
    gradient = given.get("grad_placements")
    before, after = getattr(made, "placements", None), given.get("placements")
    axes = [tuple(dist.get_process_group_ranks(mesh.get_group(k))) for k in range(mesh.ndim)]
    return Placed(
        None if before is None else kinds(before),
        None if after is None else kinds(after),
        None if gradient is None else kinds(gradient),
        axes,
    )


def kinds(placements: Any) -> tuple[str, ...]:
    """Placements as they are written in a program."""
    return tuple(map(_kind, placements))


def _kind(placement: Any) -> str:
    if placement.is_replicate():
        return "Replicate()"
    if placement.is_partial():
        how = getattr(placement, "reduce_op", "sum")
        return "Partial()" if how == "sum" else f"Partial({how!r})"
    return f"Shard({placement.dim})" if placement.is_shard() else repr(placement)
