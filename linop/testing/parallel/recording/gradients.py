"""Gradients of parameters after a backward pass: where they lie, in which larger tensors a program
puts them (buckets), and the lines that they go through."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from linop.testing.parallel.recording.tensors import address_of, local, storage_of

_SCALING = {"div", "mul", "itruediv", "imul", "truediv", "rmul", "true_divide", "multiply"}


class Gradients:
    """The gradients of a model's parameters.

    Attributes:
        parameters: by name.
        at: names of parameters by the storage of their gradients.
        lines: the last lines that changed gradients of parameters in place, by their names.
        changes: all lines that changed or replaced them after a backward pass, by their names.
        passed: all lines of functions and collectives that their elements went through after a
            backward pass, by their names.
        scaled: those of them that multiply or divide.
    """

    def __init__(self) -> None:
        self.parameters: dict[str, torch.Tensor] = {}
        self.at: dict[tuple[int, int], str] = {}
        self.lines: dict[str, str] = {}
        self.changes: dict[str, dict[str, None]] = {}
        self.passed: dict[str, dict[str, None]] = {}
        self.scaled: dict[str, dict[str, None]] = {}
        self._within: dict[int, dict[str, None]] = {}
        """Names of parameters by the memory that elements of their gradients have been put in."""

    def find(self) -> None:
        """Learn where gradients lie, so that what changes them in place is known as such."""
        self.at = {
            storage_of(local(one.grad)): name
            for name, one in self.parameters.items()
            if one.grad is not None
        }

    def name(self, tensors: Sequence[torch.Tensor]) -> str:
        """The parameter of which tensors are the gradient; empty if they are none, or several."""
        named = {self.at.get(storage_of(one), "") for one in tensors}
        return named.pop() if len(named) == 1 else ""

    def names(self, tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
        """The parameters whose gradients tensors are, or have elements of."""
        found: dict[str, None] = {}
        for one in tensors:
            if name := self.at.get(storage_of(one)):
                found[name] = None
            else:
                found |= self._within.get(address_of(one), {})
        return tuple(found)

    def moved(self, tensors: Sequence[torch.Tensor], made: Sequence[torch.Tensor], line: str
              ) -> tuple[str, ...]:  # fmt: skip
        """Parameters whose gradients a collective moves, in a tensor that has elements of them.

        Args:
            made: what it writes to.
        """
        names = self.names(tensors)
        self._go_on(names, made, line)
        return names if not self.name(tensors) else ()

    def used(
        self, name: str, line: str, given: Sequence[torch.Tensor], made: Iterable[torch.Tensor]
    ) -> None:
        """A function has been called after a backward pass.

        Args:
            name: the function's.
            line: ``file:line: text``.
        """
        in_place = name.endswith("_") and (
            not name.startswith("__") or name.startswith("__i") or name == "__setitem__"
        )
        for one in given:
            if known := self.at.get(storage_of(one)):
                self.lines[known] = line
                if in_place:
                    self.has_changed(known, line)
        names = self.names(given)
        self._go_on(names, [*made, *(given[:1] if in_place else ())], line)
        if name.removeprefix("_foreach_").strip("_") in _SCALING:
            for each in names:
                self.scaled.setdefault(each, {})[line] = None

    def _go_on(self, names: Iterable[str], made: Iterable[torch.Tensor], line: str) -> None:
        """Elements of gradients are in other tensors now, but for single numbers such as norms."""
        for name in names:
            self.passed.setdefault(name, {})[line] = None
        for one in made:
            if one.numel() > 1 and one.is_floating_point() and storage_of(one) not in self.at:
                if address := address_of(one):
                    self._within.setdefault(address, {}).update(dict.fromkeys(names))

    def has_changed(self, name: str, line: str) -> None:
        self.changes.setdefault(name, {})[line] = None

    def about(self, name: str) -> dict[str, Any]:
        """Fields of the record of a parameter."""
        return {
            "line": self.lines.get(name, ""),
            "changes": tuple(self.changes.get(name, ())),
            "passed": tuple(self.passed.get(name, ())),
            "scaled": tuple(self.scaled.get(name, ())),
        }
