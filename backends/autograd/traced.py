"""Plans inside of graphs that torch.compile and torch.export make: an operator of torch's library,
whose result has the shapes of the plan's and whose backward is the plan of the adjoint; and another
one for functions that are no plans (`linop.backends.autograd.real_calls`).

Eager calls do not come here (`linop.backends.autograd.functions`): they keep forward mode, double
backward and their speed. This module is imported while torch traces, for it needs torch's compiler,
which takes seconds to import.

Nodes of the forward pass stay in it. torch's partitioner copies into the backward graph each node
with side effects whose inputs are there; so all have an input that backward does not use: the
anchor, a leaf of no elements. It has a gradient, so that backward runs on every worker, as in eager
calls, whichever tensors a worker has. And each node has a number of its own: equal ones would be
made one, and other workers wait for the second.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.decorators import nonstrict_trace
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from linop.backends.autograd.bridge import Bridge, bridge_of
from linop.backends.autograd.functions import applied, is_traced, new_anchor
from linop.backends.autograd.real_calls import (
    FUNCTIONS,
    LOCAL,
    Form,
    RealCall,
    call_of,
    traces,
    tracing,
)
from linop.errors import BackendError

_numbers, _nodes = itertools.count(), itertools.count()
_ANCHOR = new_anchor()
"""Of functions that are not of a module."""
_BRIDGES: weakref.WeakValueDictionary[int, Bridge] = weakref.WeakValueDictionary()


def _number(bridge: Bridge) -> int:
    """The number by which a graph knows a bridge of this process."""
    known: int | None = bridge.__dict__.get("traced")
    if known is None:
        known = bridge.__dict__["traced"] = next(_numbers)
        _BRIDGES[known] = bridge
    return known


def _bridge(number: int) -> Bridge:
    found: Bridge = _there(_BRIDGES.get(number), "plan: the operator")
    return found


def _call(number: int) -> RealCall:
    found: RealCall = _there(call_of(number), "call: the function")
    return found


def _there(known: Any, what: str) -> Any:
    if known is None:
        raise BackendError(
            f"linop::{what} of this graph is gone; keep the module that was compiled or exported, "
            f"in the same process, while the graph is used"
        )
    return known


# Plans


@torch.library.custom_op("linop::plan", mutates_args=())
def plan(tensors: list[Tensor], anchor: Tensor | None, number: int, node: int = 0) -> list[Tensor]:
    """Results of a plan, of tensors in the order of the regions held here. Collective.

    Args:
        anchor: see the module's docstring.
        number: of the plan.
        node: of the node.
    """
    del anchor, node
    return [*_bridge(number).run([*map(_dense, tensors)])]


def _dense(tensor: Tensor) -> Tensor:
    return tensor.detach()


@plan.register_fake
def _shapes(
    tensors: list[Tensor], anchor: Tensor | None, number: int, node: int = 0
) -> list[Tensor]:
    del anchor, node
    return _new(tensors, _bridge(number).results)


def _new(tensors: Sequence[Tensor], forms: Sequence[Form]) -> list[Tensor]:
    new = tensors[0].new_empty if tensors else torch.empty
    found = []
    for shape, dtype, *rest in forms:
        named = {"layout" if isinstance(one, torch.layout) else "device": one for one in rest}
        found.append(new(shape, dtype=dtype, **named))
    return found


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    del output
    _, ctx.anchor, ctx.number, _ = inputs


def _backward(ctx: Any, gradients: Sequence[Tensor | None]) -> Any:
    bridge = _bridge(ctx.number)
    # Really made: what it keeps is for later runs.
    adjoint = bridge.adjoint if not traces() else untraced(getattr, bridge, "adjoint")
    results = plan(_given(gradients, bridge.results), None, _number(adjoint), next(_nodes))
    return results, _of_anchor(ctx.anchor, results), None, None


def _given(gradients: Sequence[Tensor | None], forms: Any) -> list[Tensor]:
    """Gradients, and zeros for absent ones."""
    (like, *_) = (g for g in gradients if g is not None)
    pairs = zip(gradients, forms, strict=True)
    return [like.new_zeros(s, dtype=d) if g is None else g for g, (s, d, *_) in pairs]


def _of_anchor(anchor: Tensor | None, results: Sequence[Tensor]) -> Tensor | None:
    """The anchor's gradient, of no elements."""
    if anchor is None:
        return None
    return results[0].real.reshape(-1)[:0].to(anchor.dtype)


