"""Layouts of all tensors of a net's first call, from function to function, so that modules whose
layouts do not fit together are found, and parameters whose gradients would be those of one worker's
part.

Each torch function gives its result a layout. Of a tensor that is split, a function that is not
elementwise makes one whose layout is not known, but which differs between workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from linop.errors import PartitionError
from linop.layers.agreement.naming import path_of
from linop.layers.layer import Layer
from linop.spaces.decomposition import REPLICATED
from linop.strategies.tensor.layouts import Layout, in_words

_ELEMENTWISE = frozenset(
    "abs add addcmul bfloat16 celu clamp clone contiguous cos detach div double dropout elu erf exp"
    " float floor_divide gelu half hardsigmoid hardswish hardtanh leaky_relu log log1p logsigmoid"
    " masked_fill maximum minimum mish mul neg pow reciprocal relu relu6 requires_grad_ round rsqrt"
    " rsub selu sigmoid sign silu sin softplus softsign sqrt square sub tanh to true_divide type"
    " type_as where __radd__ __rmul__ __rsub__ __rtruediv__ __rdiv__ __rpow__".split()
)
"""Names of torch's functions and methods, without the underscore of those in place."""


class Types(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
    """Mode that follows layouts.

    Raises:
        PartitionError: layouts do not fit together.
    """

    def __init__(self) -> None:
        super().__init__()
        self._layouts: Any = WeakTensorKeyDictionary()
        self._off = 0

    def mark(self, tensor: Any, layout: Layout | None) -> None:
        """Set the layout of a tensor; None: it differs between workers."""
        if isinstance(tensor, torch.Tensor):
            # Dimensions count from the last, as in broadcasts.
            inside = isinstance(layout, int) and layout >= 0
            self._layouts[tensor] = layout - tensor.ndim if inside else layout

    def mark_parameters(self, net: Any) -> None:
        """Set the layouts of a net's parameters, of which functions may use any: those of plain
        modules are whole."""
        for module in net.modules():
            layout_of = getattr(module, "parameter_layout", None)
            if layout_of is None and isinstance(module, Layer):
                continue  # with operators of its own
            for name, p in module.named_parameters(recurse=False):
                self.mark(p, REPLICATED if layout_of is None else layout_of(name))

    def check(self, wanted: Sequence[Layout], tensors: Sequence[Any]) -> None:
        """Check a module's inputs.

        Raises:
            PartitionError: one has another layout.
        """
        for layout, x in zip(wanted, tensors, strict=False):
            if not isinstance(x, torch.Tensor) or x not in self._layouts:
                continue
            found = self._layouts[x]
            want = layout - x.ndim if isinstance(layout, int) and layout >= 0 else layout
            if found == want or (found is None and want is not REPLICATED):
                continue
            if found is REPLICATED and not x.requires_grad and not isinstance(want, int):
                continue
            raise PartitionError(
                f"an input {in_words(layout)} expected; this one is {in_words(found)}. Give "
                f"input_layouts=, or the output_layouts= of the module that it comes from"
            )

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Context in which functions are not followed."""
        self._off += 1
        try:
            yield
        finally:
            self._off -= 1

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._off:
            return func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        known, layout = self._of_result(getattr(func, "__name__", ""), given)
        result = func(*args, **(kwargs or {}))
        if known:
            for x in tree_leaves(result):
                self.mark(x, layout)
        return result

    def _of_result(self, name: str, given: Sequence[Any]) -> tuple[bool, Layout | None]:
        """The layout of a function's result, if one is known."""
        found = [(x, self._layouts[x]) for x in given if x in self._layouts]
        varied = [layout for _, layout in found if layout is not REPLICATED]
        if not varied:
            return bool(found), REPLICATED
        # What needs no gradient may be the same on all workers beside any other.
        whole = [x for x, layout in found if layout is REPLICATED and x.requires_grad]
        owned = [x for x in whole if isinstance(x, torch.nn.Parameter)]
        owned += [x for x in given if x not in self._layouts and x.requires_grad and x.is_leaf]
        if owned:
            raise PartitionError(
                f"{_here()}{name} of a parameter of shape {tuple(owned[0].shape)} and a tensor "
                f"that is {in_words(varied[0])}: its gradient would be of this worker's part "
                f"alone. Name the module in the plan, as SequenceParallel() for a norm"
            )
        if whole:
            raise PartitionError(
                f"{_here()}{name} of tensors that are {in_words(REPLICATED)} and "
                f"{in_words(varied[0])}; one layout expected. Give output_layouts= of the modules "
                f"that they come from, or PrepareModuleInput"
            )
        if name.rstrip("_") not in _ELEMENTWISE and name not in _ELEMENTWISE:
            return True, None
        different = set(varied) - {None}
        if len(different) > 1:
            raise PartitionError(
                f"{_here()}{name} of tensors that are {' and '.join(map(in_words, varied))}; one "
                f"layout expected"
            )
        return True, None if None in varied else varied[0]


def _here() -> str:
    """The module on the call stack, for errors."""
    import inspect

    frame = inspect.currentframe()
    while frame is not None:
        self = frame.f_locals.get("self")
        if isinstance(self, torch.nn.Module) and frame.f_code is not torch.nn.Module.__call__:
            return f"{path_of(self, frame)}: "
        frame = frame.f_back
    return ""
