"""Array modules for local maps: the interface, and NumPy's implementation of it in host memory.

Only the functions that a local operator calls on arrays belong here. The core imports NumPy alone;
implementations for arrays in device memory are in `linop.backends.engine.arrays.interface`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from linop.spaces.scalars import Array


class Namespace:
    """Array module with NumPy's interface: NumPy itself; subclasses are for device arrays.

    Attributes:
        name: of the package.
        module: the module that has NumPy's functions for these arrays.
        ndarray: the array class.
    """

    name = "numpy"
    module: Any = np
    ndarray: type[Any] = np.ndarray

    def put(self, array: npt.ArrayLike) -> Array:
        """Convert a NumPy array to an array of this module; a copy only if needed."""
        return np.asarray(array)

    def taken(self, result: Any) -> Any:
        """Convert the result of a user's function: another package's array to this module's
        array, any other value unchanged."""
        other = hasattr(result, "dtype") and not isinstance(result, np.ndarray)
        return np.asarray(result) if other else result

    def scipy(self, part: str) -> Any:
        """SciPy's submodule `part` (for example ``fft``) for these arrays."""
        return import_module(f"scipy.{part}")


HOST = Namespace()
