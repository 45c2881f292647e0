"""Operators in torch's autograd: the implementation of ``linop.autograd``. Forward runs the plan,
backward the plan of ``op.H``, applied in the same way; so no derivative rule is written here.

Nothing is saved for backward. Arrays share memory with tensors. Invalid tensors are reported by the
plan, on every worker. Collectives of a backward pass run in the reverse order of the forward pass:
of the nodes that are ready, torch's engine takes the one created last, so that a thread runs its
nodes strictly backwards, for any branching of its graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from linop.backends import current
from linop.backends.autograd.bridge import Bridge, bridge_of
from linop.backends.autograd.dtypes import is_of
from linop.backends.autograd.recompute import checkpoint_context, opened, run
from linop.backends.engine.base import Backend, BoundPlan
from linop.backends.together.recorder import namers
from linop.errors import LinopError, name_layer
from linop.operators.operator import LinearOperator

Shape = tuple[int, ...]

__all__ = ["Module", "add_dependency", "applied", "apply", "begun", "checkpoint_context", "ended"]


def apply(
    op: LinearOperator | BoundPlan,
    x: Any = None,
    backend: Backend | None = None,
    where: str = "",
    empty: Shape | None = None,
) -> Any:
    """Apply an operator to tensors. Collective: all workers of the backend call it, in the same
    order, and all run backward or none.

    The gradient is ``apply(op.H, gradient)``, with torch's convention for complex numbers; double
    backward and forward mode follow from that. Tensors have the Euclidean inner product, whichever
    those of the operator's spaces are: there it is ``apply(op.euclidean_adjoint, gradient)``. With
    gradients enabled the result requires a gradient on every worker, even if `x` does not. The
    operator is compiled at its first application on a backend, and stays compiled as long as it
    lives.

    Args:
        op: the operator, or a plan of it. Its dtype is one of torch's, bfloat16 included.
        x: on a worker with one region a tensor of its shape and the operator's dtype, with any
            strides; with several a dict by region name; with none None, or a zero-volume tensor,
            which orders this application after those it depends on. Under autocast, floating-point
            tensors of other dtypes are converted. Never modified.
        backend: by default `linop.backends.current`. A process that holds all workers passes and
            gets all regions.
        where: name of the calling module, for errors of backward.
        empty: shape of the zero-volume result on a worker without a region; (0,) by default.

    Returns:
        A new tensor of the worker's only region; a dict; or a zero-volume tensor, whose backward
        takes part in that of the other workers.

    Raises:
        DTypeError: torch has no such dtype. ArgumentError, RegionError, ShapeError, DTypeError: a
            tensor has the wrong type, device, layout, shape or dtype. BackendError: workers are
            missing, or their calls differ. All on every worker.

    Example:
        >>> X = linop.TensorSpace((6,), linop.Partition((2,)))
        >>> halos = linop.halo_exchange(X, kernel_size=3, padding=1)
        >>> def main(backend):
        ...     x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        ...     y = linop.autograd.apply(halos, x)  # with an edge of the neighbour's
        ...     y.sum().backward()
        ...     return y.tolist(), x.grad.tolist()
        >>> linop.launch(main, workers=2)
        [([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 2.0]), ([1.0, 1.0, 1.0, 1.0], [2.0, 1.0, 1.0])]
    """
    if torch.compiler.is_dynamo_compiling():
        return _uncompiled(op, x, backend, where, empty)
    if torch._C._len_torch_dispatch_stack() and (x is None or is_traced(x)):
        return _traced(op, x, backend, empty)
    bridge = bridge_of(op, backend)
    tensors = (x,) if bridge.takes_one and is_of(x, bridge.dtype) else bridge.tensors(x)
    results = _through(bridge, (opened(bridge), where, empty), tensors)
    return bridge.wrapped(results) if bridge.makes_many else results[0]


def applied(bridge: Bridge, tensors: Sequence[Any], where: str = "") -> tuple[Any, ...]:
    """`apply` by a bridge to tensors that fit, in the order of its regions."""
    if torch.compiler.is_dynamo_compiling():
        return _uncompiled_bridge(bridge, tensors, where)
    if torch._C._len_torch_dispatch_stack() and is_traced(tensors):
        from linop.backends.autograd.traced import through

        return through(bridge, tensors)
    return _through(bridge, (opened(bridge), where, None), tensors)


def begun(bridge: Bridge, tensors: Sequence[Any], where: str = "") -> Any:
    """Start what `ended` completes; nothing is waited for. Collective, as `ended` is.

    In torch's graph the adjoint of the start is the end of the adjoint's run, and that of the end
    its start: backward starts the adjoint where forward ended, and ends it where forward started,
    while it computes what is between them. One run of a bridge at a time.

    Returns:
        A tensor of no elements, that `ended` takes; None without a graph.
    """
    if torch.is_grad_enabled() and not _transforms():
        return _begin(bridge, where, bridge.anchor, *tensors)
    bridge.start([tensor.detach() for tensor in tensors])
    return None


def ended(bridge: Bridge, token: Any, where: str = "") -> tuple[Any, ...]:
    """`applied` to the tensors that `begun` was given.

    Args:
        token: its result.
    """
    results: tuple[Any, ...] = _end(bridge, (opened(bridge), where, None), token)
    return results


class Module(torch.nn.Module):
    """`apply` as a module, without parameters: ``Module(op)(x)``. torch.compile and torch.export
    record it as ``torch.ops.linop.plan``, whose backward is the plan of the adjoint. Compiled code
    follows if `op` is set to another one; an exported program keeps the first.

    Example:
        >>> X = linop.TensorSpace((2,), linop.Partition((2,)), axes=[linop.COPIES])
        >>> total = linop.all_reduce(X)
        >>> x = torch.tensor([[1.0, 2.0], [10.0, -20.0]], dtype=torch.float64)
        >>> def main(backend):
        ...     net = torch.nn.Sequential(linop.autograd.Module(total), torch.nn.ReLU())
        ...     return net(x[backend.worker]).tolist()
        >>> linop.launch(main, workers=2)
        [[11.0, 0.0], [11.0, 0.0]]
    """

    def __init__(self, op: LinearOperator | BoundPlan, backend: Backend | None = None) -> None:
        super().__init__()
        self.op = op
        self.backend = backend
        self.key, self.anchor = new_key(), new_anchor()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.key = new_key()  # a copy is another module

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("op", "backend"):
            self.key = new_key()  # compiled code knows the module by it

    def forward(self, x: Any = None) -> Any:
        """See `apply`."""
        if torch.compiler.is_dynamo_compiling() and records():
            from linop.backends.autograd.traced import followed

            return followed(self, self.key, self.anchor, x)
        return self.recorded(x)

    def recorded(self, x: Any = None) -> Any:
        """A call that is run, by torch's tracers, too."""
        return apply(self.op, x, self.backend)

    def extra_repr(self) -> str:
        return str(self.op.op if isinstance(self.op, BoundPlan) else self.op)


