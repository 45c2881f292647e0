"""A hint, once, where a loss is a mean over one worker's rows and gradients are sums over the
workers: they are then as many times those of torch's DistributedDataParallel as there are workers.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from linop.errors import ArgumentError

_MEAN = 1
"""torch's number for ``reduction="mean"``."""
_THROUGH = ("Add", "Alias", "Clone", "Reshape", "Squeeze", "ToCopy", "Unsqueeze", "View")
"""Beginnings of the names of nodes that keep a mean one. A factor or a divisor means that somebody
has thought of it; a sum of means is one over something else than the rows."""
_MARK = "linop.strategies: hint"
"""Key of what nodes of a module's output know."""
_FAR = 64
"""Nodes that are looked at for a mean."""
_REACH = 4096
"""Nodes between a loss and the output that it is of, at most."""


class MeanLossWarning(UserWarning):
    """Gradients of a mean loss are summed over the workers."""


def reduction_checked(reduction: Any) -> None:
    """Check an argument ``reduction``.

    Raises:
        ArgumentError: it is neither "sum" nor "mean", nor None.
    """
    if reduction not in (None, "sum", "mean"):
        raise ArgumentError(f"reduction: 'sum' or 'mean' expected, given {reduction!r}")


def mean_checked(reduction: Any, experts: Collection[str]) -> None:
    """Check that gradients can be means over the workers.

    Args:
        experts: names of parameters or modules whose gradients are sums over the rows of all
            workers already.

    Raises:
        ArgumentError: reduction is "mean", and there are such.
    """
    if reduction == "mean" and experts:
        raise ArgumentError(
            f"reduction='mean', and the gradients of experts ({min(experts)!r}) are sums "
            f"over the rows of all workers, which nobody divides; 'sum' expected, and a loss that "
            f"is a term of the whole one: loss * net.share(len(rows)) of DataParallel, or loss * "
            f"len(rows) / (rows of all workers)"
        )


class Hint:
    """The hint of a module, that is given at most once.

    Args:
        name: of what sums its gradients.
        workers: over how many.
        cure: text for the user, of another way than ``reduction="mean"``.
        experts: True: the module has some, and ``reduction="mean"`` is none of the ways.
    """

    def __init__(self, name: str, workers: int, cure: str, experts: bool = False) -> None:
        self._name, self._workers, self._cure, self._experts = name, workers, cure, experts
        self._given = False
        _watch_backward()

    def expect(self, result: Any) -> None:
        """Look at the loss of this thread's next backward, if it is of a result.

        Args:
            result: of the module's forward.
        """
        if self._given or not torch.is_grad_enabled():
            return
        # torch keeps this with the node, and Python has no weak references to nodes.
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        nodes: list[Any] = [x.grad_fn for x in tensors if x.grad_fn is not None]
        for node in nodes:
            node.metadata[_MARK] = id(self)
        if nodes:
            _LOCAL.hints[id(self)] = weakref.ref(self)

    def look(self, loss: Any) -> None:
        """Warn if a loss of the module's is a mean."""
        of_module = _leads_to(loss, id(self))
        if of_module is False:
            return
        self._given = True
        if of_module and (node := next(_means(loss), "")):
            equal = "" if self._experts else "reduction='mean' for equal batches; "
            warnings.warn(
                f"{self._name}: the loss is a mean ({node}), and gradients are sums over "
                f"{self._workers} workers: {self._workers} times those of torch's "
                f"DistributedDataParallel. Give {equal}{self._cure}; "
                f"or reduction='sum', where this is meant",
                MeanLossWarning,
                stacklevel=4,  # who calls Tensor.backward
            )

    def __deepcopy__(self, memo: object) -> Hint:
        return Hint(self._name, self._workers, self._cure, self._experts)


class _Local(threading.local):
    def __init__(self) -> None:
        self.hints: dict[int, Callable[[], Hint | None]] = {}
        """Of forwards since the last backward."""


_LOCAL = _Local()


@cache
def _watch_backward() -> None:
    """Have the loss of the next backward looked at: torch has no hook that sees it."""
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *arguments: Any, **options: Any) -> Any:
        while _LOCAL.hints:
            known = _LOCAL.hints.popitem()[1]()
            if known is not None and grad_tensors is None and isinstance(tensors, torch.Tensor):
                known.look(tensors)
        return original(tensors, grad_tensors, *arguments, **options)

    torch.autograd.backward = backward


def _leads_to(loss: Tensor, mark: int) -> bool | None:
    """True if a loss is of marked nodes; None if it has too many nodes to tell."""
    nodes: deque[Any] = deque([loss.grad_fn])
    known: set[Any] = set()
    while nodes:
        node = nodes.popleft()
        if node is None or node in known:
            continue
        if node.metadata.get(_MARK) == mark:
            return True
        if len(known) == _REACH:
            return None
        known.add(node)
        nodes += [after for after, _ in node.next_functions]
    return False


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
