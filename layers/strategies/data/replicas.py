"""Copies of one module on several workers: the same structure, and the same values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from linop.backends import Backend
from linop.errors import ArgumentError, BackendError
from linop.layers.agreement.arguments import digest
from linop.layers.agreement.input_agreement import agreement_of
from linop.layers.parameters.blocks import blocks, plain
from linop.spaces.partition import Partition
from linop.strategies.data.bucket import Flat, Layout, grouped
from linop.strategies.data.operators import from_server
from linop.strategies.mesh import Axis

Value = TypeVar("Value")
SERVER = "data parallel, with a server"
"""Mark of parameters of which the server alone has the gradients."""
CAP = 2**28
"""Bytes of one message of values."""


def agree(backend: Backend, name: str, work: Callable[[], tuple[Value, Any]]) -> Value:
    """Result of local work, which may fail on some workers, and whose second half is to be equal
    on all. Collective.

    Raises:
        LinopError: it failed on a worker. BackendError: workers say different things. On every
            worker.
    """
    doing = f"construct linop.strategies.{name}"
    result, said = agreement_of(backend).together(work, name, doing)
    for worker, theirs in enumerate(said):
        if theirs != said[0]:
            where = _difference(said[0], theirs)
            raise BackendError(
                f"{name}: worker {worker} has {where[1]}, worker 0 {where[0]}; the same expected "
                f"on every worker"
            )
    return result


def _difference(a: Any, b: Any) -> tuple[Any, Any]:
    """The first items that differ."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        pairs = [(x, y) for x, y in zip(a, b, strict=False) if x != y]
        if pairs:
            return _difference(*pairs[0])
        return f"{len(a)} items", f"{len(b)} items"
    return a, b


