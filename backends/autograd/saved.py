"""Tensors that hooks of autograd keep for backward.

A hook that returns the tensor itself keeps it with its graph, and so, if it is the result of the
node that saves it, for ever, where no backward follows. And hooks hide from autograd that a tensor
was changed in place after it was saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Saved:
    """A tensor that backward needs.

    Args:
        tensor: the tensor; its changes from now on are errors.
        where: for the error, such as "a module under fully_shard".
    """

    __slots__ = ("__weakref__", "tensor", "version", "where")

    def __init__(self, tensor: Tensor, where: str) -> None:
        self.where = where
        self.put(tensor)

    def put(self, tensor: Tensor) -> None:
        """Keep a tensor without its graph."""
        self.tensor = tensor.detach()  # it has the tensor's version
        self.version = self.current()

    def current(self) -> Any:
        """The version now: it grows with each change in place."""
        return version(self.tensor)

    def taken(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed after it was saved, as autograd's own.
        """
        if self.current() != self.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {tuple(self.tensor.shape)}, saved in "
                f"{self.where}; run backward before it is changed, or change a copy"
            )
        return self.tensor


def version(tensor: Tensor) -> int:
    """The number of changes in place; 0 of tensors whose changes torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


def saved(tensor: Tensor, where: str) -> Any:
    """A tensor as a hook keeps it; one of a class of its own as it is. `taken` gives the tensor."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        return tensor
    return Saved(tensor, where)


def taken(kept: Any) -> Tensor:
    """The tensor that a hook has kept."""
    return kept.taken() if isinstance(kept, Saved) else kept
