"""Layouts of all tensors of a call, from function to function, so that modules whose layouts do
not fit together are found, parameters whose gradients would be those of one worker's part, and
functions of a split tensor that would see this worker's part alone.

Each torch function that is given a tensor that is split has a rule by its meaning, which gives its
result a layout (`linop.strategies.tensor.following.rules`); one without a rule is refused. Random
numbers are drawn by layout (`linop.strategies.tensor.drawing`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from linop.errors import PartitionError
from linop.layers.agreement.naming import path_of
from linop.layers.layer import Layer
from linop.spaces.decomposition import COPIES, REPLICATED
from linop.strategies.tensor.caches import tensors_of
from linop.strategies.tensor.drawing.functions import (
    drawn,
    draws,
    is_random,
    layout_of_draw,
    may_draw,
)
from linop.strategies.tensor.drawing.streams import Stream
from linop.strategies.tensor.following.constants import Constants
from linop.strategies.tensor.following.cuts import Cut, Followed, Refused, in_words, strides
from linop.strategies.tensor.following.function_call import FunctionCall
from linop.strategies.tensor.following.rules import SAFE, SIZE_AWARE, is_elementwise, rule_of
from linop.strategies.tensor.following.sizes import Shape, Told, Varied, plain
from linop.strategies.tensor.layouts import Layout
from linop.strategies.tensor.layouts import in_words as layout_in_words
from linop.strategies.tensor.packed import Packed, layout_of_part

_CURE = (
    ". Give the modules that it comes from output_layouts=linop.REPLICATED, and those that it goes "
    "to input_layouts=linop.REPLICATED, so that each worker computes with the whole; or split "
    "another dimension"
)


class _Unseen(TorchDispatchMode):
    """Mode that sees what torch computes outside of the functions that `Types` is given: in scripts
    of `torch.jit`, in `torch.vmap` and `torch.func`."""

    def __init__(self, types: Types) -> None:
        super().__init__()
        self._types = types

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._types.check_seen(str(func), (args, kwargs))
        return func(*args, **kwargs)


class Types(TorchFunctionMode):
    """Mode that follows layouts.

    Args:
        workers: of the axis.
        index: of this worker.
        stream: the random numbers of the call.

    Raises:
        PartitionError: layouts do not fit together, or a function is not computed block by block.
    """

    def __init__(self, workers: int, index: int, stream: Stream) -> None:
        super().__init__()
        self._layouts: Any = WeakTensorKeyDictionary()
        self._workers, self._index, self._stream = workers, index, stream
        self._constants = Constants()
        self._off = 0
        self._splits = False
        """In a function that is known to be given a split tensor."""
        self._cut: list[tuple[Any, str]] = []
        """Layers and names of their parameters in blocks, of which shards have other tensors inside
        of forwards."""

    def mark(self, tensor: Any, layout: Followed) -> None:
        """Set the layout of a tensor; None: some workers hold it only."""
        if isinstance(tensor, torch.Tensor):
            self._layouts[tensor] = layout

    def left(self) -> Any:
        """Layouts of split tensors that are still there, for other calls that are given them."""
        found = WeakTensorKeyDictionary()
        for x, layout in self._layouts.items():
            if isinstance(layout, Cut):
                found[x] = layout
        return found

    def is_left_in(self, leaves: Iterable[Any]) -> bool:
        """True if one of these is a split tensor, or an object that has some."""
        each = ((x,) if isinstance(x, torch.Tensor) else tensors_of(x) for x in leaves)
        return any(isinstance(self._layouts.get(x), Cut) for some in each for x in some)

    def cut(self, dim: int, ndim: int, sizes: Sequence[int], whole: int | None = None) -> Cut:
        """The layout of a tensor that is split.

        Args:
            dim: the dimension, from 0 or from the last.
            sizes: lengths of the blocks of all workers.
            whole: length of the whole dimension.
        """
        return Cut(dim % ndim, tuple(sizes), sum(sizes) if whole is None else whole, self._index)

    def mark_parameters(self, net: Any) -> None:
        """Set the layouts of a net's parameters, of which functions may use any: those of plain
        modules are whole."""
        for module in net.modules():
            layout_of = getattr(module, "parameter_layout", None)
            if layout_of is None and isinstance(module, Layer):
                continue  # with operators of its own
            for name, p in module.named_parameters(recurse=False):
                if layout_of is None:
                    self.mark(p, REPLICATED)
                else:
                    self._cut.append((module, name))
                    self._mark_block(module, name, p)

    def _mark_block(self, layer: Any, name: str, p: Any) -> bool:
        """Set the layout of a parameter that is a block; False for a shard, some rows of one."""
        if getattr(p, "_linop_strategy", "") == "shard":
            return False
        layout = layer.parameter_layout(name)
        if isinstance(layout, int):
            bounds = layer.spaces[name].bounds[layout]
            layout = self.cut(layout, p.ndim, [b - a for a, b in bounds])
        self.mark(p, layout)
        return True

    def _knows(self, x: Any) -> bool:
        """True for a tensor with a layout; it is looked for where layers have their parameters, of
        which `fully_shard` puts whole ones there while a module computes."""
        if x in self._layouts:
            return True
        for layer, name in self._cut:
            if layer._parameters.get(name) is x:
                return self._mark_block(layer, name, x)
        return False

    def check(self, wanted: Sequence[Layout], tensors: Sequence[Any]) -> None:
        """Check a module's inputs.

        Raises:
            PartitionError: one has another layout.
        """
        for layout, x in zip(wanted, tensors, strict=False):
            if not isinstance(x, torch.Tensor) or not self._knows(x):
                continue
            found = self._layouts[x]
            if isinstance(found, Cut):
                want = layout % x.ndim if isinstance(layout, int) else None
                if found.dim == want and not found.is_shared:
                    continue
            elif found is layout:
                continue
            elif found is REPLICATED and not x.requires_grad and not isinstance(layout, int):
                continue
            raise PartitionError(
                f"an input {layout_in_words(layout)} expected; this one is "
                f"{in_words(found, x.ndim)}. Give input_layouts=, or the output_layouts= of the "
                f"module that it comes from; of a norm, sequence_dim="
            )

    def following(self) -> ExitStack:
        """The context of a call, which is entered."""
        stack = ExitStack()
        for context in (self._stream, Told(), _Unseen(self), self):
            stack.enter_context(context)
        return stack

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Context in which functions are not followed."""
        self._off += 1
        try:
            yield
        finally:
            self._off -= 1

    def check_seen(self, name: str, given: Any) -> None:
        """Check a function that torch computes.

        Raises:
            PartitionError: it is of a split tensor, and torch was not given that.
        """
        if self._off or self._splits:
            return
        for x in tree_leaves(given):
            if isinstance(x, torch.Tensor) and self._layouts.get(x, REPLICATED) is not REPLICATED:
                if _moves_blocks():
                    return
                raise PartitionError(
                    f"{_here()}{name} of a tensor that is {in_words(self._layouts[x], x.ndim)}, "
                    f"inside of a script of torch.jit, torch.vmap or torch.func, where functions "
                    f"are not followed{_CURE}"
                )

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        before = self._splits
        try:
            if self._off or _moves_blocks():
                self._splits = True
                return func(*args, **kwargs)
            return self._followed(func, args, kwargs)
        finally:
            self._splits = before

    def _followed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = _name_of(func)
        workers, constant = (self._workers, self._index), self._constants.along
        call = FunctionCall(name, func, args, kwargs, self._layout, *workers, constant)
        self._splits = any(self._layout(x) is not REPLICATED for x in call.tensors)
        if name in SAFE:
            return self._answered(call)
        if any(isinstance(x, Packed) for x in call.tensors):
            return self._of_parts(call)
        random = is_random(name) and draws(call)
        if is_random(name) and may_draw(call):
            self._stream.is_used = True
        layout = self._of_result(call, random)
        result = drawn(call, layout, self._stream) if random else call.result
        for x in tree_leaves(result) if call.known else ():
            self.mark(x, layout)
        if layout is REPLICATED and not random:
            self._constants.follow(call, is_elementwise(name))
        return result

    def _of_parts(self, call: FunctionCall) -> Any:
        """The result of a function of a projection of several parts, which knows the layout of what
        it gives."""
        try:
            result = call.result
        except PartitionError as error:
            raise PartitionError(f"{_here()}{error}") from None
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.mark(x, layout_of_part(x))
        return result

    def _layout(self, x: Any) -> Followed:
        return self._layouts[x] if self._knows(x) else REPLICATED

    def _answered(self, call: FunctionCall) -> Any:
        """The answer to a question about a tensor: lengths carry those of all workers."""
        result = call.result
        if not call.cuts or call.name not in _LENGTHS:
            return result
        x, cut = call.cuts[0]
        if call.name == "storage_offset":
            if result:
                raise PartitionError(
                    f"{_here()}storage_offset of a view of a tensor that is split{_CURE}"
                )
            return result
        if call.name == "stride":
            every = strides(x, cut)
            dim = call.given(1, "dim")
            return every if dim is None else every[dim]
        shape = Shape([*x.shape[: cut.dim], cut.length, *x.shape[cut.dim + 1 :]])
        if call.name in ("numel", "nelement", "nbytes"):
            return shape.numel() * (x.itemsize if call.name == "nbytes" else 1)
        return shape[call.given(1, "dim")] if isinstance(result, int) else shape

    def _of_result(self, call: FunctionCall, random: bool) -> Followed:
        """The layout of a function's result.

        Raises:
            PartitionError: it would be another one than that of the sequential program.
        """
        found = [(x, self._layouts[x]) for x in call.tensors if self._knows(x)]
        varied = [(x, layout) for x, layout in found if layout is not REPLICATED]
        call.known = bool(found)
        if varied:
            self._check_gradients(call, found, varied)
        if any(layout is None for _, layout in varied):
            raise PartitionError(
                f"{_here()}{call.name} of a tensor that is different on each worker{_CURE}"
            )
        numbers = next(call.varied_numbers(), None)
        if not call.cuts and numbers is None:
            return COPIES if varied else REPLICATED
        call.known = True
        try:
            return self._by_rule(call, numbers, random)
        except Refused as refusal:
            raise PartitionError(_sentence(call, str(refusal))) from None

    def _by_rule(self, call: FunctionCall, number: Varied | None, random: bool) -> Followed:
        name = call.name if call.name.startswith("__") else call.name.rstrip("_")
        if number is not None and name not in SIZE_AWARE:
            raise Refused(
                f"of the number {plain(number)}, which is {number.whole} in the sequential "
                f"program: it comes from the length of a dimension that is split"
            )
        rule = layout_of_draw if random else rule_of(call.name)
        if rule is None:
            raise Refused("is not known to compute block by block")
        layout = rule(call)
        if isinstance(layout, Cut) and not random:
            self._check_result(call, layout)
        return REPLICATED if layout is None else layout

    def _check_result(self, call: FunctionCall, cut: Cut) -> None:
        """Check the layout that a rule gives beside the result's shape."""
        for x in tree_leaves(call.result):
            if isinstance(x, torch.Tensor) and (
                x.ndim <= cut.dim or x.shape[cut.dim] != cut.sizes[cut.index]
            ):
                raise Refused(
                    f"with a result of shape {tuple(x.shape)}, of which dimension {cut.dim} was to "
                    f"be split into {cut.sizes}"
                )

    def _check_gradients(
        self, call: FunctionCall, found: Sequence[Any], varied: Sequence[Any]
    ) -> None:
        """Check that no gradient of a whole tensor would be this worker's part of it."""
        # What needs no gradient may be the same on all workers beside any other.
        # Nobody reads the gradient of a constant that the call itself made.
        found = [(x, layout) for x, layout in found if x not in self._constants]
        whole = [x for x, layout in found if layout is REPLICATED and x.requires_grad]
        owned: list[Tensor] = [x for x in whole if isinstance(x, torch.nn.Parameter)]
        owned += [
            x
            for x in call.tensors
            if x.requires_grad and x not in self._layouts and x not in self._constants
        ]
        words = in_words(varied[0][1], varied[0][0].ndim)
        if owned:
            raise PartitionError(
                f"{_here()}{call.name} of a parameter of shape {tuple(owned[0].shape)} and a "
                f"tensor that is {words}: its gradient would be of this worker's part alone. Name "
                f"the module in the plan, as SequenceParallel() for a norm on a split sequence, or "
                f"SequenceParallel(None) for one on heads"
            )
        if whole:
            raise PartitionError(
                f"{_here()}{call.name} of tensors that are {in_words(REPLICATED, 0)} and {words}; "
                f"one layout expected. Give output_layouts= of the modules that they come from, or "
                f"PrepareModuleInput"
            )


