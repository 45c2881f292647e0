"""linop's strategies, each applied to any model of the zoo as its page says, on one worker of a
program: `STRATEGIES` by name, ``strategy(backend, case) -> Seen``. Public names of linop alone, so
that other versions of it can be tried."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any

import torch

from linop import COPIES, REPLICATED, layers, schedules, strategies
from linop.backends.engine.base import Backend
from linop.errors import LinopError
from support.models.cases import Case, batch, loss, optimizer, part, seeded, start
from support.models.model import Batch, Cut, entropy
from support.models.twin import READ, Seen

Strategy = Callable[[Backend, Case], Seen]
Forward = Callable[[Any, Batch], Any]


class Unfit(Exception):
    """The model has nothing that the strategy could be applied to."""


def called(net: Any, rows: Batch) -> Any:
    return net(*rows.arguments, **rows.options)


def _steps(
    case: Case, net: Any, sgd: Any, replica: int, forward: Forward = called
) -> tuple[list[float], set[str]]:
    """Losses of all steps, and names of the parameters without gradient in the first."""
    losses, unused = [], set()
    for step in range(case.steps):
        net.zero_grad(set_to_none=True)
        rows = part(case, step, replica)
        if case.drops and case.options.get("seeded"):
            seeded(case, step, replica)
        value = loss(case, step, forward(net, rows), rows.target)
        value.backward()
        losses.append(value.item())
        if not step:
            unused = {_key(n) for n, p in net.named_parameters() if p.grad is None}
        sgd.step()
    return losses, unused


def _key(name: str) -> str:
    return name.removeprefix("module.")


def _seen(
    case: Case,
    net: Any,
    sgd: Any,
    gathered: Callable[[], Mapping[str, Any]],
    replica: int = 0,
    **other: Any,
) -> Seen:
    read = _read(case, net) if case.options.get("read") else None
    losses, unused = _steps(case, net, sgd, replica, **other)
    names = {_key(n) for n, _ in net.named_parameters()}
    keys, written = _own_state(net)
    seen = Seen(losses, unused, names, None, replica, keys, written, read)
    return _with_state(seen, gathered)


def _with_state(seen: Seen, gathered: Callable[[], Mapping[str, Any]]) -> Seen:
    """With the state of the whole model: that workers have different ones is found here."""
    try:
        seen.state = dict(gathered())
    except LinopError as error:
        seen.lost = " ".join(str(error).split())
    return seen


def _own_state(net: Any) -> tuple[tuple[str, ...] | None, dict[str, Any] | None]:
    """Keys and values that ``torch.save(net.state_dict())`` would write; None if it is refused."""
    try:
        state = net.state_dict()
    except LinopError:
        return None, None
    return tuple(state), {_key(k): v for k, v in state.items() if torch.is_tensor(v)}


def _read(case: Case, net: Any) -> dict[tuple[str, str], Any]:
    """Parameters that a method of a user's reads, beside a forward, where that is not refused; or
    an error that is none of linop's."""
    random, found = Random(case.seed), {}
    shapes = {name: p.shape for name, p in start(case).named_parameters()}
    for way, run in READ.items():
        name = random.choice([name for name, _ in net.named_parameters()])
        try:
            found[_key(name), way] = run(_attribute(net, name), shapes[_key(name)])
        except LinopError:
            pass
        except Exception as error:
            found[_key(name), way] = error
    return found


def _attribute(net: Any, name: str) -> Any:
    owner, _, attribute = name.rpartition(".")
    return getattr(net.get_submodule(owner), attribute)


def data_parallel(backend: Backend, case: Case, **options: Any) -> Seen:
    axis = strategies.Mesh(backend, **case.mesh)["dp"]
    net = strategies.DataParallel(start(case), axis, **options)
    sgd = optimizer(case, net.parameters())
    return _seen(case, net, sgd, net.module.state_dict, axis.index)


def zero1(backend: Backend, case: Case) -> Seen:
    axis = strategies.Mesh(backend, **case.mesh)["dp"]
    net = strategies.DataParallel(start(case), axis)
    sgd = strategies.ShardedOptimizer(net, axis, partial(optimizer, case))
    return _seen(case, net, sgd, net.module.state_dict, axis.index)