def described(tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """Names, shapes and dtypes, to be compared."""
    return tuple(
        f"{name!r} of {t.dtype} and shape {tuple(t.shape)}"
        + (" without gradient" * (isinstance(t, torch.nn.Parameter) and not t.requires_grad))
        for name, t in tensors.items()
    )


class Spread:
    """Broadcast of tensors from one worker to copies, B. Constructed by all workers.

    Args:
        tensors: of the shapes and dtypes of those that it is called with.
        server: the worker whose values all get.
    """

    def __init__(self, tensors: Sequence[Tensor], backend: Backend, server: int) -> None:
        group = Partition((backend.workers or 1,))
        self._parts = []
        own = [*map(_plain, tensors)]
        self._serves = backend.worker == server
        for members in grouped(own, CAP):
            layout, dtype = Layout([own[k] for k in members]), own[members[0]].dtype
            op = from_server(layout.size, dtype, group, server)
            flat = own[members[0]].new_empty(layout.size) if self._serves else None
            self._parts.append((members, layout, flat, Flat(op, backend, dtype)))

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values. Collective. Tensors that have them are not written to: autograd may have
        saved them, such as indices of positions, in a forward whose backward is yet to come."""
        own = [*map(_plain, tensors)]
        for members, layout, flat, plan in self._parts:
            some = [own[k] for k in members]
            if flat is not None:
                torch._foreach_copy_(layout.views(flat), some)
            found = plan(flat)
            if not self._serves:
                assert found is not None
                pairs = zip(some, layout.views(found), strict=True)
                if new := [(a, b) for a, b in pairs if not torch.equal(_bytes(a), _bytes(b))]:
                    torch._foreach_copy_([a for a, _ in new], [b for _, b in new])

    def fail(self, error: BaseException) -> None:
        """End the other workers' waits for this one."""
        for *_, plan in self._parts:
            plan.fail(error)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _plain(tensor: Tensor) -> Tensor:
    """A tensor's memory, of a dtype that operators have."""
    own: Tensor = plain(tensor)
    return own.view(torch.uint8) if own.dtype is torch.bool else own


def to_write(module: Any) -> list[Tensor]:
    """Buffers, of which running statistics are written to as norms do it: unseen by autograd, which
    keeps them in forward, and does not read them in the backward of training."""
    statistics = {id(x) for one in module.modules() for x in _running_statistics(one)}
    return [x.data if id(x) in statistics else x for x in module.buffers()]


def _running_statistics(one: Any) -> Iterator[Tensor]:
    """Buffers of a norm; of a module that torch exported, those that its graph gives to a norm."""
    if isinstance(one, torch.nn.modules.batchnorm._NormBase) and one.training:
        yield from one.buffers(recurse=False)
    graph = getattr(one, "graph", None)
    for node in graph.nodes if isinstance(graph, torch.fx.Graph) else ():
        if node.op == "call_function" and "batch_norm" in str(node.target):
            names = [each.target for each in node.all_input_nodes if each.op == "get_attr"]
            yield from (one._buffers[name] for name in names if name in one._buffers)


def check_equal(tensors: Mapping[str, Tensor], backend: Backend, name: str) -> None:
    """Check that all workers have the same values. Collective.

    Raises:
        BackendError: they have not; on every worker.
    """
    mine = {key: digest(t) for key, t in tensors.items()}
    said = agreement_of(backend).gather_objects(mine, f"compare values of linop.strategies.{name}")
    differ = [key for key in mine if len({one[key] for one in said}) > 1]
    if differ:
        first = differ[0]
        others = [w for w, one in enumerate(said) if one[first] != said[0][first]]
        raise BackendError(
            f"{name}: {', '.join(map(repr, differ[:8]))} differ between workers ({first!r} on "
            f"workers {others} from worker 0's); copies of one value expected: load the same state "
            f"and make the same updates on every worker"
        )


def summed_already(module: Any, axis: Axis) -> set[str]:
    """Names of parameters in blocks over workers of an axis, whose gradients are sums over the rows
    of all of these: experts, which this axis' sums leave alone.

    Raises:
        ArgumentError: the axis has copies of such blocks, too, and their gradients are not summed.
    """
    if not isinstance(module, torch.nn.Module):
        return set()
    every = dict(module.named_parameters())
    known, found = blocks(every.values()), set[str]()
    for name, p in every.items():
        cut = [getattr(one.layer, "axis", None) for one in known.get(id(p), ())]
        sums = [getattr(one.layer, "sums_over_axis", False) for one in known.get(id(p), ())]
        for over, ours in zip(cut, sums, strict=True):
            if not ours or over is None or len({*over.workers} & {*axis.workers}) < 2:
                continue
            if not {*axis.workers} <= {*over.workers} and not hasattr(p, "_linop_strategy"):
                raise ArgumentError(
                    f"parameter {name!r} is cut over the axis {over.name!r}, and this axis has "
                    f"copies of its blocks, whose gradients nobody sums: give the axis of the "
                    f"copies to ExpertParallel, as data=mesh['dp']"
                )
            found.add(name)
    return found


def check_written(module: Any, workers: int) -> None:
    """Check that no forward writes to a parameter, which has the rows of one worker's batch then.

    Raises:
        ArgumentError: one does.
    """
    for name, one in module.named_modules() if workers > 1 else ():
        kinds = torch.nn.Embedding, torch.nn.EmbeddingBag
        if isinstance(one, kinds) and one.max_norm is not None:
            which = f"module {name!r}" if name else "the module"
            raise ArgumentError(
                f"{which} is of {type(one).__name__} with max_norm={one.max_norm}, whose "
                f"forward changes the rows of its weight that this worker's batch has; without "
                f"max_norm expected: weight.renorm_({one.norm_type:g}, 0, {one.max_norm:g}) under "
                f"torch.no_grad() after each step is the same on all workers"
            )


def module_checked(module: Any, backend: Backend, apart: set[str]) -> dict[str, Tensor]:
    """A module's parameters that have gradients, by name: perhaps none. Shards may have copies on
    other workers than those that they are cut over.

    Args:
        apart: names of parameters that are left alone.

    Raises:
        ArgumentError: it is no module, or is data parallel already.
    """
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"a torch.nn.Module expected, given {module!r}")
    check_written(module, backend.workers or 1)
    for name, p in module.named_parameters():
        if name in apart:
            continue
        already = getattr(p, "_linop_strategy", "")
        if already == "shard":
            # Two axes of one worker are one group, over which nothing is cut or copied.
            same = getattr(p, "_linop_backend", None) is backend and (backend.workers or 1) > 1
            already = "sharded over these workers" * same
        if already:
            raise ArgumentError(f"parameter {name!r} is in a module that is already {already}")
        if p.device.type == "meta":
            raise ArgumentError(
                f"parameter {name!r} is on the meta device; give it memory first: "
                f"module.to_empty(device='cpu'), and values"
            )
    named = module.named_parameters()
    return {name: p for name, p in named if p.requires_grad and name not in apart}
