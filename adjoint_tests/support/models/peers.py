"""torch's own strategies, on ranks over gloo, for the same cells: `PEERS` by the name of linop's,
``peer(group, case) -> Seen`` with a mesh of torch's.

Losses are multiplied by the number of workers, by which torch divides its gradients.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from support.models.cases import Case, batch, loss, optimizer, part, start
from support.models.model import Cut
from support.models.strategies import Unfit
from support.models.twin import Seen

Peer = Callable[[Any, Case], Seen]


@contextmanager
def gloo(comm: Any, mesh: Mapping[str, int]) -> Iterator[Any]:
    """torch's default group of all ranks of a communicator, and a mesh of it. Collective."""
    from torch.distributed.device_mesh import init_device_mesh

    with tempfile.TemporaryDirectory() as own:
        store = comm.bcast(own)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}/store", rank=comm.rank, world_size=comm.size
        )
        try:
            yield init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        finally:
            comm.Barrier()
            torch.distributed.destroy_process_group()


def _whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _state(net: Any) -> dict[str, Any]:
    named = [*net.named_parameters(), *net.named_buffers()]
    return {name.removeprefix("module."): _whole(x.detach()) for name, x in named}


def _seen(case: Case, net: Any, sgd: Any, replica: int = 0, over: int = 1) -> Seen:
    losses, unused = [], set()
    for step in range(case.steps):
        net.zero_grad(set_to_none=True)
        rows = part(case, step, replica)
        value = loss(case, step, net(*rows.arguments, **rows.options), rows.target)
        (value * over).backward()
        losses.append(value.item())
        if not step:
            unused = {
                n.removeprefix("module.") for n, p in net.named_parameters() if p.grad is None
            }
        sgd.step()
    names = {n.removeprefix("module.") for n, _ in net.named_parameters()}
    return Seen(losses, unused, names, _state(net), replica)


def distributed_data_parallel(mesh: Any, case: Case, zero: bool = False) -> Seen:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    group = mesh["dp"].get_group()
    model = start(case)
    net = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    sgd = optimizer(case, net.parameters())
    if zero:
        sgd = ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.SGD, group, lr=0.05, momentum=0.9, weight_decay=case.decay
        )
    return _seen(case, net, sgd, mesh["dp"].get_local_rank(), mesh["dp"].size())


def _sharded(case: Case, net: Any, mesh: Any, reshard: bool) -> Any:
    from torch.distributed.fsdp import fully_shard

    for name in case.family.layers:
        for layer in dict(net.named_modules()).get(name, []):
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(net, mesh=mesh, reshard_after_forward=reshard)


def fsdp2(mesh: Any, case: Case, reshard: bool = True) -> Seen:
    net = _sharded(case, start(case), mesh["dp"], reshard)
    dp = mesh["dp"]
    return _seen(case, net, optimizer(case, net.parameters()), dp.get_local_rank(), dp.size())


def style(cut: Cut, arguments: int) -> Any:
    """torch's style of a cut, of a module that is called with so many arguments by position."""

    def layout(given: Any, usual: Any) -> Any:
        if given is None:
            return usual
        return Shard(given) if isinstance(given, int) else Replicate()

    if cut.how == "norm":
        return SequenceParallel(use_local_output=True)
    if cut.how == "heads' norm":
        return SequenceParallel(sequence_dim=2, use_local_output=True)
    if cut.how == "attention":
        return ColwiseParallel()
    if cut.how == "input" and cut.named:
        return PrepareModuleInput(
            input_kwarg_layouts={cut.named: layout(cut.inputs, None)},
            desired_input_kwarg_layouts={cut.named: layout(cut.outputs, Replicate())},
            use_local_output=True,
        )
    if cut.how == "input":
        others = (None,) * (arguments - 1)
        return PrepareModuleInput(
            input_layouts=(layout(cut.inputs, None), *others),
            desired_input_layouts=(layout(cut.outputs, Replicate()), *others),
            use_local_output=True,
        )
    if cut.how == "output":
        return PrepareModuleOutput(
            output_layouts=layout(cut.inputs, Replicate()),
            desired_output_layouts=layout(cut.outputs, Replicate()),
        )
    if cut.how == "column":
        return ColwiseParallel(
            input_layouts=layout(cut.inputs, Replicate()),
            output_layouts=layout(cut.outputs, Shard(-1)),
        )
    return RowwiseParallel(output_layouts=layout(cut.outputs, Replicate()))


