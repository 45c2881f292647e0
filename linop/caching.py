"""`cached_property` for objects of several threads, and the attributes of such objects."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

__all__ = ["attributes", "cached_property"]


def attributes(instance: Any) -> dict[str, Any]:
    """``instance.__dict__``, for objects that other threads use, too.

    Before Python 3.12, an object has a dict only once it is asked for, and memory for that may be
    had by a collection of garbage, in which finalizers run and other threads go on. If one of them
    asked for the same object's dict, both had one, over the same values, whose memory the first of
    them to end freed: a later collection read it, and the process died. Here nothing comes between:
    the dict that was dropped just before is taken again."""
    return {} or instance.__dict__


if TYPE_CHECKING:
    from functools import cached_property
else:

    class cached_property(functools.cached_property):
        """`functools.cached_property` without its lock. Before Python 3.12 that is one for all
        instances: threads that compute properties of other objects, one inside the other in
        different orders, waited for each other forever. Threads may compute a value twice; all get
        the first."""

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            if instance is None:
                return self
            value = self.func(instance)
            return ({} or instance.__dict__).setdefault(self.attrname, value)  # as `attributes`
