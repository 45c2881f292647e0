"""Memory of strategies before they run: bytes a worker by kind.

Nothing is derived by a formula of its own: blocks are those of the tensor spaces that strategies
make, the optimizer is the user's, which makes a step on tensors without memory, and the forward
runs on such tensors, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from linop.backends import launch
from linop.backends.autograd.dtypes import summed_dtype, torch_dtype
from linop.errors import ArgumentError, expect
from linop.spaces.partition import balanced
from linop.spaces.region import integer
from linop.strategies.data.whole_module import without_units
from linop.strategies.memory.chain import Offloadable
from linop.strategies.memory.elsewhere import Away, inside, moved, parameters_away
from linop.strategies.mesh import Mesh
from linop.strategies.tensor.parallelize import parallelize_module

STRATEGIES = ("dp", "zero1", "zero2", "zero3", "tp", "pp")


@dataclass(frozen=True)
class Memory:
    """Bytes on one worker, by kind.

    Attributes:
        parameters: blocks that the worker keeps, those without gradient included.
        buffers: of the module.
        gradients: in ``grad`` after backward.
        optimizer: its state; of "zero1" also the blocks of parameters that its steps update.
        whole: whole parameters at once, beside the blocks, of sharded modules.
        messages: flat tensors that gradients are put into before their sums, and the sums that
            ``grad`` does not share memory with.
        activations: tensors that autograd keeps for backward; None if no inputs were given.
        host: what `offload` has in host memory: saved tensors when forward ends, and, of parameters
            that are there, also their gradients and the optimizer's state. The others alone are in
            the kinds above; `whole` has the parameters that are brought in.

    Example:
        A weight of 16 numbers of 4 bytes, its gradient, and the message that sums it:

        >>> net = torch.nn.Linear(4, 4, bias=False)
        >>> memory = strategies.estimate(net, "dp", workers=2)[0]
        >>> memory.parameters, memory.gradients, memory.messages, memory.total
        (64, 64, 64, 192)
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    whole: int
    messages: int
    activations: int | None = None
    host: int = 0

    @property
    def total(self) -> int:
        """The sum of the known ones, but for `host`."""
        return sum(getattr(self, one.name) or 0 for one in fields(self) if one.name != "host")


def estimate(
    net: Any,
    strategy: str,
    workers: int,
    optimizer: Callable[[list[Tensor]], Any] | None = None,
    inputs: Sequence[Any] | None = None,
    *,
    units: Sequence[str] | None = None,
    param_dtype: Any = None,
    plan: Any = None,
) -> tuple[Memory, ...]:
    """Memory of each worker that trains a module by a strategy. Nothing is sent, and no memory is
    taken but for sizes; the module may be on the meta device. Chains and lists in it of
    `linop.strategies.checkpoint` and of `offload` keep what they keep.

    Args:
        net: the sequential module; for "pp" a torch.nn.Sequential of the stages.
        strategy: "dp" (`DataParallel`), "zero1" (with `ShardedOptimizer`), "zero2" and "zero3"
            (`fully_shard` without and with ``reshard_after_forward``), "tp" (`parallelize_module`),
            "pp" (a stage on each worker, of one micro-batch).
        workers: how many.
        optimizer: makes one of torch of a list of parameters, such as ``functools.partial(
            torch.optim.Adam, lr=1e-3)``; None: none.
        inputs: of the module's forward, by position, for the whole batch; tensors are cut along
            dimension 0, as `linop.strategies.Parts` cuts them. They may be on the meta device.
        units: for "zero2" and "zero3", names of submodules that `fully_shard` is called for, before
            the module; by default those of the module's children that have parameters.
        param_dtype: as of `fully_shard`.
        plan: for "tp", as of `parallelize_module`; its workers have the same inputs.

    Returns:
        Memory of each worker.

    Raises:
        ArgumentError: there is no such strategy, or no such submodule; `workers` is below 1, or is
            not the number of stages; of "tp" there is no plan; parameters are sharded, or data
            parallel, already; those that `offload` has moved are to be sharded. Errors of
            `parallelize_module`.

    Example:
        Bytes of a weight of 16 numbers, its gradient and Adam's two moments, which ZeRO 3 shards;
        four more are Adam's count of steps, which each worker has:

        >>> net = torch.nn.Linear(4, 4, bias=False)
        >>> for strategy in ("dp", "zero3"):
        ...     one, other = strategies.estimate(net, strategy, 2, torch.optim.Adam)
        ...     print(strategy, one.parameters, one.gradients, one.optimizer)
        dp 64 64 132
        zero3 32 32 68
    """
    expect("estimate: net", net, torch.nn.Module)
    if strategy not in STRATEGIES:
        raise ArgumentError(
            f"estimate: strategy {strategy!r}; one of {', '.join(STRATEGIES)} expected"
        )
    if integer(workers, "estimate: workers") < 1:
        raise ArgumentError(f"estimate: workers={workers}; at least 1 expected")
    if (plan is not None) != (strategy == "tp"):
        raise ArgumentError(
            f"estimate: strategy {strategy!r} with plan={plan!r}; a plan of parallelize_module "
            f"expected for 'tp', and none for others"
        )
    away = parameters_away(net, strategy)
    bare = without_units(net, _sizes_alone, _memo(net)) if away else _on_meta(net)
    if strategy == "tp":
        return _tensor_parallel(bare, plan, workers, optimizer, inputs, away)
    if strategy == "pp":
        return _stages(bare, workers, optimizer, inputs, away)
    if away:
        found = _memory(bare, [], strategy, workers, 0, optimizer, None, None)
        parts = [None if inputs is None else _part(inputs, workers, k) for k in range(workers)]
        kept = [_activations(bare, part) for part in parts]
        return tuple(
            moved(replace(found, activations=here, host=host), bare, away, optimizer, _state)
            for here, host in kept
        )
    groups = _groups(bare, units)
    return tuple(
        _memory(bare, groups, strategy, workers, k, optimizer, inputs, param_dtype)
        for k in range(workers)
    )


