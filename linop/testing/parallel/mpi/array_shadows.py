"""Shadows of NumPy's arrays: numbers of elements in place of values, by the addresses of memory, so
that arrays that share memory have the same ones. No torch here; beside those of its tensors,
`linop.testing.parallel.mpi.tensor_shadows`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from linop.testing.parallel.mpi.buffers import Area, address_of
from linop.testing.parallel.recording.records import UNKNOWN, ZERO, Lifted, Moved

_ADDED = {"add": 1.0, "subtract": -1.0}
_KEPT = {"positive", "conjugate"}

Terms = list[tuple[np.ndarray, Any]]
"""Numbers of elements, broadcast, with their factors; the sum of all is what is made."""


class ArrayShadows:
    """Shadows of arrays, while a function runs.

    Args:
        given: the function's arguments.
    """

    def __init__(self, call: int, backward: bool, given: Sequence[np.ndarray]) -> None:
        self.lifted = Lifted(call, backward)
        self._next = 1
        self._stores: dict[int, Any] = {}
        self._ends: dict[int, tuple[int, int]] = {}
        """By the first address of a piece of memory: the address behind it, and the size of its
        elements."""
        self._kept: list[Any] = []
        for one in given:
            fresh = np.arange(self._next, self._next + one.size).reshape(one.shape)
            self._next += one.size
            self.write(one, fresh)
            self.lifted.given.append(fresh)

    def finished(self, made: Sequence[Any]) -> Lifted:
        """Movements that were followed.

        Args:
            made: the function's results; those that share no memory with what was followed are
                constants.
        """
        for one in made:
            known = self.numbers(one)
            if known is None:
                known = np.full(np.shape(one), UNKNOWN if np.any(one) else ZERO)
            self.lifted.made.append(known)
        return self.lifted

    # Memory

    def _found(self, address: int, itemsize: int) -> tuple[Any, int] | None:
        """The shadows of the memory that an address lies in, and the position there."""
        for start, (end, size) in self._ends.items():
            if start <= address < end and size == itemsize and not (address - start) % size:
                return self._stores[start], (address - start) // size
        return None

    def _begin(self, start: int, length: int, itemsize: int, owner: Any) -> None:
        """Shadows of a piece of memory; the owner keeps it from being used again."""
        known = self._zeros(length // max(itemsize, 1))
        for first, (end, size) in list(self._ends.items()):
            if start <= first and end <= start + length:  # parts of it, that were known alone
                at = (first - start) // itemsize
                if size == itemsize:
                    known[at : at + (end - first) // size] = self._stores[first]
                del self._ends[first], self._stores[first]
        self._stores[start], self._ends[start] = known, (start + length, itemsize)
        self._kept.append(owner)

    def _zeros(self, count: int) -> Any:
        return np.zeros(count, np.int64)

    def _array(self, store: Any) -> np.ndarray:
        """Shadows of a piece of memory as an array."""
        found: np.ndarray = store
        return found

    def shadow(self, array: np.ndarray) -> np.ndarray | None:
        """The numbers of an array's elements, a view of them; None if its memory has none."""
        if array.dtype.kind not in "fc" or not array.size:
            return None
        found = self._found(address_of(array), array.itemsize)
        if found is None or any(step % array.itemsize for step in array.strides):
            return None
        steps = [step // array.itemsize * 8 for step in array.strides]
        return np.ndarray(array.shape, np.int64, self._array(found[0]), found[1] * 8, steps)

    def numbers(self, value: Any) -> np.ndarray | None:
        """A copy of the numbers of an array's elements; None for what depends on no argument."""
        if not isinstance(value, np.ndarray):
            return None
        known = self.shadow(value)
        return None if known is None or not known.any() else known.copy()

    def write(self, array: np.ndarray, numbers: Any) -> None:
        """Set the numbers of an array's elements."""
        if array.dtype.kind not in "fc" or not array.size:
            return
        known = self.shadow(array)
        if known is None:
            owner = array
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            if owner.itemsize == array.itemsize and owner.flags.forc:
                self._begin(address_of(owner), owner.nbytes, owner.itemsize, owner)
            known = self.shadow(array)
        if known is not None:
            known[...] = numbers

    def combined(self, terms: Terms, shape: tuple[int, ...]) -> np.ndarray:
        """New numbers for elements that are sums of multiples of others."""
        count = int(np.prod(shape))
        fresh = np.arange(self._next, self._next + count)
        unknown = np.zeros(count, bool)
        for numbers, factor in terms:
            flat = np.broadcast_to(numbers, shape).ravel()
            there = flat > 0
            unknown |= flat == UNKNOWN
            factors = np.broadcast_to(np.asarray(factor, float), shape).ravel()[there]
            self.lifted.sums.append((fresh[there], flat[there], factors))
        self._next += count
        return np.where(unknown, UNKNOWN, fresh).reshape(shape)

    # Collectives

    def moved(self, number: int, given: Sequence[Area], made: Sequence[Area]) -> None:
        """A call of mpi4py."""
        before, after = [self._at(one).copy() for one in given], []
        for one in made:
            count = len(one.positions)
            fresh = np.arange(self._next, self._next + count)
            self._next += count
            if self.shadow(one.memory) is None:
                self.write(one.memory, ZERO)
            known = self.shadow(one.memory)
            if known is not None:
                known[one.positions] = fresh
            after.append(fresh)
        self.lifted.moved.append(Moved(number, before, after))

    def _at(self, one: Area) -> np.ndarray:
        known = self.shadow(one.memory)
        if known is None:
            return np.full(len(one.positions), UNKNOWN)
        found: np.ndarray = known[one.positions]
        return found

    # What NumPy does

    def ufunc(self, name: str, method: str, inputs: Sequence[Any], kwargs: Any) -> Any:
        """The coming result of a function of elements: terms of its result; UNKNOWN if that is not
        linear; None if nothing of the arguments is in it."""
        known = [self.numbers(one) for one in inputs]
        if all(one is None for one in known):
            return None
        if method == "reduce" and name == "add" and set(kwargs) <= {"axis", "keepdims", "dtype"}:
            return self._sum_terms(known[0], kwargs)
        if method != "__call__" or "where" in kwargs:
            return UNKNOWN
        if name in _ADDED and len(inputs) == 2:
            terms: Terms = []
            for one, value, factor in zip(known, inputs, (1.0, _ADDED[name]), strict=True):
                if one is not None:
                    terms.append((one, factor))
                elif np.any(np.asarray(value) != 0):
                    return UNKNOWN
            return terms
        if name in _KEPT and (name == "positive" or inputs[0].dtype.kind == "f"):
            return [(known[0], 1.0)]
        if name == "negative":
            return [(known[0], -1.0)]
        if name == "multiply" and (known[0] is None or known[1] is None):
            at = 0 if known[1] is None else 1
            return _scaled(known[at], inputs[1 - at], inputs[at])
        if name in ("divide", "true_divide") and known[1] is None:
            return _scaled(known[0], 1.0 / np.asarray(inputs[1], float), inputs[0])
        return UNKNOWN

    def _sum_terms(self, known: Any, kwargs: Any) -> Terms:
        axis = kwargs.get("axis", 0)
        axes = range(known.ndim) if axis is None else np.atleast_1d(axis) % known.ndim
        moved = np.moveaxis(known, tuple(axes), tuple(range(len(axes))))
        rest = moved.shape[len(axes) :]
        if kwargs.get("keepdims"):
            rest = tuple(1 if k in axes else n for k, n in enumerate(known.shape))
        pieces = moved.reshape(-1, *rest)
        return [(one, 1.0) for one in pieces]

    def result(self, array: Any, made: Any) -> None:
        """The result of a function: terms, UNKNOWN or None, as of `ufunc`."""
        if not isinstance(array, np.ndarray):
            if made is not None and array is not None:
                self.lifted.unknown = self.lifted.unknown or "a number made of elements"
            return
        if isinstance(made, list):
            self.write(array, self.combined(made, array.shape))
        elif made is not None:
            self.write(array, UNKNOWN)
        elif self.shadow(array) is not None:
            self.write(array, UNKNOWN if np.any(array) else ZERO)


def _scaled(known: Any, factor: Any, beside: np.ndarray) -> Any:
    value = np.asarray(factor)
    if value.dtype.kind not in "iufb":
        return UNKNOWN
    shape = np.broadcast_shapes(value.shape, beside.shape)
    return [(np.broadcast_to(known, shape), value)]
