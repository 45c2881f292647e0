"""Conversion of torch functions to a `Pair`, whose adjoint is the backward pass, for checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from linop.errors import ArgumentError, MissingExtraError
from linop.spaces.region import Region, naturals
from linop.spaces.scalars import Array
from linop.spaces.space import Space
from linop.testing.tested_maps.pairs import Pair


def torch_function(
    function: Callable[[Any], Any],
    shape: int | Sequence[int],
    dtype: npt.DTypeLike = np.float64,
    *,
    name: str | None = None,
) -> Pair:
    """A linear function of one torch tensor as a pair for all checks. Its adjoint is its backward
    pass at a random point, in torch's convention for complex gradients.

    Args:
        function: maps one CPU tensor to one tensor; or a `torch.autograd.Function`. On several
            workers it may communicate: all workers call it at the same time, each with its own
            tensor. It is called once here, to find the result's shape.
        shape, dtype: of the tensor that this worker holds; a NumPy dtype, or its name.
        name: in reports.

    Raises:
        MissingExtraError: torch is not installed. ArgumentError: the result is no tensor.

    Example:
        A backward by hand that forgets the factor of its forward:

        >>> class Twice(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return 2 * x
        ...
        ...     @staticmethod
        ...     def backward(ctx, gradient):
        ...         return gradient
        >>> bool(linop.testing.check_adjoint(linop.testing.torch_function(lambda x: 2 * x, 3)))
        True
        >>> linop.testing.check_adjoint(linop.testing.torch_function(Twice, 3)).details
        'from x[...] (worker 0) to y[...] (worker 0): F has 2, ... adjoint has 1'
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
    """A copy of a tensor as a NumPy array."""
    array: Array = tensor.detach().resolve_conj().resolve_neg().numpy().copy()
    return array
