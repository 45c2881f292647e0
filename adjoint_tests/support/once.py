"""Functions whose results all workers that are threads ask for: one of them computes, for all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import wraps
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Found = TypeVar("Found")


def once(
    kept: int, key: Callable[..., Hashable] = lambda *given: given
) -> Callable[[Callable[Given, Found]], Callable[Given, Found]]:
    """A decorator of functions whose last results are kept; threads that ask for the same wait for
    the first.

    Args:
        kept: number of results.
        key: of the arguments; equal for the same result.
    """

    def decorated(function: Callable[Given, Found]) -> Callable[Given, Found]:
        one_at_a_time = threading.RLock()
        known: dict[Hashable, Found] = {}

        @wraps(function)
        def found(*given: Given.args, **options: Given.kwargs) -> Found:
            with one_at_a_time:
                asked = key(*given, **options)
                if asked not in known:
                    made = function(*given, **options)
                    if len(known) == kept:
                        del known[next(iter(known))]
                    known[asked] = made
                return known[asked]

        return found

    return decorated