def add_dependency(x: Tensor, *unused: Tensor) -> Tensor:
    """A copy of `x` whose backward also reaches unused tensors, with zero gradients: for a worker
    that does not use results which others use.

    Args:
        x: a tensor, such as the loss of this worker.
        unused: tensors, of any shapes and dtypes.

    Example:
        >>> gather = linop.all_gather(linop.TensorSpace((4,), linop.Partition((2,))))
        >>> def main(backend):
        ...     x = torch.ones(2, dtype=torch.float64, requires_grad=True)
        ...     y, loss, user = linop.autograd.apply(gather, x), x.sum(), backend.worker == 0
        ...     loss = loss + y.sum() if user else linop.autograd.add_dependency(loss, y)
        ...     loss.backward()
        ...     return x.grad.tolist()
        >>> linop.launch(main, workers=2)
        [[2.0, 2.0], [2.0, 2.0]]
    """
    for other in unused:
        # A sum of no elements: infinities and NaNs do not reach x.
        x = x + other.real.reshape(-1)[:0].sum().to(x.dtype)
    return x


# Tracing

FOLLOWS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""False with versions of torch whose compiler does not follow modules that it has to run."""


def hindrance() -> str:
    """Reason why torch's compiler may not record plans here; empty if it may. Not on several
    threads, of which one has the compiler and would wait for the others, which wait for it."""
    here = current()
    if here.name == "threads" and here.worker is not None and here.workers != 1:
        return (
            "torch's compiler is one for all threads of a process, and workers would wait for each "
            "other in it: start processes, by mpiexec or torchrun"
        )
    return "" if FOLLOWS else f"torch 2.13 is needed, and this is {torch.__version__}"


def records() -> bool:
    """True if torch's compiler may record plans here."""
    return not hindrance()


