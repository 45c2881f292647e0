"""Elementwise comparisons of vectors, and vectors as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from linop.errors import AmbiguousError, ArgumentError
from linop.spaces.scalars import Array

if TYPE_CHECKING:
    from linop.spaces.space import Space


class Comparison(Mapping[str, Array]):
    """Boolean arrays by region name, for the regions that this process holds: ``v == w``.

    `all` and `any` reduce them here, without communication; ``v.equals(w)`` is for all workers.
    ``bool(v == w)`` raises `AmbiguousError`, as NumPy's arrays do.
    """

    __array_ufunc__ = None

    def __init__(self, space: Space, arrays: dict[str, Array]) -> None:
        self.space = space
        self.arrays = arrays

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def all(self, axis: None = None, out: None = None) -> bool:
        """True if every element held here is. The arguments are those of `numpy.all`."""
        del axis, out
        return all(bool(array.all()) for array in self.arrays.values())

    def any(self, axis: None = None, out: None = None) -> bool:
        """True if an element held here is; see `all`."""
        del axis, out
        return any(bool(array.any()) for array in self.arrays.values())

    def __bool__(self) -> bool:
        raise AmbiguousError(
            "v == w compares vectors element by element, and has no single truth value; "
            "v.equals(w) says if they are equal, on all workers; (v == w).all() and .any() are of "
            "the regions held here"
        )

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        return only_array(self.space, self.arrays, dtype, copy)

    def __repr__(self) -> str:
        shown = ", ".join(f"{n}={a!r}" for n, a in self.arrays.items())
        return f"Comparison({shown})"


def only_array(
    space: Space, arrays: Mapping[str, Array], dtype: npt.DTypeLike | None, copy: bool | None
) -> Array:
    """The array of a space's only region, by the rules of ``__array__``.

    Args:
        dtype: to convert to, as by `numpy.ndarray.astype`; None for the array's own.
        copy: True for a copy; False for none; None for one only if the conversion needs it.

    Raises:
        ArgumentError: the space has another number of regions, or the array is on a device.
        ValueError: ``copy=False``, and the conversion needs one.
    """
    if len(space.regions) != 1:
        names = ", ".join(list(space.numbering.index)[:8])
        raise ArgumentError(
            f"a vector of {len(space.regions)} regions is not one array: X.gather(v) of a "
            f"TensorSpace X assembles the global tensor, space.flatten(v) lists all elements, and "
            f"v[name] is the array of a region ({names})"
        )
    name = space.regions[0].name
    if name not in arrays:
        raise ArgumentError(f"region {name!r} is held by another worker; this vector is empty here")
    array: Any = arrays[name]
    if not isinstance(array, np.ndarray):
        raise ArgumentError(
            f"region {name!r} is in device memory, as {type(array).__module__}."
            f"{type(array).__qualname__}; copy it to main memory with v[{name!r}].get()"
        )
    wanted = array.dtype if dtype is None else np.dtype(dtype)
    if copy is False and wanted != array.dtype:
        raise ValueError(f"copy=False, but dtype {array.dtype} to {wanted} needs a copy")
    return array.astype(wanted, copy=bool(copy))