def _memory(
    net: Any,
    groups: Sequence[Sequence[Tensor]],
    strategy: str,
    workers: int,
    worker: int,
    optimizer: Any,
    inputs: Any,
    param_dtype: Any,
) -> Memory:
    every = [*net.parameters()]
    trained = [p for p in every if p.requires_grad]
    blocks = [_rows(p, workers, worker) for p in every]
    mine = [block for block, p in zip(blocks, every, strict=True) if p.requires_grad]
    shards = strategy in ("zero2", "zero3")
    whole = messages = 0
    if shards:
        dtype = param_dtype
        sizes = [
            sum(_bytes(p, dtype if p.is_floating_point() else None) for p in g) for g in groups
        ]
        # Of stage 3 backward has one unit's, and their gradients before the sum.
        whole = (sum(sizes) if strategy == "zero2" else max(sizes, default=0)) * (workers > 1)
    elif workers > 1:
        messages = sum(_bytes(p, summed_dtype(p.dtype)) for p in trained)
        halves = [p for p in trained if summed_dtype(p.dtype) != p.dtype]
        messages += sum(_bytes(p, summed_dtype(p.dtype)) for p in halves)
    kept = mine if strategy != "dp" else trained
    state = _state(kept, optimizer)
    if strategy == "zero1" and workers > 1:
        state += sum(map(_bytes, mine))  # blocks of its own, that its steps update
    part = None if inputs is None else _part(inputs, workers, worker)
    activations, host = _activations(net, part)
    return Memory(
        parameters=sum(map(_bytes, blocks if shards else every)),
        buffers=sum(map(_bytes, net.buffers())),
        gradients=sum(map(_bytes, mine if shards else trained)),
        optimizer=state,
        whole=whole,
        messages=messages,
        activations=activations,
        host=host,
    )


def _tensor_parallel(
    net: Any, plan: Any, workers: int, optimizer: Any, inputs: Any, away: Away
) -> tuple[Memory, ...]:
    """Memory of tensor-parallel workers: threads make the module parallel without memory, and its
    forward is that of torch's tracers, which knows shapes alone."""

    def program(backend: Any) -> Memory:
        axis = Mesh(backend, tp=-1)["tp"]
        mine = parallelize_module(_on_meta(net), axis, plan)
        trained = [p for p in mine.parameters() if p.requires_grad]
        plain = Memory(
            parameters=sum(map(_bytes, mine.parameters())),
            buffers=sum(map(_bytes, mine.buffers())),
            gradients=sum(map(_bytes, trained)),
            optimizer=_state(trained, optimizer),
            whole=0,
            messages=0,
        )
        made: Memory = moved(plain, mine, away, optimizer, _state)
        if inputs is None:
            return made
        with FakeTensorMode(allow_non_fake_inputs=True):
            given = tree_map_only(Tensor, _fake, tuple(inputs))
            _make_fake(mine)
            activations, host = _activations(mine, given)
        return replace(made, activations=activations, host=made.host + host)

    return tuple(launch(program, workers, "threads"))


