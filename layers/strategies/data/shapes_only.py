"""Forwards whose shapes alone are of use, as those that find what a stage of a pipeline returns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCAL = threading.local()


@contextmanager
def shapes_only() -> Iterator[None]:
    """Context of this thread's forwards whose shapes alone are of use: whole parameters are zeros,
    and no message is sent, so that other workers need not make them."""
    before = only_shapes()
    _LOCAL.shapes_only = True
    try:
        yield
    finally:
        _LOCAL.shapes_only = before


def only_shapes() -> bool:
    """True inside of `shapes_only`."""
    found: bool = getattr(_LOCAL, "shapes_only", False)
    return found