# As torch.compiler.assume_constant_result does, which imports the compiler: called while it traces.
for _function in (hindrance, records):
    setattr(_function, "_dynamo_marked_constant", True)  # noqa: B010


_keys = itertools.count()


def new_key() -> str:
    """A word by which compiled code tells modules apart."""
    return f"linop {next(_keys)}"


def new_anchor() -> Tensor:
    """A leaf that is an input of compiled code, so that its backward runs on every worker."""
    with torch.inference_mode(False):
        return torch.empty(0, device="cpu", requires_grad=True)


def is_traced(given: Any) -> bool:
    """True of tensors of torch's tracers: they have shapes, and no values."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    every = given.values() if isinstance(given, Mapping) else given
    kinds = FakeTensor, FunctionalTensor
    if isinstance(every, Tensor):
        return isinstance(every, kinds)
    return not isinstance(every, str) and any(isinstance(x, kinds) for x in every or ())


def _traced(op: Any, x: Any, backend: Backend | None, empty: Shape | None) -> Any:
    """`apply` to tensors that torch traces."""
    from linop.backends.autograd.traced import bridged, through

    bridge = bridged(op, backend)
    results = through(bridge, bridge.tensors(x))
    if empty is not None:
        results = (results[0].reshape(empty),)
    return bridge.wrapped(results)


# The graph

CallSite = tuple[int, str, Shape | None]
"""Number of the call, the name of the calling module (may be empty), and the shape of the result on
a worker without a region, if it is another one than (0,)."""


class _Rules(torch.autograd.Function):
    """``apply(bridge, call, anchor, *tensors)`` returns a tuple. Each derivative is an application
    of the operator, or of its adjoint."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        adjoint: Bridge = ctx.bridge.adjoint
        number, where, _ = ctx.call
        try:
            adjoint.closing(number)
            call = opened(adjoint) if torch.is_grad_enabled() else 0, where, ctx.given
            return None, None, None, *_through(adjoint, call, adjoint.filled(gradients))
        except LinopError as error:
            name_layer(error, where and f"{where}, backward")
            raise

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        bridge: Bridge = ctx.bridge
        given = [z if t is None else t for t, z in zip(tangents[3:], bridge.zeros(), strict=True)]
        number = opened(bridge) if torch.is_grad_enabled() else 0
        return _through(bridge, (number, *ctx.call[1:]), given)


def _in_words(frame: FrameType) -> str:
    """Text for a stack frame of a backward pass: "backward", with its layer; empty for other
    frames."""
    if frame.f_code not in (_Rules.backward.__code__, _End.backward.__code__):
        return ""
    where = frame.f_locals["ctx"].call[1]
    return f"{where}, backward" if where else "backward"


namers.append(_in_words)


class _Apply(_Rules):
    """Function used outside of torch.func's transforms."""

    @staticmethod
    def forward(ctx: Any, bridge: Bridge, call: CallSite, anchor: Any, *tensors: Any) -> Any:
        ctx.bridge, ctx.call, ctx.given = bridge, call, bridge.empty(tensors)
        if not bridge.materializes:
            ctx.set_materialize_grads(False)
        return _ran(bridge, call, tensors)


_record = super(torch.autograd.Function, _Apply).apply
"""``_Apply.apply`` without torch's preparation for transforms, which takes a third of its time."""