def _sharded(case: Case, net: Any, axis: Any, **options: Any) -> Any:
    """Each of the repeated layers by itself, then the rest."""
    for name in case.family.layers:
        with_layers = dict(net.named_modules()).get(name, [])
        for layer in with_layers:
            if any(True for _ in layer.parameters()):
                strategies.fully_shard(layer, axis, **options)
    return strategies.fully_shard(net, axis, **options)


def fully_sharded(backend: Backend, case: Case, **options: Any) -> Seen:
    axis = strategies.Mesh(backend, **case.mesh)["dp"]
    net = _sharded(case, start(case), axis, **options)
    gathered = partial(strategies.full_state_dict, net)
    forward = _by_methods if case.options.get("methods") else called
    sgd = optimizer(case, net.parameters())
    return _seen(case, net, sgd, gathered, axis.index, forward=forward)


def _by_methods(net: Any, rows: Batch) -> Any:
    """The forward of timm's models by two of their own methods, as their users write it."""
    return net.forward_head(net.forward_features(*rows.arguments))


def style(cut: Cut) -> Any:
    """linop's style of a cut."""
    layout = {"whole": REPLICATED, "copies": COPIES}
    given = {
        "input_layouts": layout.get(str(cut.inputs), cut.inputs),
        "output_layouts": layout.get(str(cut.outputs), cut.outputs),
        "heads": cut.heads,
        "queries": cut.queries,
        "packed": cut.packed,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if cut.how == "norm":
        ends = {k: v for k, v in given.items() if k.endswith("layouts")}
        return strategies.SequenceParallel(**ends)
    if cut.how == "heads' norm":
        return strategies.SequenceParallel(None)
    if cut.how == "numbers":
        return strategies.LocalAttributes(cut.named, cut.heads)
    if cut.how == "attention":
        return strategies.AttentionParallel()
    if cut.how == "input":
        wanted = given.get("output_layouts", COPIES)
        first = given["input_layouts"]
        if cut.named:
            return strategies.PrepareModuleInput((), (), {cut.named: first}, {cut.named: wanted})
        return strategies.PrepareModuleInput(first, wanted)
    if cut.how == "output":
        return strategies.PrepareModuleOutput(
            REPLICATED if cut.inputs is None else cut.inputs, given["output_layouts"]
        )
    if cut.how == "column":
        return strategies.ColwiseParallel(**given)
    return strategies.RowwiseParallel(**given)


def _cut(case: Case, net: Any, axis: Any, sequence: bool) -> Any:
    plan = case.family.plan({**case.configuration, "workers": axis.size}, sequence)
    if plan is None:
        raise Unfit("no layers that the strategy has a cut for")
    plan = {name: cut for name, cut in plan.items() if _has(net, name) and case.cuts(name)}
    return strategies.parallelize_module(net, axis, {n: style(c) for n, c in plan.items()})


def _has(net: Any, pattern: str) -> bool:
    """A submodule has such a name, but for those that only some configurations have."""
    from fnmatch import fnmatchcase

    return any(fnmatchcase(name, pattern) for name, _ in net.named_modules())


def tensor_parallel(backend: Backend, case: Case, sequence: bool = False) -> Seen:
    axis = strategies.Mesh(backend, **case.mesh)["tp"]
    net = _cut(case, start(case), axis, sequence)
    sgd = optimizer(case, net.parameters())
    return _seen(case, net, sgd, partial(layers.gather_state, net))


def data_and_tensor(backend: Backend, case: Case) -> Seen:
    mesh = strategies.Mesh(backend, **case.mesh)
    net = strategies.DataParallel(_cut(case, start(case), mesh["tp"], False), mesh["dp"])
    sgd = optimizer(case, net.parameters())
    return _seen(case, net, sgd, partial(layers.gather_state, net.module), mesh["dp"].index)


def sharded_and_tensor(backend: Backend, case: Case) -> Seen:
    mesh = strategies.Mesh(backend, **case.mesh)
    net = _sharded(case, _cut(case, start(case), mesh["tp"], False), mesh["dp"])
    sgd = optimizer(case, net.parameters())
    gathered = partial(strategies.full_state_dict, net)
    return _seen(case, net, sgd, gathered, mesh["dp"].index)


def in_stages(case: Case) -> list[Any]:
    """The model in two stages. torch exports in one thread: threads split before they start."""
    net, one = start(case), batch(case, 0).rows(0, case.rows)
    point = case.point(dict(net.named_modules()))
    return strategies.split(net, [point], one.arguments, **one.options)


def pipeline(backend: Backend, case: Case, stages: list[Any] | None = None) -> Seen:
    found: Any = in_stages(case) if stages is None else copy.deepcopy(stages)
    replica, pipes, edges = 0, backend, found.edges if hasattr(found, "edges") else None
    if "dp" in case.mesh:
        mesh = strategies.Mesh(backend, **case.mesh)
        at = mesh["pp"].index  # other stages may have parameters in common with this worker's
        mine = strategies.DataParallel(found[at], mesh["dp"])
        found = [mine if k == at else None for k in range(len(found))]
        replica, pipes = mesh["dp"].index, mesh["pp"].backend
    table = schedules.one_forward_one_backward(2, case.micro_batches)
    step = 0

    def term(output: Any, target: Any) -> Any:
        if case.mean:
            return entropy(output, target, "mean")
        return loss(case, step, output, target)

    mean = "mean" if case.mean else "sum"
    pipe = strategies.Pipeline(
        found, table, term, reduction=mean, tied=_tied(case), edges=edges, backend=pipes
    )
    pipe.train(case.trains)
    own = [pipe.stages[k] for k in pipe.stages]
    sgd = optimizer(case, [p for stage in own for p in stage.parameters()])
    losses, unused = [], set()
    for step in range(case.steps):
        pipe.zero_grad()
        rows = part(case, step, replica)
        value = pipe.step(rows.arguments, rows.target, **rows.options)
        for stage in own:
            if "dp" in case.mesh:
                stage.reduce_gradients()
        if value is not None:
            losses.append(value.item())
        if not step:
            named = [pair for stage in own for pair in stage.named_parameters()]
            unused = {_key(n) for n, p in named if p.grad is None}
        sgd.step()
    names = {_key(n) for stage in own for n, _ in stage.named_parameters()}
    seen = _with_state(Seen(losses, unused, names, None, replica), pipe.state_dict)
    seen.keys, seen.written = None if seen.state is None else tuple(seen.state), seen.state
    return seen


def _tied(case: Case) -> list[list[str]]:
    """Names of parameters that are one, of which each stage is to have one."""
    found: dict[int, list[str]] = {}
    for name, p in start(case).named_parameters(remove_duplicate=False):
        found.setdefault(id(p), []).append(name)
    return [names for names in found.values() if len(names) > 1]


def saved_memory(backend: Backend, case: Case, how: Callable[[Any], Any]) -> Seen:
    """Chains of the model in their checkpointed or offloaded form."""
    net, found = start(case), 0
    for name in case.family.chains or case.family.layers:
        owner, _, attribute = name.rpartition(".")
        if name in dict(net.named_modules()):
            setattr(net.get_submodule(owner), attribute, how(net.get_submodule(name)))
            found += 1
    if not found:
        raise Unfit("no chain")
    return _seen(case, net, optimizer(case, net.parameters()), net.state_dict)


STRATEGIES: dict[str, tuple[Strategy, Mapping[str, int]]] = {
    "data parallel": (data_parallel, {"dp": 2}),
    "zero1": (zero1, {"dp": 2}),
    "zero2": (partial(fully_sharded, reshard_after_forward=False), {"dp": 2}),
    "zero3": (fully_sharded, {"dp": 2}),
    "tensor parallel": (tensor_parallel, {"tp": 2}),
    "sequence parallel": (partial(tensor_parallel, sequence=True), {"tp": 2}),
    "pipeline": (pipeline, {"pp": 2}),
    "checkpoint": (partial(saved_memory, how=strategies.checkpoint), {"one": 1}),
    "offload": (partial(saved_memory, how=strategies.offload), {"one": 1}),
    "data × tensor": (data_and_tensor, {"dp": 2, "tp": 2}),
    "zero3 × tensor": (sharded_and_tensor, {"dp": 2, "tp": 2}),
    "data × pipeline": (pipeline, {"dp": 2, "pp": 2}),
}
"""Each with the mesh of the table."""
