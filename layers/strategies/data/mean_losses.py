"""A hint, once, where a loss is a mean over one worker's rows and gradients are sums over the
workers: they are then as many times those of torch's DistributedDataParallel as there are workers.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from linop.errors import ArgumentError

_MEAN = 1
"""torch's number for ``reduction="mean"``."""
_THROUGH = ("Add", "Alias", "Clone", "Reshape", "Squeeze", "Sum", "ToCopy", "Unsqueeze", "View")
"""Beginnings of the names of nodes that keep a mean one. A factor or a divisor means that somebody
has thought of it."""
_FAR = 64
"""Nodes that are looked at."""


class MeanLossWarning(UserWarning):
    """Gradients of a mean loss are summed over the workers."""


def reduction_checked(reduction: Any) -> None:
    """Check an argument ``reduction``.

    Raises:
        ArgumentError: it is neither "sum" nor "mean", nor None.
    """
    if reduction not in (None, "sum", "mean"):
        raise ArgumentError(f"reduction: 'sum' or 'mean' expected, given {reduction!r}")


class Hint:
    """The hint of a module, that is given at most once.

    Args:
        name: of what sums its gradients.
        workers: over how many.
        cure: text for the user, of another way than ``reduction="mean"``.
    """

    def __init__(self, name: str, workers: int, cure: str) -> None:
        self._name, self._workers, self._cure = name, workers, cure
        self._given = False
        _watch_backward()

    def expect(self) -> None:
        """Look at the loss of this thread's next backward."""
        if not self._given and torch.is_grad_enabled():
            _LOCAL.hint = weakref.ref(self)

    def look(self, loss: Any) -> None:
        """Warn if a loss is a mean."""
        self._given = True
        if node := next(_means(loss), ""):
            warnings.warn(
                f"{self._name}: the loss is a mean ({node}), and gradients are sums over "
                f"{self._workers} workers: {self._workers} times those of torch's "
                f"DistributedDataParallel. Give reduction='mean' for equal batches; {self._cure}; "
                f"or reduction='sum', where this is meant",
                MeanLossWarning,
                stacklevel=4,  # who calls Tensor.backward
            )

    def __deepcopy__(self, memo: object) -> Hint:
        return Hint(self._name, self._workers, self._cure)


class _Local(threading.local):
    hint: Callable[[], Hint | None] | None = None


_LOCAL = _Local()


@cache
def _watch_backward() -> None:
    """Have the loss of the next backward looked at: torch has no hook that sees it."""
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *arguments: Any, **options: Any) -> Any:
        if _LOCAL.hint is not None:
            known, _LOCAL.hint = _LOCAL.hint(), None
            if known is not None and grad_tensors is None and isinstance(tensors, torch.Tensor):
                known.look(tensors)
        return original(tensors, grad_tensors, *arguments, **options)

    torch.autograd.backward = backward


def _means(loss: Tensor) -> Iterator[str]:
    """Names of the nodes that make a loss a mean."""
    nodes, seen = [loss.grad_fn], 0
    while nodes and seen < _FAR:
        node, seen = nodes.pop(), seen + 1
        if node is None:
            continue
        name = node.name()
        if name.startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == _MEAN:
            yield name
        elif name.startswith(_THROUGH):
            nodes += [after for after, _ in node.next_functions]