# Functions


@torch.library.custom_op("linop::call", mutates_args=())
def call(tensors: list[Tensor], anchor: Tensor | None, number: int, node: int = 0) -> list[Tensor]:
    """Results of a function of this process.

    Args:
        anchor: see the module's docstring.
        number: of the function.
        node: of the node.
    """
    del anchor, node
    return _called(number, tensors)


def _called(number: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    results, seen = [], set()
    for one in _call(number).function(*map(_dense, tensors)):
        if one.layout is not torch.strided:
            results.append(one)
            continue
        one = one.contiguous()  # as `_forms` says
        memory = one.untyped_storage().data_ptr()  # which results may not share
        results.append(one.clone() if memory in seen else one)
        seen.add(memory)
    return results


@call.register_fake
def _forms(
    tensors: list[Tensor], anchor: Tensor | None, number: int, node: int = 0
) -> list[Tensor]:
    del anchor, node
    return _new(tensors, _call(number).results)


def _setup_call(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, ctx.anchor, ctx.number, _ = inputs
    ctx.count = len(tensors)
    if _call(ctx.number).derivative is not None:
        ctx.save_for_backward(*tensors, *output)


def _backward_of_call(ctx: Any, gradients: Sequence[Tensor | None]) -> Any:
    made = _call(ctx.number)
    back = made.derivative
    nothing = [None] * ctx.count
    if back is None:
        return nothing, None, None, None
    given = [*ctx.saved_tensors, *_given(gradients, made.results)]
    found = call(given, None, back.number, next(_nodes))
    dense = [x for x in (*found, *given) if x.layout is torch.strided]
    return [*found, *nothing[len(found) :]], _of_anchor(ctx.anchor, dense), None, None


for _op, _back, _set in (plan, _backward, _setup), (call, _backward_of_call, _setup_call):
    torch.fx.node.has_side_effect(_op._opoverload)
    _op.register_autograd(_back, setup_context=_set)

# With real tensors nodes are run here, above torch's autograd, which functions may use. It records
# those of exported programs: there plans, and their backward, are what they are in eager calls.

_LIBRARY = torch.library.Library("linop", "FRAGMENT")
_made_graph = torch._library.autograd.make_autograd_impl


def _kernels() -> dict[str, Callable[..., Any]]:
    of_plan, of_call = (_made_graph(op._opoverload, op) for op in (plan, call))

    def planned(keys: Any, tensors: list[Tensor], anchor: Any, number: int, node: int = 0) -> Any:
        if traces() or is_traced(tensors):
            return of_plan(keys, tensors, anchor, number, node)
        return [*applied(_bridge(number), tensors)]

    def called(keys: Any, tensors: list[Tensor], anchor: Any, number: int, node: int = 0) -> Any:
        if traces() or is_traced(tensors):
            return of_call(keys, tensors, anchor, number, node)
        if not torch.is_grad_enabled() or _call(number).derivative is None:
            return _called(number, tensors)
        if (plainly := _call(number).plainly) is not None:
            return [*plainly(*tensors)]
        return of_call(keys, tensors, new_anchor(), number, node)

    return {"plan": planned, "call": called}


for _name, _kernel in _kernels().items():
    for _key in "AutogradCPU", "AutogradCUDA":
        _LIBRARY.impl(_name, _kernel, _key, with_keyset=True)


# Traces


def through(bridge: Bridge, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Apply a plan to tensors that torch traces."""
    return tuple(plan([*map(_in_graph, tensors)], LOCAL.anchor, _number(bridge), next(_nodes)))


def _in_graph(x: Tensor) -> Tensor:
    """A tensor of the graph in place of one without elements that is none: torch's own compiler
    takes no real ones in lists."""
    if x.numel() or is_traced(x) or not traces():
        return x
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)


def called(made: RealCall, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Call a function of tensors that torch traces."""
    results: list[Tensor] = call([*tensors], LOCAL.anchor, made.number, next(_nodes))
    return results


@nonstrict_trace
def _followed(module: torch.nn.Module, key: str, anchor: Tensor, places: str, *given: Any) -> Any:
    del key
    rest = iter(given)
    arguments = [next(rest) if place == "x" else None for place in places]
    with anchored(anchor), tracing(), _Constants():
        return module.recorded(*arguments)  # type: ignore[operator]


def followed(module: torch.nn.Module, key: str, anchor: Tensor, *arguments: Any) -> Any:
    """Call of ``module.recorded``, which torch's compiler records by running it.

    Args:
        key: of the module, which the compiled code checks.
        anchor: of the nodes.
        arguments: tensors, numbers, texts, or None.
    """
    places = "".join(["-" if x is None else "x" for x in arguments])  # None is not for graphs
    there = [x for x in arguments if x is not None]
    return _followed(module, key, anchor, places, *there)


@nonstrict_trace
def _followed_function(name: str, anchor: Tensor, places: str, *given: Any) -> Any:
    rest = iter(given)
    arguments = [next(rest) if place == "x" else None for place in places]
    with anchored(anchor), tracing(), _Constants():
        return FUNCTIONS[name](*arguments)


def followed_function(name: str, *arguments: Any) -> Any:
    """Call of a function of `FUNCTIONS`, which torch's compiler records by running it.

    Args:
        arguments: as of `followed`.
    """
    places = "".join(["-" if x is None else "x" for x in arguments])
    there = [x for x in arguments if x is not None]
    return _followed_function(name, _ANCHOR, places, *there)


@contextmanager
def anchored(anchor: Tensor) -> Iterator[None]:
    """Context in which nodes that are traced have an anchor, if they have none yet."""
    before = LOCAL.anchor
    if before is None and torch.is_grad_enabled():
        LOCAL.anchor = anchor
    try:
        yield
    finally:
        LOCAL.anchor = before


class _Constants(TorchFunctionMode):
    """Mode that makes real tensors, such as indices that a layer has computed for a shape,
    constants of the graph that is traced."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        given = tree_map_only(Tensor, self._constant, (args, kwargs or {}))
        return func(*given[0], **given[1])

    def _constant(self, x: Tensor) -> Tensor:
        if is_traced(x) or x.requires_grad or not traces():
            return x
        known = self._known.get(id(x))
        if known is None:  # kept, so that the number is of no other
            known = self._known[id(x)] = x, x.clone()
        return known[1]


def untraced(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function that is really run, and not traced."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), tracing(False):
        return function(*arguments)


def stand_in(x: Any, wanted: bool = False) -> Any:
    """A real tensor of the shape, dtype and device of one that is traced, of one element.

    Args:
        wanted: a tensor of floating-point numbers requires a gradient, whether x does or not.
    """
    if not isinstance(x, Tensor):
        return x
    shape, dtype, device = [int(n) for n in x.shape], x.dtype, x.device
    wants = x.requires_grad or (wanted and (dtype.is_floating_point or dtype.is_complex))

    def made() -> Tensor:
        one = torch.zeros((), dtype=dtype, device=device).expand(shape)
        return one.requires_grad_(wants) if wants else one

    return untraced(made)


def bridged(op: Any, backend: Any) -> Bridge:
    """The bridge of an operator, really compiled. Collective at first."""
    found: Bridge = untraced(bridge_of, op, backend)
    return found
