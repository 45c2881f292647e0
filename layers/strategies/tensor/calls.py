"""Agreement of the workers of an axis on the call of a parallelised net: one all-reduce of a number
for all of its modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from linop.backends.autograd.functions import records
from linop.backends.autograd.real_calls import broken
from linop.backends.autograd.recompute import unrecorded
from linop.layers.agreement.input_agreement import Cache, agreement_of
from linop.layers.agreement.metadata import CallMetadata, call_metadata
from linop.layers.layer import Layer
from linop.layers.parameters.generator import drawn_seed
from linop.layers.parameters.weights import process
from linop.strategies.interrupted import end_if_interrupted
from linop.strategies.mesh import Axis
from linop.strategies.tensor.caches import Kept
from linop.strategies.tensor.drawing.in_graphs import UNDRAWING, in_words, refuse, seen
from linop.strategies.tensor.drawing.streams import Stream
from linop.strategies.tensor.layouts import Layout
from linop.strategies.tensor.types import Types

_CACHE_SIZE = 4096
"""Calls that are known to be the same on all workers."""


class _Agreed(NamedTuple):
    """A call of this worker, its digest, and the sum of all workers'."""

    given: CallMetadata
    code: int
    total: int


class Calls:
    """The calls of a net, as its hooks see them.

    Attributes:
        total: the digest of the last call, of all workers.
        running: inside a call.
        types: while a call is new, or draws random numbers, the layouts of its tensors.

    Args:
        axis: the axis.
        inputs: layout of the net's inputs.
    """

    def __init__(self, net: Any, axis: Axis, inputs: Layout) -> None:
        self.total: int | None = None
        self.running = False
        self.types: Types | None = None
        self._axis, self._inputs = axis, inputs
        self._agreement = agreement_of(axis.backend)
        self._number = self._agreement.new_number()
        self._settled = Cache[_Agreed](_CACHE_SIZE)
        self._last: _Agreed | None = None
        self._seen = Cache[bool](_CACHE_SIZE)
        """Calls that were followed, with what their modules had for attributes; True if they draw
        random numbers, and are followed always."""
        self._now: Any = None
        self._lengths = Cache[Any](_CACHE_SIZE)
        self._parallel = [one for one in net.modules() if isinstance(one, Layer)]
        self._plain = [one for one in net.modules() if not isinstance(one, Layer)]
        self._theirs = [
            one for one in self._plain if not type(one).__module__.startswith("torch.nn.")
        ]
        self._kept: Any = WeakTensorKeyDictionary()
        """Layouts of split tensors that are left of calls with objects, as of keys in a cache, or
        that are in their results."""
        self._places = Kept()
        self._keeps, self._leaves = False, list[Any]()
        self._draws_seeds: bool | None = None
        self._entered: Any = None
        # Before conversions of the net's own input, and after those of its output.
        net.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        net.register_forward_hook(self._after, with_kwargs=True, always_call=True)
        end_if_interrupted(net, self._open, self._leave)

    def _open(self, net: Any) -> int:
        del net
        return self.running

    def _leave(self, net: Any) -> None:
        del net
        self._end(None)

    def _before(self, net: Any, args: Any, kwargs: Any) -> None:
        if not (torch.compiler.is_compiling() and records()):
            self._begin(net, args, kwargs)
            return
        # In graphs each layer agrees for itself, and nobody follows layouts, nor draws by them.
        drawing = random_module(self._plain) or random_module(self._parallel)
        if drawing or True in self._seen.values():
            what = drawing or "a function"
            words = in_words(what)
            broken(words, refuse, words)
        seen()
        UNDRAWING.__enter__()

    @_disable_dynamo
    def _begin(self, net: Any, args: Any, kwargs: Any) -> None:
        plain = not kwargs and all(type(one) is torch.Tensor for one in args)
        tensors = args if plain else tree_leaves((args, kwargs))
        # Modes and probabilities of dropouts decide whether random numbers are drawn.
        modes = tuple((one.training, one.__dict__.get("p")) for one in self._plain)
        given = call_metadata(tensors, net.training, (modes,))
        self.total = self._total(given)
        self.running = True
        self._now = self.total, _attributes(self._theirs)
        # A cache may bring tensors of other calls, and take some of this one.
        kinds: set[Any] = set() if plain else {type(one) for one in tensors}
        self._keeps = any(map(_is_configuration, kinds))
        given_kept = len(self._kept) > 0 and any(x in self._kept for x in tensors if _is_tensor(x))
        if self._keeps or given_kept or self._seen.get(self._now) is not False:
            self._follow(net, tensors)

    def _follow(self, net: Any, tensors: Any) -> None:
        stream = Stream(self._seed)
        self.types = types = Types(self._axis.size, self._axis.index, stream)
        types.mark_parameters(net)
        for x, cut in self._kept.items():
            types.mark(x, cut)
        self._leaves = tensors
        for x, cut in self._places.layouts(tensors):
            types.mark(x, cut)
        lengths = self._blocks(tensors)
        for x, sizes in zip(tensors, lengths, strict=True):
            if isinstance(x, torch.Tensor) and x not in self._kept:
                dim = self._inputs
                layout = types.cut(dim, x.ndim, sizes) if isinstance(dim, int) else dim
                types.mark(x, layout)
        self._entered = stream, types.following()

    def _blocks(self, tensors: Any) -> Any:
        """Of each tensor, the lengths of all workers' blocks, where inputs are split. Collective,
        for new calls."""
        if not isinstance(self._inputs, int):
            return [None] * len(tensors)
        known = self._lengths.get(self.total)
        if known is None:
            inside = (
                isinstance(x, torch.Tensor) and -x.ndim <= self._inputs < x.ndim for x in tensors
            )
            mine = [
                x.shape[self._inputs] if ok else 0 for x, ok in zip(tensors, inside, strict=True)
            ]
            said = self._agreement.gather_objects(mine)
            known = self._lengths.keep(self.total, list(zip(*said, strict=True)))
        return known

    def _seed(self) -> int:
        """Seed of a call: of the first worker's generator. Collective."""
        with torch._C.DisableTorchFunction(), unrecorded():
            if self._draws_seeds is None:
                mine = process()
                said = self._agreement.gather_objects(mine)
                self._draws_seeds = said.index(mine) == self._axis.index
            # One number in each process, so that generators in the same state stay so.
            drawn = drawn_seed() if self._draws_seeds else 0
            first = drawn if self._axis.index == 0 else 0
            return self._agreement.sum(first, "draw a seed for a call of tensor parallel modules")

    def _total(self, given: CallMetadata) -> int:
        """The sum of all workers' digests of a call. Of this worker's there are its own and the
        last sum."""
        agreement, last = self._agreement, self._last
        known = last if last is not None and last.given == given else self._settled.get(given)
        if known is not None and agreement.shapes_are_fixed:
            return known.total
        code = agreement.code(self._number, given) if known is None else known.code
        total = agreement.total_of(code)
        if known is None or known.total != total:
            known = self._settled.keep(given, _Agreed(given, code, total))
        self._last = known
        return total

    def _after(self, net: Any, args: Any, kwargs: Any, result: Any) -> None:
        if not (torch.compiler.is_compiling() and records()):
            self._end(result)
            return
        UNDRAWING.__exit__(None, None, None)

    @_disable_dynamo
    def _end(self, result: Any) -> None:
        self.running = False
        if self.types is not None:
            leaves, self._leaves = self._leaves, []
            made = [] if _is_tensor(result) else tree_leaves(result)
            keeps = self._keeps or self.types.is_left_in(made)
            if keeps:
                self._kept = self.types.left()
                self._places.note([*leaves, *made], self._kept)
            self.types = None
            entered, self._entered = self._entered, None
            if entered is None:
                return  # interrupted before
            stream, context = entered
            context.close()
            # A call that makes a cache is followed each time: another one has other tensors.
            if result is not None and (stream.is_used or not keeps):
                self._seen.keep(self._now, stream.is_used)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


