"""Stencils on distributed tensors, composed of data movement and of a local operator."""

from linop.stencils.laplacian import laplacian
from linop.stencils.stencil import stencil

__all__ = ["laplacian", "stencil"]
