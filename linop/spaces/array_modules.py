"""Which arrays a local map computes with: NumPy's, in main memory, or those of a device.

The core knows NumPy alone. What is here is the little that a local operator needs to be told of
other arrays; a backend on a device brings the rest (`linop.backends.execution.arrays`).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from linop.spaces.scalars import Array


class Namespace:
    """NumPy's arrays, and what computes with them.

    Attributes:
        name: of the package.
        module: where NumPy's functions are, for these arrays.
        ndarray: what an array is.
    """

    name = "numpy"
    module: Any = np
    ndarray: type[Any] = np.ndarray

    def put(self, array: npt.ArrayLike) -> Array:
        """An array of NumPy's, as one of these; a copy only where it has to be."""
        return np.asarray(array)

    def taken(self, result: Any) -> Any:
        """A function's result: an array that is another package's as NumPy's, other values as
        they are."""
        other = hasattr(result, "dtype") and not isinstance(result, np.ndarray)
        return np.asarray(result) if other else result

    def scipy(self, part: str) -> Any:
        """SciPy's module of that name, for these arrays."""
        return import_module(f"scipy.{part}")


HOST = Namespace()
