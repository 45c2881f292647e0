"""Calls of layers inside of what torch.compile and torch.export trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linop.backends.autograd.functions import hindrance, new_anchor, new_key
from linop.backends.autograd.real_calls import LOCAL, broken, really, tracing
from linop.errors import BackendError, LinopError, name_layer
from linop.layers.agreement.naming import path_of


class Traceable(torch.nn.Module):
    """Base class of layers whose calls torch's tracers record: local torch between plans.

    What workers agree on is agreed while torch traces, for the shapes of that trace; the compiled
    call compares values alone, where `checks_values` says so. It has the attributes of that trace,
    too: the compiler looks at the key and at `training` alone, and does not trace again when others
    than parameters and buffers are set.

    Attributes:
        key: a word by which compiled code tells layers apart.
        anchor: a leaf of no elements, an input of compiled code.
    """

    untraceable = ""
    """Reason why torch's tracers do not record a layer, after its name; empty if they do."""
    checks_values = False
    """True if workers compare values of inputs at each call, by `Layer.invalid_values`."""
    inputs: Sequence[Any]

    def __init__(self) -> None:
        super().__init__()
        self.key, self.anchor = new_key(), new_anchor()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.key = new_key()  # a copy is another layer

    def compiled(self, *tensors: Any) -> Any:
        """A call in code that torch compiles: recorded, or a graph break."""
        why = hindrance() or self.untraceable
        # torch executes an import while it traces. Before, its compiler would be imported.
        if not why:
            from linop.backends.autograd.traced import followed

            # A question, so that the compiler checks the answer before later calls.
            key = self.key if self.training else self.key + " evaluated"
            return followed(self, key, self.anchor, *tensors)
        words = f"linop: {type(self).__name__} is not part of graphs: {why}"
        return broken(words, self.called_by_code, *tensors)

    def recorded(self, *arguments: Any) -> Any:
        """Run by torch's compiler to record a call, with the arguments of `compiled`."""
        return self.traced(*arguments)

    def called_by_code(self, *arguments: Any) -> Any:
        """A call that is not recorded, with the arguments of `compiled`. Hooks have been called."""
        return self.forward(*arguments)

    def traced(self, *tensors: Tensor | None) -> Tensor:
        """`forward` by torch's tracers, of tensors without values. Collective for new arguments:
        the compiled call is not compared with those of other workers."""
        # Shapes alone are found on threads, too.
        why = self.untraceable or (torch.compiler.is_compiling() and hindrance())
        if why:
            raise BackendError(f"{self._name} is not part of graphs: {why}")
        from linop.backends.autograd.traced import stand_in, untraced

        # An exported program may be called with tensors that require gradients.
        wanted = LOCAL.anchor is None and torch.is_grad_enabled()
        given: list[Any] = [stand_in(x, wanted) for x in tensors]
        more = [None] * (len(self.inputs) - len(tensors))
        function, self.__dict__["_wanted"] = untraced(self._function_of_compiled, [*given, *more])
        with tracing():
            if self.checks_values:
                there = [x for x in tensors if x is not None]
                really(self, self._compare_values, [((0,), torch.uint8)], *there)
            result: Tensor = function(*tensors, *more)
        return result

    def _compare_values(self, *tensors: Tensor) -> Sequence[Tensor]:
        """The agreement of an eager call, for its errors. Collective."""
        more = [None] * (len(self.inputs) - len(tensors))
        try:
            self._function([*tensors, *more])
        except LinopError as error:
            name_layer(error, path_of(self), self._name)
            raise
        return [torch.empty(0, dtype=torch.uint8)]

    def _function_of_compiled(self, tensors: Sequence[Tensor | None]) -> Any:
        """The function that workers agree on; without asking the others for arguments that were
        passed before, since threads wait for each other's compilers."""
        known: Any = self.__dict__["_settled"].get(self._metadata(tensors))
        return self._function(tensors) if known is None else known.bound

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _metadata(self, tensors: Sequence[Tensor | None]) -> Any:
        raise NotImplementedError

    def _function(self, tensors: Sequence[Tensor | None]) -> Any:
        raise NotImplementedError