_LENGTHS = ("shape", "size", "numel", "nelement", "nbytes", "stride", "storage_offset")
"""Questions whose answer the length of a block is in."""


def _sentence(call: FunctionCall, reason: str) -> str:
    """A refusal: the function, the tensor and its dimension, the reason, the cure."""
    if not call.cuts:
        return f"{_here()}{call.name} {reason}{_CURE}"
    x, cut = call.cuts[0]
    of = f"a tensor of shape {tuple(x.shape)} that is {in_words(cut, x.ndim)}"
    return f"{_here()}{call.name} {reason} (of {of}){_CURE}"


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", name)
        return attribute if name == "__get__" else f"{name} of {attribute}"
    return str(name)


def _moves_blocks() -> bool:
    """True for a function that linop calls to move blocks, as of sharded parameters."""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and not name.startswith(_PASSED):
            return str(name).startswith(_MOVING)
        frame = frame.f_back
    return False


_MOVING = ("linop.backends.", "linop.layers.parameters.", "linop.strategies.data.")
"""Modules that move blocks."""
_PASSED = ("torch.", "linop.layers.parameters.torch_guards", "linop.strategies.data.mean_losses")
"""Modules of functions that users call, and of those that linop puts around some of them."""


def _here() -> str:
    """The module on the call stack, for errors."""
    frame = inspect.currentframe()
    while frame is not None:
        self = frame.f_locals.get("self")
        if isinstance(self, torch.nn.Module):
            return f"{path_of(self, frame)}: "
        frame = frame.f_back
    return ""
