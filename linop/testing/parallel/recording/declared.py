"""DTensors that a program declares to be replicated, by ``DTensor.from_local``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from linop.testing.parallel.recording.records import Declared
from linop.testing.parallel.recording.tensors import numbers, users_line

_OF_TORCH = "a gradient, in the backward pass of to_local() without grad_placements"


@contextmanager
def declarations(add: Callable[[Declared], None]) -> Iterator[None]:
    """Context in which these are recorded."""
    try:
        from torch.distributed.tensor import DTensor, Replicate
    except ImportError:
        yield
        return
    kind: Any = DTensor
    before = kind.__dict__["from_local"]
    plain = before.__func__

    def from_local(local: Any, *args: Any, **kwargs: Any) -> Any:
        made = plain(local, *args, **kwargs)
        at = made.device_mesh.get_coordinate()
        kinds = [isinstance(one, Replicate) for one in made.placements]
        if at is not None and any(kinds):
            cut = tuple(k for k, whole in zip(at, kinds, strict=True) if not whole)
            line = ": ".join(filter(None, users_line())) or _OF_TORCH
            add(Declared(line, cut, numbers(local)))
        return made

    kind.from_local = staticmethod(from_local)
    try:
        yield
    finally:
        kind.from_local = before