def _cut(case: Case, net: Any, mesh: Any, sequence: bool) -> Any:
    plan = case.family.plan({**case.configuration, "workers": mesh.size()}, sequence)
    if plan is None:
        raise Unfit("no layers that the strategy has a cut for")
    styles, counts = {}, _arguments(case)
    for name, module in net.named_modules():
        for pattern, cut in plan.items():
            if fnmatchcase(name, pattern) and case.cuts(pattern) and cut.how != "numbers":
                styles[name] = style(cut, counts.get(name, 1))
                if cut.how == "row" and isinstance(module, torch.nn.Embedding):
                    styles[name] = RowwiseParallel(
                        input_layouts=Replicate(),
                        output_layouts=Replicate() if cut.outputs is None else Shard(cut.outputs),
                    )
    return parallelize_module(net, mesh, styles)


def _arguments(case: Case) -> dict[str, int]:
    """The number of arguments by position of each submodule's call."""
    model, counts = start(case), {}

    def noted(name: str, module: Any, arguments: tuple[Any, ...]) -> None:
        counts[name] = len(arguments)

    for name, module in model.named_modules():
        module.register_forward_pre_hook(partial(noted, name))
    rows = part(case, 0, 0)
    model(*rows.arguments, **rows.options)
    return counts


def dtensor(mesh: Any, case: Case, sequence: bool = False) -> Seen:
    net = _cut(case, start(case), mesh["tp"], sequence)
    return _seen(case, net, optimizer(case, net.parameters()))


def fsdp2_and_dtensor(mesh: Any, case: Case) -> Seen:
    net = _sharded(case, _cut(case, start(case), mesh["tp"], False), mesh["dp"], True)
    dp = mesh["dp"]
    return _seen(case, net, optimizer(case, net.parameters()), dp.get_local_rank(), dp.size())


def pipelining(mesh: Any, case: Case) -> Seen:
    from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

    model = start(case)
    name = case.point(dict(model.named_modules()))
    one, at, step = batch(case, 0).rows(0, case.rows), mesh["pp"].get_local_rank(), 0
    cut = pipeline(model, one.arguments, dict(one.options), {name: SplitPoint.BEGINNING})
    replica = mesh["dp"].get_local_rank() if "dp" in case.mesh else 0
    stage = cut.build_stage(at, torch.device("cpu"), mesh["pp"].get_group())
    own = stage.submod

    def term(output: Any, target: Any) -> Any:
        return loss(case, step, output, target)

    table = Schedule1F1B(stage, case.micro_batches, loss_fn=term, scale_grads=False)
    sgd = optimizer(case, own.parameters())
    losses, unused = [], set()
    for step in range(case.steps):
        own.zero_grad(set_to_none=True)
        rows, found = part(case, step, replica), []
        if at == 0:
            table.step(*rows.arguments, **rows.options)
        else:
            table.step(target=rows.target, losses=found, **rows.options)
            losses.append(sum(x.item() for x in found))
        if not step:
            unused = {n for n, p in own.named_parameters() if p.grad is None}
        for p in own.parameters() if "dp" in case.mesh else ():
            if p.grad is not None:
                torch.distributed.all_reduce(p.grad, group=mesh["dp"].get_group())
        sgd.step()
    states: list[Any] = [None, None]
    mine = {n: x.detach() for n, x in own.state_dict().items()}
    torch.distributed.all_gather_object(states, mine, mesh["pp"].get_group())
    state = {k: v for one in states for k, v in one.items()}
    names = {n for n, _ in own.named_parameters()}
    return Seen(losses, unused, names, state, replica)


def checkpointing(mesh: Any, case: Case) -> Seen:
    """Each member of the chains, or of the repeated layers, in torch's wrapper."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return _wrapped(case, checkpoint_wrapper)


def offloading(mesh: Any, case: Case) -> Seen:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

    return _wrapped(case, offload_wrapper)


def _wrapped(case: Case, wrap: Callable[[Any], Any]) -> Seen:
    net = start(case)
    for name in case.family.layers:
        if (chain := dict(net.named_modules()).get(name)) is not None:
            for key, member in [*chain.named_children()]:
                chain._modules[key] = wrap(member)
    seen = _seen(case, net, optimizer(case, net.parameters()))

    def plain(key: str) -> str:
        return key.replace("_checkpoint_wrapped_module.", "")

    assert seen.state is not None
    state = {plain(k): v for k, v in seen.state.items()}
    return Seen(seen.losses, {*map(plain, seen.unused)}, {*map(plain, seen.names)}, state)


PEERS: dict[str, Peer] = {
    "data parallel": distributed_data_parallel,
    "zero1": partial(distributed_data_parallel, zero=True),
    "zero2": partial(fsdp2, reshard=False),
    "zero3": fsdp2,
    "tensor parallel": dtensor,
    "sequence parallel": partial(dtensor, sequence=True),
    "pipeline": pipelining,
    "checkpoint": checkpointing,
    "offload": offloading,
    "zero3 × tensor": fsdp2_and_dtensor,
}