_RATES = (
    *("dropout", "dropout_p", "dropout_prob", "drop_prob", "attention_dropout", "attn_dropout"),
    *("activation_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"),
)
"""Names that modules give to probabilities of dropout."""


def random_module(modules: Sequence[Any]) -> str:
    """The class of the first module that draws random numbers in training, as far as modules say
    so; empty if there is none."""
    for one in modules:
        if not one.training:
            continue
        if isinstance(one, torch.nn.RReLU):
            return type(one).__name__
        names = ("p",) if isinstance(one, torch.nn.modules.dropout._DropoutNd) else _RATES
        for name in names:
            rate = getattr(one, name, 0.0)
            if isinstance(rate, float | int) and rate > 0:
                return type(one).__name__
    return ""


_PLAIN = frozenset((int, float, bool, str, type(None)))


def _attributes(modules: Sequence[Any]) -> tuple[Any, ...]:
    """Numbers and texts that modules and their configurations have: the functions that they call
    may depend on them."""
    found: list[Any] = []
    others: dict[int, Any] = {}
    for module in modules:
        for name, value in module.__dict__.items():
            if type(value) in _PLAIN:
                found.append(value)
            elif name[0] != "_":
                others[id(value)] = value
    for other in others.values():
        found.extend(value for value in _inside(other) if type(value) in _PLAIN)
    return (*found,)


def _inside(other: Any) -> Iterable[Any]:
    kind: Any = type(other)
    if kind in (list, tuple):
        return other  # type: ignore[no-any-return]
    if kind is dict:
        return other.values()  # type: ignore[no-any-return]
    return vars(other).values() if _is_configuration(kind) else ()


@cache
def _is_configuration(kind: type) -> bool:
    """True for objects with attributes that are no tensors and no functions."""
    return bool(kind.__dictoffset__) and not issubclass(kind, torch.Tensor | FunctionType)