class _Begin(torch.autograd.Function):
    """Start of a run: ``_begin(bridge, where, anchor, *tensors)`` returns a token."""

    @staticmethod
    def forward(ctx: Any, bridge: Bridge, where: str, anchor: Any, *tensors: Any) -> Any:
        ctx.bridge, ctx.where = bridge, where
        bridge.start([tensor.detach() for tensor in tensors])
        return bridge.token()

    @staticmethod
    def backward(ctx: Any, token: Any) -> Any:
        return None, None, None, *_end(ctx.bridge.adjoint, (0, ctx.where, None), token)


class _End(torch.autograd.Function):
    """End of a run: ``_end(bridge, call, token)`` returns a tuple."""

    @staticmethod
    def forward(ctx: Any, bridge: Bridge, call: CallSite, token: Any) -> Any:
        ctx.bridge, ctx.call = bridge, call
        if not bridge.materializes:
            ctx.set_materialize_grads(False)
        return bridge.finish()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        adjoint: Bridge = ctx.bridge.adjoint
        number, where, _ = ctx.call
        try:
            adjoint.closing(number)
            given = adjoint.filled(gradients)
            return None, None, _begin(adjoint, where, adjoint.anchor, *given)
        except LinopError as error:
            name_layer(error, where and f"{where}, backward")
            raise


_begin = super(torch.autograd.Function, _Begin).apply
_end = super(torch.autograd.Function, _End).apply


class _Transformed(_Rules):
    """Function used inside torch.func's transforms: they need a separate `setup_context`, which is
    slower."""

    @staticmethod
    def forward(bridge: Bridge, call: CallSite, anchor: Any, *tensors: Any) -> Any:
        return _ran(bridge, call, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.bridge, ctx.call = inputs[:2]
        ctx.given = ctx.bridge.empty(inputs[3:])

    @staticmethod
    def vmap(
        info: Any, dims: Any, bridge: Bridge, call: CallSite, anchor: Any, *tensors: Any
    ) -> tuple[Any, Any]:
        """Apply the operator slice by slice, since a plan is bound to one shape."""
        if info.batch_size == 0:
            results = [z.new_zeros((0, *(call[2] or z.shape))) for z in bridge.adjoint.zeros()]
            return tuple(results), (0,) * len(results)
        slices = [
            [t if d is None else t.select(d, k) for t, d in zip(tensors, dims[3:], strict=True)]
            for k in range(info.batch_size)
        ]
        each = [_through(bridge, (opened(bridge), *call[1:]), one) for one in slices]
        results = [torch.stack(batch) for batch in zip(*each, strict=True)]
        return tuple(results), (0,) * len(results)


def _through(bridge: Bridge, call: CallSite, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Apply a plan; recorded in the graph if gradients, tangents or transforms are active."""
    results: tuple[Any, ...]
    if torch._C._are_functorch_transforms_active():
        results = _Transformed.apply(bridge, call, bridge.anchor, *tensors)
        return results
    if forward_ad._current_level >= 0:
        # All workers propagate tangents or none; missing tangents are zero.
        tensors = [_dual(tensor) for tensor in tensors]
    elif not torch.is_grad_enabled():
        return _ran(bridge, call, tensors)
    results = _record(bridge, call, bridge.anchor, *tensors)
    return results


def _ran(bridge: Bridge, call: CallSite, tensors: Sequence[Any]) -> tuple[Any, ...]:
    results = run(bridge, tensors)
    # A new tensor: autograd forbids to change a view made in a Function in place.
    return results if call[2] is None else (results[0].new_empty(call[2]),)


def _transforms() -> bool:
    """True inside torch.func's transforms, and in forward mode."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def _dual(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    if forward_ad.unpack_dual(tensor).tangent is not None:
        return tensor
    return forward_ad.make_dual(tensor, torch.zeros_like(tensor))


@_disable_dynamo
def _uncompiled(
    op: LinearOperator | BoundPlan,
    x: Any,
    backend: Backend | None,
    where: str,
    empty: Shape | None,
) -> Any:
    """`apply` under torch.compile: a graph break, since a plan is not torch code."""
    # torch.compiler.disable does the same, and would import the compiler now, which takes seconds.
    return apply(op, x, backend, where, empty)


@_disable_dynamo
def _uncompiled_bridge(bridge: Bridge, tensors: Sequence[Any], where: str) -> tuple[Any, ...]:
    return applied(bridge, tensors, where)
