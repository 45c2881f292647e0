"""Dtypes of tensors and of operators, converted into each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from linop.errors import DTypeError, MissingExtraError

_SAME = ("float64", "float32", "float16", "complex128", "complex64")
_WHOLE = ("int64", "int32", "int16", "int8", "uint8")
_DTYPES = {name: getattr(torch, name) for name in (*_SAME, *_WHOLE, "bfloat16")}
"""torch's dtypes, by NumPy's names."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Operator dtype for tensors of a torch dtype.

    Raises:
        DTypeError: there is none. MissingExtraError: bfloat16 needs ml_dtypes, which is not
            installed.
    """
    if dtype not in _NAMES:
        raise DTypeError(f"tensors of {dtype} given; operators are on {', '.join(_DTYPES)}")
    name: Any = _NAMES[dtype]
    if dtype is torch.bfloat16:
        try:
            import ml_dtypes
        except ImportError as error:
            raise MissingExtraError(
                f"bfloat16 needs ml_dtypes: pip install 'linop-algebra[torch]' ({error})"
            ) from None
        name = ml_dtypes.bfloat16
    found: np.dtype[Any] = np.dtype(name)
    return found


def torch_dtype(dtype: np.dtype[Any], about: object = "torch") -> Any:
    """torch dtype of the tensors that an operator of a dtype takes.

    Raises:
        DTypeError: there is none; the message opens with `about`.
    """
    if dtype.name not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise DTypeError(f"{about}: its dtype is {dtype}; tensors of linop.autograd are {known}")
    return _DTYPES[dtype.name]


def summed_dtype(dtype: Any) -> Any:
    """torch dtype in which sums over workers of tensors of a dtype are taken: float32 of float16
    and bfloat16, of which a sum of many terms would lose the small ones."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def is_of(x: Any, dtype: Any) -> bool:
    """True if `x` is a tensor of a torch dtype."""
    return isinstance(x, torch.Tensor) and x.dtype is dtype
