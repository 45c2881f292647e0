"""The inverse of a positive definite operator as a polynomial of it."""

from __future__ import annotations

import math

import numpy as np

from linop.errors import ArgumentError
from linop.operators.expressions import Identity
from linop.operators.operator import LinearOperator


def chebyshev_inverse(G: LinearOperator, least: float, largest: float) -> LinearOperator:
    """p(G), for the polynomial p of least degree with |1 - t p(t)| <= eps of the dtype on the
    interval: the steps of Chebyshev's iteration for G x = b from x = 0 (Saad, Iterative Methods for
    Sparse Linear Systems, 2003, algorithm 12.1).

    Args:
        G: Hermitian.
        least, largest: bounds of its eigenvalues.

    Raises:
        ArgumentError: they are not positive, finite and in order.
    """
    if not 0 < least <= largest < math.inf:
        raise ArgumentError(
            f"inner_product: spectrum: 0 < least <= largest expected, given {least}, {largest}"
        )
    middle, half = (largest + least) / 2, (largest - least) / 2
    identity = Identity(G.domain)
    x: LinearOperator = identity * (1 / middle)
    if not half:
        return x
    sigma = middle / half
    rho = 1 / sigma
    change = x
    for _ in range(_steps(sigma, float(np.finfo(G.dtype).eps))):
        old, rho = rho, 1 / (2 * sigma - rho)
        change = (rho * old) * change + (2 * rho / half) * (identity - G @ x)
        x = x + change
    return x


def _steps(sigma: float, eps: float) -> int:
    """The number of steps after which 1 / T_n(sigma) <= eps."""
    return math.ceil(math.acosh(1 / eps) / math.acosh(sigma))
