"""The text of a run: Python made from a plan's steps, compiled once and run many times.

A call of a Python function costs about as much as a message of a few bytes in shared memory; so a
run is one function, in which steps are lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from types import CodeType
from typing import Any

from linop.backends.execution.arrays import NUMPY, Arrays


class Code:
    """The names that a text uses, and functions made of text.

    Args:
        arrays: what it computes with, whose functions every text may name.
    """

    def __init__(self, arrays: Arrays = NUMPY) -> None:
        self.arrays = arrays
        self._names = dict(arrays.functions)
        self._locals = 0

    def name(self, thing: Any) -> str:
        """A name for an object that stays."""
        name = f"v{len(self._names)}"
        self._names[name] = thing
        return name

    def local(self) -> str:
        """A new local variable."""
        self._locals += 1
        return f"c{self._locals}"

    def function(self, parameters: Iterable[str], lines: Iterable[str]) -> Callable[..., Any]:
        """What runs some lines; a generator, if one of them yields."""
        body = "".join(f"\n    {line}" for line in lines)
        made: dict[str, Any] = {}
        text = f"def run({', '.join(parameters)}):{body}"
        exec(_compiled(text), self._names, made)
        function: Callable[..., Any] = made["run"]
        return function


@lru_cache(maxsize=256)
def _compiled(text: str) -> CodeType:
    """The text, compiled: plans of one structure have the same, whatever their names stand for."""
    return compile(text, "<a plan of linop>", "exec")
