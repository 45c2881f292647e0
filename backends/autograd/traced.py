"""Plans inside of graphs that torch.compile and torch.export make: an operator of torch's library,
whose result has the shapes of the plan's and whose backward is the plan of the adjoint.

Eager calls do not come here (`linop.backends.autograd.functions`): they keep forward mode, double
backward and their speed. This module is imported while torch traces, for it needs torch's compiler,
which takes seconds to import.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.decorators import nonstrict_trace
from torch.utils._python_dispatch import _disable_current_modes

from linop.backends.autograd.bridge import Bridge, bridge_of
from linop.errors import BackendError

_numbers = itertools.count()
_BRIDGES: weakref.WeakValueDictionary[int, Bridge] = weakref.WeakValueDictionary()


def _number(bridge: Bridge) -> int:
    """The number by which a graph knows a bridge of this process."""
    known: int | None = bridge.__dict__.get("traced")
    if known is None:
        known = bridge.__dict__["traced"] = next(_numbers)
        _BRIDGES[known] = bridge
    return known


def _bridge(number: int) -> Bridge:
    known = _BRIDGES.get(number)
    if known is None:
        raise BackendError(
            "linop::plan: the operator of this graph is gone; keep the module that was compiled or "
            "exported, in the same process, while the graph is used"
        )
    return known


@torch.library.custom_op("linop::plan", mutates_args=())
def plan(tensors: list[Tensor], anchor: Tensor | None, number: int) -> list[Tensor]:
    """Results of a plan, of tensors in the order of the regions held here. Collective.

    Args:
        anchor: a tensor of no elements, with gradient: backward runs on every worker then, as in
            eager calls, whichever tensors a worker has.
    """
    del anchor
    return [*_bridge(number).run([*map(_dense, tensors)])]


def _dense(tensor: Tensor) -> Tensor:
    return tensor.detach()


@plan.register_fake
def _shapes(tensors: list[Tensor], anchor: Tensor | None, number: int) -> list[Tensor]:
    like = tensors[0]
    return [like.new_empty(shape, dtype=dtype) for shape, dtype in _bridge(number).results]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    del output
    _, ctx.anchor, ctx.number = inputs


def _backward(ctx: Any, gradients: Sequence[Tensor | None]) -> Any:
    bridge = _bridge(ctx.number)
    given = [g for g in gradients if g is not None]
    if len(given) < len(gradients):
        pairs = zip(gradients, bridge.results, strict=True)
        like = given[0]
        given = [like.new_zeros(s, dtype=d) if g is None else g for g, (s, d) in pairs]
    # The anchor's gradient is of no elements, and keeps torch from leaving the plan out.
    results = plan(given, ctx.anchor, _number(bridge.adjoint))
    nothing = None if ctx.anchor is None else results[0].real.reshape(-1)[:0].to(ctx.anchor)
    return results, nothing, None


torch.fx.node.has_side_effect(torch.ops.linop.plan.default)
torch.library.register_autograd("linop::plan", _backward, setup_context=_setup)


def through(bridge: Bridge, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Apply a plan to tensors that torch traces."""
    return tuple(plan([*tensors], _LOCAL.anchor, _number(bridge)))


class _Local(threading.local):
    anchor: Tensor | None = None


_LOCAL = _Local()


@nonstrict_trace
def followed(module: torch.nn.Module, key: str, anchor: Tensor, *tensors: Any) -> Any:
    """Call of ``module.traced``, which torch's compiler records by running it.

    Args:
        key: of the module, which the compiled code checks.
        anchor: of the plans.
    """
    del key
    with anchored(anchor):
        return module.traced(*tensors)  # type: ignore[operator]


@contextmanager
def anchored(anchor: Tensor) -> Iterator[None]:
    """Context in which plans that are traced have an anchor, if they have none yet."""
    before = _LOCAL.anchor
    if before is None and torch.is_grad_enabled():
        _LOCAL.anchor = anchor
    try:
        yield
    finally:
        _LOCAL.anchor = before


def untraced(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function that is really run, and not traced."""
    with _disable_current_modes():
        return function(*arguments)


def stand_in(x: Any) -> Any:
    """A real tensor of the shape, dtype and device of one that is traced, of one element."""
    if not isinstance(x, Tensor):
        return x
    shape, dtype, device, wants = [int(n) for n in x.shape], x.dtype, x.device, x.requires_grad

    def made() -> Tensor:
        one = torch.zeros((), dtype=dtype, device=device).expand(shape)
        return one.requires_grad_(wants) if wants else one

    return untraced(made)


def bridged(op: Any, backend: Any) -> Bridge:
    """The bridge of an operator, really compiled. Collective at first."""
    found: Bridge = untraced(bridge_of, op, backend)
    return found