def _stages(net: Any, workers: int, optimizer: Any, inputs: Any, away: Away) -> tuple[Memory, ...]:
    stages = [*net]
    if len(stages) != workers:
        raise ArgumentError(f"estimate: {workers} workers, and {len(stages)} stages in the module")
    found, given = [], None if inputs is None else tuple(tree_map_only(Tensor, _meta, inputs))
    for (name, _), stage in zip(net.named_children(), stages, strict=True):
        trained = [p for p in stage.parameters() if p.requires_grad]
        kept, host = _activations(stage, given)
        if given is not None:
            given = (stage(*given).detach().requires_grad_(),)
        plain = Memory(
            parameters=sum(map(_bytes, stage.parameters())),
            buffers=sum(map(_bytes, stage.buffers())),
            gradients=sum(map(_bytes, trained)),
            optimizer=_state(trained, optimizer),
            whole=0,
            messages=0 if given is None else sum(map(_bytes, given)),
            activations=kept,
            host=host,
        )
        found.append(moved(plain, stage, inside(away, name), optimizer, _state))
    return tuple(found)


def _on_meta(net: Any) -> Any:
    return copy.deepcopy(net, _memo(net))


def _sizes_alone(unit: Any) -> list[Tensor]:
    """Whole parameters of a unit, without values."""
    spaces = unit.spaces.values()
    return [torch.empty(X.global_shape, dtype=torch_dtype(X.dtype), device="meta") for X in spaces]


def _memo(net: Any) -> dict[int, Any]:
    """Tensors without values in place of a module's, by their `id`."""
    memo: dict[int, Any] = {}
    for tensor in (*net.parameters(), *net.buffers()):
        made: Any = tensor.detach().to("meta")
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = made
    return memo


def _groups(net: Any, units: Sequence[str] | None) -> list[list[Tensor]]:
    """Parameters of each call of `fully_shard`."""
    modules: Mapping[str, Any] = dict(net.named_modules())
    names = [name for name, _ in net.named_children()] if units is None else [*units]
    if unknown := [name for name in names if name not in modules]:
        raise ArgumentError(f"estimate: units {unknown}; names of submodules expected")
    groups: list[list[Tensor]] = []
    seen: set[Tensor] = set()
    for one in (*(modules[name] for name in names), net):
        groups.append([p for p in one.parameters() if p not in seen])
        seen.update(groups[-1])
    return groups


def _rows(p: Tensor, workers: int, worker: int) -> Tensor:
    """This worker's block of a parameter, balanced."""
    if not p.ndim:
        return p.detach().clone()
    return p.detach().new_empty((balanced(p.shape[0], workers)[worker], *p.shape[1:]))


def _state(parameters: Sequence[Tensor], optimizer: Any) -> int:
    """Bytes of an optimizer's state after a step."""
    if optimizer is None or not parameters:
        return 0
    made = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    for p in made:
        p.grad = torch.empty_like(p)
    one = optimizer(made)
    one.step()
    return sum(_bytes(x) for x in tree_leaves([*one.state.values()]) if isinstance(x, Tensor))


def _part(inputs: Any, workers: int, worker: int) -> Any:
    def rows(x: Tensor) -> Tensor:
        return _meta(x)[: balanced(x.shape[0], workers)[worker]] if x.ndim else _meta(x)

    return tree_map_only(Tensor, rows, tuple(inputs))


def _meta(x: Tensor) -> Tensor:
    return x.detach().to("meta").requires_grad_(x.requires_grad)


def _fake(x: Tensor) -> Tensor:
    """A tensor without values of torch's tracers, in whose mode this is."""
    made = torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype)
    if isinstance(x, torch.nn.Parameter):
        return torch.nn.Parameter(made, x.requires_grad)
    return made.requires_grad_(x.requires_grad)


def _make_fake(net: Any) -> None:
    """Give a module on the meta device parameters and buffers of torch's tracers."""
    made: dict[Tensor, Any] = {}
    for module in net.modules():
        for name, p in module._parameters.items():
            if p is not None and p not in made:
                made[p] = _fake(p)
            module._parameters[name] = None if p is None else made[p]
        for name, x in module._buffers.items():
            if x is not None and x not in made:
                made[x] = _fake(x)
            module._buffers[name] = None if x is None else made[x]


def _activations(net: Any, inputs: Any) -> tuple[int | None, int]:
    """Bytes that autograd keeps of a forward, but for parameters, here and in host memory; memory
    that tensors share counts once."""
    if inputs is None:
        return None, 0
    known = {p.untyped_storage()._cdata for p in (*net.parameters(), *net.buffers())}
    kept: dict[int, Any] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, _itself):
        result = net(*inputs)
    lists = (m for m in net.modules() if isinstance(m, Offloadable))
    windows = {id(one.window): one.window for one in lists if one.window is not None}
    here = sum(x.untyped_storage().nbytes() for x in kept.values())
    here += sum(window.bytes_here for window in windows.values())
    away = sum(window.bytes_away for window in windows.values())
    del result
    return here, away


def _itself(x: Tensor) -> Tensor:
    return x


def _bytes(x: Tensor, dtype: Any = None) -> int:
    size = x.element_size() if dtype is None else torch.empty((), dtype=dtype).element_size()
    return x.numel() * size
