"""Agreement of the workers of an axis on the call of a parallelised net: one all-reduce of a number
for all of its modules."""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import tree_leaves

from linop.backends import Backend
from linop.layers.agreement.input_agreement import Cache, agreement_of
from linop.layers.agreement.metadata import CallMetadata, call_metadata
from linop.strategies.tensor.layouts import Layout
from linop.strategies.tensor.types import Types

_CACHE_SIZE = 4096
"""Calls that are known to be the same on all workers."""


class Calls:
    """The calls of a net, as its hooks see them.

    Attributes:
        total: the digest of the last call, of all workers.
        running: inside a call.
        types: while a call is new, the layouts of its tensors.

    Args:
        backend: the axis's.
        inputs: layout of the net's inputs.
    """

    def __init__(self, net: Any, backend: Backend, inputs: Layout) -> None:
        self.total: int | None = None
        self.running = False
        self.types: Types | None = None
        self._inputs = inputs
        self._agreement = agreement_of(backend)
        self._number = self._agreement.new_number()
        self._settled = Cache[int](_CACHE_SIZE)
        self._seen = Cache[bool](_CACHE_SIZE)
        # Before conversions of the net's own input, and after those of its output.
        net.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        net.register_forward_hook(self._after, with_kwargs=True, always_call=True)

    def _before(self, net: Any, args: Any, kwargs: Any) -> None:
        tensors = tree_leaves((args, kwargs))
        given = call_metadata(tensors, net.training, ())
        self.total = self._total(given)
        self.running = True
        if self.total not in self._seen:
            self.types = Types()
            self.types.mark_parameters(net)
            for x in tensors:
                self.types.mark(x, self._inputs)
            self.types.__enter__()

    def _total(self, given: CallMetadata) -> int:
        if self._agreement.shapes_are_fixed and given in self._settled:
            return self._settled[given]
        return self._settled.keep(given, self._agreement.total(self._number, given))

    def _after(self, net: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.running = False
        if self.types is not None:
            self.types.__exit__(None, None, None)
            self.types = None
            if result is not None and self.total is not None:
                self._seen.keep(self.total, True)
