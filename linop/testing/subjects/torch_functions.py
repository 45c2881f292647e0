"""A function of a tensor as a pair for checks: the function, and torch's backward of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from linop.errors import ArgumentError, MissingExtraError
from linop.spaces.region import Region, naturals
from linop.spaces.scalars import Array
from linop.spaces.space import Space
from linop.testing.subjects.pairs import Pair


def torch_function(
    function: Callable[[Any], Any],
    shape: int | Sequence[int],
    dtype: npt.DTypeLike = np.float64,
    *,
    name: str | None = None,
) -> Pair:
    """A linear function of one tensor, for all checks: its adjoint is its backward, by torch's
    convention for complex numbers, at a random point.

    Args:
        function: of one tensor on the CPU, giving one; or a `torch.autograd.Function`. Where
            workers are several it may communicate: every worker calls it with its own tensor.
        shape, dtype: of the tensor that this worker holds; a dtype of NumPy's, or its name.
        name: in reports.

    Raises:
        MissingExtraError: torch is not installed. ArgumentError: it gives no tensor.
    """
    try:
        import torch
    except ImportError:
        raise MissingExtraError(
            "linop.testing.torch_function needs torch: pip install 'linop-algebra[torch]'"
        ) from None
    apply = function.apply if hasattr(function, "apply") else function
    held, kind = naturals(shape, "shape of a tensor"), np.dtype(dtype)
    point = Space(Region("x", held), kind).random(0)["x"]

    def forward(x: Array) -> Array:
        with torch.no_grad():
            return _array(apply(torch.from_numpy(x)))

    def backward(y: Array) -> Array:
        with torch.enable_grad():
            x = torch.from_numpy(point.copy()).requires_grad_()
            given = apply(x)
            (gradient,) = torch.autograd.grad(
                given, x, torch.from_numpy(y), allow_unused=True, materialize_grads=True
            )
        return _array(gradient)

    called = name or str(getattr(function, "__name__", type(function).__name__))
    result = apply(torch.from_numpy(point.copy()))
    if not isinstance(result, torch.Tensor):
        raise ArgumentError(f"{called} gives {type(result).__name__}, one tensor expected")
    sample = _array(result)
    dtypes = kind, sample.dtype
    return Pair(forward, backward, held, sample.shape, dtypes, called, memory="host")


def _array(tensor: Any) -> Array:
    """A copy of a tensor."""
    array: Array = tensor.detach().resolve_conj().resolve_neg().numpy().copy()
    return array
