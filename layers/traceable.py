"""Calls of layers inside of what torch.compile and torch.export trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from linop.backends.autograd.functions import new_anchor, new_key, records


class Traceable(torch.nn.Module):
    """Base class of layers whose calls torch's tracers record: local torch between plans.

    What workers agree on is agreed while torch traces, for the shapes of that trace; the compiled
    call compares nothing. It has the attributes of that trace, too: the compiler looks at the key
    alone, and does not trace again when others than parameters and buffers are set.

    Attributes:
        key: a word by which compiled code tells layers apart.
        anchor: a leaf of no elements, an input of compiled code.
    """

    traceable = False
    """True of layers that torch.compile records; it leaves others as they are, such as those that
    draw random numbers, read values of tensors, or write to buffers."""
    inputs: Sequence[Any]

    def __init__(self) -> None:
        super().__init__()
        self.key, self.anchor = new_key(), new_anchor()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.key = new_key()  # a copy is another layer

    def compiled(self, *tensors: Tensor | None) -> Tensor:
        """A call in code that torch compiles: recorded, or a graph break."""
        if self.traceable and records():
            # torch executes an import while it traces. Before, its compiler would be imported.
            from linop.backends.autograd.traced import followed

            return followed(self, self.key, self.anchor, *tensors)  # type: ignore[no-any-return]
        return _uncompiled(self, tensors)

    def traced(self, *tensors: Tensor | None) -> Tensor:
        """`forward` by torch's tracers, of tensors without values. Collective for new arguments:
        the compiled call is not compared with those of other workers."""
        from linop.backends.autograd.traced import anchored, stand_in, untraced

        given = [*map(stand_in, tensors), *[None] * (len(self.inputs) - len(tensors))]
        tensors = (*tensors, *given[len(tensors) :])
        function, wanted = untraced(self._function_of_compiled, given)
        self.__dict__["_wanted"] = wanted
        with anchored(self.anchor):
            result: Tensor = function(*tensors)
        return result

    def _function_of_compiled(self, tensors: Sequence[Tensor | None]) -> Any:
        """The function that workers agree on; without asking the others for arguments that were
        passed before, since threads wait for each other's compilers."""
        known: Any = self.__dict__["_settled"].get(self._metadata(tensors))
        return self._function(tensors) if known is None else known.bound

    def _metadata(self, tensors: Sequence[Tensor | None]) -> Any:
        raise NotImplementedError

    def _function(self, tensors: Sequence[Tensor | None]) -> Any:
        raise NotImplementedError


@_disable_dynamo
def _uncompiled(layer: Traceable, tensors: Sequence[Tensor | None]) -> Tensor:
    """A graph break, because plans are not torch code."""
    result: Tensor = layer(*tensors)
    return result
