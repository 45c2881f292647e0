"""`cached_property` for objects of several threads."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

__all__ = ["cached_property"]

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
            return instance.__dict__.setdefault(self.attrname, self.func(instance))
