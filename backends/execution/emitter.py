"""Source of a run: Python text made of a plan's steps, compiled once and run many times.

A Python function call costs about as much as a message of a few bytes in shared memory; so a run is
one function, whose steps are inlined as lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from types import CodeType
from typing import Any

from linop.backends.execution.arrays import NUMPY, Arrays


class Code:
    """Namespace of a generated source, and compilation of its functions.

    Args:
        arrays: array module, whose `Arrays.functions` every source may call.
    """

    def __init__(self, arrays: Arrays = NUMPY) -> None:
        self.arrays = arrays
        self._names = dict(arrays.functions)
        self._locals = 0

    def name(self, thing: Any) -> str:
        """New name for an object, bound for all runs."""
        name = f"v{len(self._names)}"
        self._names[name] = thing
        return name

    def local(self) -> str:
        """New name of a local variable."""
        self._locals += 1
        return f"c{self._locals}"

    def function(self, parameters: Iterable[str], lines: Iterable[str]) -> Callable[..., Any]:
        """Function with these parameters and body lines; a generator function if a line yields."""
        body = "".join(f"\n    {line}" for line in lines)
        made: dict[str, Any] = {}
        text = f"def run({', '.join(parameters)}):{body}"
        exec(_compiled(text), self._names, made)
        function: Callable[..., Any] = made["run"]
        return function


@lru_cache(maxsize=256)
def _compiled(text: str) -> CodeType:
    """Compiled source, cached: plans of equal structure have equal sources, with different objects
    for the names."""
    return compile(text, "<a plan of linop>", "exec")
