"""Functions of graphs of torch's compiler whose steps have shapes that depend on values: the graph
has one node for all of them, and torch's autograd records inside of it, as in eager calls. Backward
goes through what it recorded; so nothing is computed or sent twice, and no derivative is written.

What was recorded is kept by a ticket, a tensor of the graph, and goes with that tensor's memory.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linop.backends.autograd.real_calls import Form, really
from linop.errors import BackendError

Function = Callable[..., Sequence[Tensor]]

_TICKET: Form = (), torch.int64, torch.device("cpu")
_numbers = itertools.count()
_RECORDED: dict[int, tuple[list[Tensor], Sequence[Tensor]]] = {}
"""Arguments and results of functions, with the graphs between them, by the number on the ticket."""


class KeptGraph:
    """A function as a node, for `called`; one object for one function.

    Args:
        function: of tensors; its results are new, and its backward does not need them.
        copied: of its first arguments that have gradients, so many may get other values before
            backward.
        inputs: the number of first arguments that have gradients, with those.
        arguments: of all.
        name: for errors.
    """

    def __init__(
        self, function: Function, copied: int, inputs: int, arguments: int, name: str
    ) -> None:
        self._function, self._copied, self._inputs = function, copied, inputs
        self._arguments, self._name = arguments, name

    def called(self, owner: Any, results: Sequence[Form], *tensors: Tensor) -> Sequence[Tensor]:
        """Its results, while torch traces a graph.

        Args:
            owner, results: as of `really`.
        """
        of_inputs = [(tuple(map(int, x.shape)), x.dtype) for x in tensors[: self._inputs]]
        forms = [*results, _TICKET]
        options: Any = {"derivative": (self.backward, of_inputs), "plainly": self.plainly}
        return really(owner, self.forward, forms, *tensors, **options)[:-1]

    def plainly(self, *tensors: Tensor) -> Sequence[Tensor]:
        """The function in torch's autograd, for tensors with values."""
        return [*self._function(*tensors), torch.zeros((), dtype=torch.int64)]

    def forward(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Results, and the ticket."""
        given = [x.detach() for x in tensors[: self._inputs]]
        # Compilers put others in the memory of what they do not know to be needed.
        given = [x.clone() if k < self._copied else x for k, x in enumerate(given)]
        for x in given:
            x.requires_grad_(x.is_floating_point() or x.is_complex())
        with torch.enable_grad():
            found = self._function(*given, *tensors[self._inputs :])
        number = next(_numbers)
        memory = np.full((), number)
        _RECORDED[number] = given, found
        weakref.finalize(memory, _RECORDED.pop, number, None)
        return [*(x.detach() for x in found), torch.from_numpy(memory)]

    def backward(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Gradients, of the arguments, the results and their gradients, as of `RealCall`."""
        count = (len(tensors) - self._arguments) // 2  # the ticket is the last result
        number = int(tensors[self._arguments + count - 1])
        if number not in _RECORDED:
            raise BackendError(
                f"backward of {self._name} in a compiled graph: what its forward recorded is gone, "
                f"since a copy of the graph's saved tensors came back, as of "
                f"torch.autograd.graph.save_on_cpu; leave these hooks out, or the module uncompiled"
            )
        given, found = _RECORDED[number]
        gradients = tensors[self._arguments + count :]
        pairs = [(y, g) for y, g in zip(found, gradients, strict=False) if y.requires_grad]
        every = [torch.zeros_like(x) for x in given]
        wanted = [k for k, x in enumerate(given) if x.requires_grad]
        if pairs and wanted:
            results, there = zip(*pairs, strict=True)
            options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
            of = [given[k] for k in wanted]
            for k, g in zip(
                wanted, torch.autograd.grad(results, of, there, **options), strict=True
            ):
                every[k] = g
        return every


def autocast_of(x: Tensor) -> Any:
    """The dtype that autocast gives to results of products with a tensor; None if it leaves it as
    it is."""
    device = x.device.type
    eligible = x.is_floating_point() and x.dtype is not torch.float64
    if not (eligible and torch.is_autocast_enabled(device)):
        return None
    return torch.get_autocast_dtype(device)


def in_autocast(x: Tensor, kind: Any) -> Any:
    """Context of autocast as it was where a graph was traced.

    Args:
        kind: the result of `autocast_of` there.
    """
    return torch.autocast(x.device.type, kind, enabled=kind is not None)
