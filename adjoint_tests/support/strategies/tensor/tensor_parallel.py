"""Tensor and sequence parallel networks beside their sequential twins. Needs torch."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import linop
from linop import COPIES, REPLICATED, Partition, TensorSpace, layers
from linop.backends.engine.base import Backend
from linop.errors import PartitionError
from linop.layers.agreement.input_agreement import agreement_of
from linop.strategies import (
    ColwiseParallel,
    CrossEntropyLoss,
    Mesh,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from support.strategies.tensor.tensor_networks import (
    MLP,
    TOLERANCE,
    WORDS,
    Attention,
    Block,
    Case,
    LanguageModel,
    equal,
    filled,
    layout_or_whole,
    plan,
    values,
)

Tensor = Any
nn = torch.nn


def same_gradients(net: Any, twin: Any, tolerance: float = TOLERANCE) -> None:
    """Gradients of all parameters are the twin's."""
    spaces = {
        f"{path}.{name}".lstrip("."): (space, layer.worker)
        for path, layer in net.named_modules()
        for name, space in getattr(layer, "spaces", {}).items()
    }
    wholes = dict(twin.named_parameters(remove_duplicate=False))
    seen = 0
    for name, p in net.named_parameters(remove_duplicate=False):
        wanted = wholes[name].grad
        if name in spaces:
            space, worker = spaces[name]
            wanted = wanted[space.slices(worker)]
        found = torch.zeros_like(p) if p.grad is None else p.grad
        equal(f"gradient of {name}", found, wanted, tolerance)
        seen += 1
    assert seen


def axis_of(backend: Backend) -> Any:
    """All workers."""
    return Mesh(backend, tp=-1)["tp"]


def part(shape: Any, backend: Backend, dim: int) -> Any:
    """Slices of this worker's block of a tensor that is split along a dimension."""
    return TensorSpace(shape, Partition((backend.workers or 1,)), axes=[dim]).slices(
        backend.worker or 0
    )


def is_exact(
    backend: Backend, hidden: int, sequence: bool, bias: bool = True, length: int = 5
) -> None:
    """A perceptron of whole numbers, with ReLU and a squared loss, is its twin: equal bits."""
    twin = filled(MLP(4, hidden, "relu", bias), 0, whole=True)
    layout, ends = (
        layout_or_whole(1 if sequence else None),
        {"output_layouts": 1} if sequence else {},
    )
    net = parallelize_module(
        copy.deepcopy(twin),
        axis_of(backend),
        {"up": ColwiseParallel(layout), "down": RowwiseParallel(**ends)},
        inputs=layout,
    )
    whole = values(2, length, 4, seed=1, whole=True)
    here = part(whole.shape, backend, 1) if sequence else ...
    target = values(2, length, 4, seed=2, whole=True)
    for _ in range(2):  # gradients accumulate
        x, y = whole.clone().requires_grad_(), whole[here].clone().requires_grad_()
        (twin(x) - target).square().sum().backward()
        out = net(y)
        (out - target[here]).square().sum().backward()
        assert torch.equal(out, twin(x)[here])
        assert torch.equal(y.grad, x.grad[here])
    same_gradients(net, twin, 0)


def is_its_twin(backend: Backend, case: Case) -> None:
    """Losses, gradients and state of a language model are those of its twin, in two steps."""
    axis = axis_of(backend)
    twin = filled(LanguageModel(case), case.seed)
    net = parallelize_module(copy.deepcopy(twin), axis, plan(case, axis.size))
    entropy = CrossEntropyLoss(axis)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.5) for m in (twin, net)]
    for step in range(2):
        draw = torch.Generator().manual_seed(step)
        text = torch.randint(WORDS, (case.batch, case.length + 1), generator=draw)
        x, target = text[:, :-1], text[:, 1:].flatten()
        wanted = nn.functional.cross_entropy(twin(x).flatten(0, 1), target)
        loss = entropy(net(x).flatten(0, 1), target)
        for one, optimizer in zip((wanted, loss), optimizers, strict=True):
            optimizer.zero_grad()
            one.backward()
        equal("loss", loss.detach(), wanted.detach())
        same_gradients(net, twin)
        for optimizer in optimizers:
            optimizer.step()
    state = layers.gather_state(net)
    assert list(state) == list(twin.state_dict())
    for name, value in twin.state_dict().items():
        equal(name, state[name], value)
    other = parallelize_module(filled(LanguageModel(case), 9), axis, plan(case, axis.size))
    layers.scatter_state(other, state)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    for p, q in zip(net.buffers(), other.buffers(), strict=True):
        assert torch.equal(p, q)


def counted(backend: Backend) -> dict[str, int]:
    """Calls of operators that send messages, by operator and direction; without the agreement."""
    return {
        f"{row.operator} {row.direction}": row.calls
        for row in backend.counters()
        if row.messages and not row.operator.startswith("B_")
    }


def counts_as_megatron(backend: Backend, sequence: bool) -> None:
    """Messages of a block: two all-reduces forward and two backward, or their halves; and those of
    the gradients of the norms and biases."""
    axis = axis_of(backend)
    case = Case(width=8, sequence=sequence, length=8, bias=False)
    block = filled(Block(8, 4, 4, "LayerNorm", False), 0)
    given = plan(case)
    inside = {name[9:]: style for name, style in given.items() if name.startswith("blocks.*.")}
    net = parallelize_module(block, axis, inside, inputs=layout_or_whole(1 if sequence else None))
    whole = values(2, 8, 8, seed=1)
    here = part(whole.shape, backend, 1) if sequence else ...
    x = whole[here].clone().requires_grad_()
    net(x).sum().backward()
    before = counted(axis.backend)
    net(x).sum().backward()
    after = counted(axis.backend)
    each = {name: n - before[name] for name, n in after.items() if n > before[name]}
    n = backend.workers or 1
    wanted = {"R_{C→R} forward": 2, "E_{R→C} adjoint": 2}
    if sequence:
        wanted = {"G_{1→C} forward": 2, "RS_{C→1} forward": 2}
        # backward, and one all-reduce for the two parameters of each norm
        wanted |= {"G_{1→C} adjoint": 2, "RS_{C→1} adjoint": 2, "E_{R→C} adjoint": 2}
    assert each == (wanted if n > 1 else {}), each


def composes_with_data_parallel(backend: Backend) -> None:
    """On a grid of 2 × 2, gradients that are summed over the copies of the model are the twin's of
    the global batch, without any factor (Megatron-LM #7452, torchtitan #1733, #2972)."""
    mesh = Mesh(backend, dp=2, tp=2)
    twin = filled(MLP(4, 6, "relu"), 0, whole=True)
    net = parallelize_module(
        copy.deepcopy(twin), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    sizes = (2, 3)  # of the batches of the copies
    whole, target = (values(5, 4, seed=s, whole=True) for s in (1, 2))
    copy_ = mesh["dp"].index
    mine = slice(sum(sizes[:copy_]), sum(sizes[: copy_ + 1]))
    (twin(whole) - target).square().sum().backward()
    (net(whole[mine]) - target[mine]).square().sum().backward()
    for p in net.parameters():
        op = linop.all_reduce(TensorSpace(p.shape, mesh["dp"].partition, axes=[COPIES]))
        p.grad = linop.autograd.apply(op, p.grad, mesh["dp"].backend).detach()
    same_gradients(net, twin, 0)


def norms_agree(backend: Backend) -> None:
    """Gradients of norms on a split sequence are the same bits on all workers (Megatron-LM #1446),
    in float32 too."""
    axis = axis_of(backend)
    net = filled(LanguageModel(Case(sequence=True)), 0).float()
    net = parallelize_module(net, axis, plan(Case(sequence=True)))
    text = torch.randint(WORDS, (3, 7), generator=torch.Generator().manual_seed(0))
    CrossEntropyLoss(axis)(net(text).flatten(0, 1), text.flatten()).backward()
    mine = {name: p.grad.tolist() for name, p in net.named_parameters() if "norm" in name}
    assert len(mine) == 10
    said = agreement_of(axis.backend).gather_objects(mine)
    assert all(theirs == said[0] for theirs in said)


def takes_any_strides(backend: Backend) -> None:
    """Inputs and gradients that are transposed, strided or expanded (pytorch #120386)."""
    axis = axis_of(backend)
    twin = filled(MLP(4, 6, "relu"), 0, whole=True)
    plan = {"up": ColwiseParallel(1, output_layouts=-1), "down": RowwiseParallel(output_layouts=1)}
    net = parallelize_module(copy.deepcopy(twin), axis, plan, inputs=1)
    whole = values(4, 5, 6, seed=1, whole=True).transpose(0, 2)[::2]
    here = part(whole.shape, backend, 1)
    for change in (
        lambda y: y.sum(),
        lambda y: (y.transpose(0, 1) * 2).sum(),
        lambda y: y[::2].sum(),
    ):
        x, y = whole.clone().requires_grad_(), whole[here].detach().requires_grad_()
        change(twin(x)).sum().backward()
        change(net(y)).sum().backward()
        assert torch.equal(y.grad, x.grad[here])
    same_gradients(net, twin, 0)


def row_parallel_alone(backend: Backend) -> None:
    """The gradient of a whole input of a row-parallel module is whole on every worker, not 1/tp of
    it (nanotron #46); and of a column-parallel one's, with a whole output."""
    axis = axis_of(backend)
    styles = [
        RowwiseParallel(input_layouts=REPLICATED),
        ColwiseParallel(output_layouts=REPLICATED),
        RowwiseParallel(input_layouts=0, output_layouts=0),
        ColwiseParallel(0, 0),
    ]
    for style in styles:
        whole = values(5, 6, seed=1, whole=True)
        layout = REPLICATED if style.output_layouts is REPLICATED else 0
        twin = filled(nn.Linear(6, 7), 0, whole=True)
        net = parallelize_module(copy.deepcopy(twin), axis, style, inputs=layout)
        here = part(whole.shape, backend, 0)[:1] if layout == 0 else ...
        x, y = whole.clone().requires_grad_(), whole[here].clone().requires_grad_()
        twin(x).square().sum().backward()
        out = net(y)
        out.square().sum().backward()
        assert torch.equal(out, twin(x)[here]) and torch.equal(y.grad, x.grad[here]), style
        for name, p in net.named_parameters():
            wanted = getattr(twin, name).grad[net.spaces[name].slices(net.worker)]
            assert torch.equal(p.grad, wanted), (style, name)


def clips_the_norm_of_all(backend: Backend, groups: int = 4) -> None:
    """The norm of all gradients, not of this worker's (torchtitan #596)."""
    axis, case = axis_of(backend), Case(sequence=True, groups=groups)
    twin = filled(LanguageModel(case), 0)
    net = parallelize_module(copy.deepcopy(twin), axis, plan(case, axis.size))
    text = torch.randint(WORDS, (3, 7), generator=torch.Generator().manual_seed(0))
    for model in (twin, net):
        y = model(text).flatten(0, 1)
        loss = CrossEntropyLoss(axis) if model is net else nn.CrossEntropyLoss()
        loss(y, text.flatten()).backward()
    found = layers.clip_grad_norm_(net, 0.1)
    equal("norm", found, nn.utils.clip_grad_norm_(twin.parameters(), 0.1))
    same_gradients(net, twin)


def follows_new_calls(backend: Backend) -> None:
    """New shapes, evaluation, fixed shapes, recomputation, copies of the net; parameters that are
    made on the meta device."""
    axis, case = axis_of(backend), Case(sequence=True)
    twin = filled(LanguageModel(case), 0)
    net = parallelize_module(copy.deepcopy(twin), axis, plan(case))
    copied = copy.deepcopy(net)
    shell = copy.deepcopy(twin).to("meta")
    shell.head.weight = shell.words.weight  # torch unties them
    empty = parallelize_module(shell, axis, plan(case))
    layers.scatter_state(empty, twin.state_dict())
    entropy = CrossEntropyLoss(axis, reduction="sum")

    def compare(model: Any, text: Tensor) -> None:
        twin.zero_grad()
        model.zero_grad()
        nn.functional.cross_entropy(
            twin(text).flatten(0, 1), text.flatten(), reduction="sum"
        ).backward()
        entropy(model(text).flatten(0, 1), text.flatten()).backward()
        same_gradients(model, twin)

    for batch, length in ((3, 7), (1, 5), (3, 7)):
        text = torch.randint(WORDS, (batch, length), generator=torch.Generator().manual_seed(batch))
        for model in (net, copied, empty):
            compare(model, text)
        with torch.no_grad():
            y = net.eval()(text)
            equal("logits", y, twin(text)[part((*text.shape, WORDS), backend, 2)])
        net.train()
        with layers.fixed_shapes():
            compare(net, text)
    block = net.blocks[0]
    forward = block.forward
    for context in (None, linop.autograd.checkpoint_context):
        options = {} if context is None else {"context_fn": context}
        block.forward = partial(checkpoint, forward, use_reentrant=False, **options)
        compare(net, text)


def entropies_are_torch_s(backend: Backend) -> None:
    """All options of the loss, more workers than classes included."""
    axis = axis_of(backend)
    draw = torch.Generator().manual_seed(0)
    for shape in ((5, 11), (3, 2, 4), (4, 7, 2, 2)):
        target = torch.randint(shape[1], (shape[0], *shape[2:]), generator=draw)
        target.view(-1)[1] = -100
        whole = values(*shape, seed=1)
        whole[0, 1] = -float("inf") if target.view(-1)[0] != 1 else 0.0
        for reduction in ("mean", "sum", "none"):
            for smoothing in (0.0, 0.2):
                if smoothing and torch.isinf(whole).any():
                    whole = values(*shape, seed=1)
                options = {"reduction": reduction, "label_smoothing": smoothing}
                x = whole.clone().requires_grad_()
                y = whole[part(shape, backend, 1)].clone().requires_grad_()
                wanted = nn.CrossEntropyLoss(**options)(x, target)
                found = CrossEntropyLoss(axis, **options)(y, target)
                upstream = values(*wanted.shape, seed=2)
                wanted.backward(upstream)
                found.backward(upstream)
                equal("loss", found.detach(), wanted.detach())
                equal("gradient", y.grad, x.grad[part(shape, backend, 1)])


def entropies_of_large_logits(backend: Backend) -> None:
    """No digit is lost to an offset of the logits, exact in float32; under autocast, a loss of
    float32."""
    axis, target = axis_of(backend), torch.tensor([0, 9, 4])
    whole = values(3, 11, seed=1).float().mul(16).round().div(16)
    for smoothing in (0.0, 0.2):
        entropy = CrossEntropyLoss(axis, label_smoothing=smoothing)
        losses = [
            entropy((whole + offset)[part((3, 11), backend, 1)], target)
            for offset in (0.0, 2.0**17, -(2.0**17))
        ]
        assert losses[0] == losses[1] == losses[2]
    with torch.autocast("cpu", torch.bfloat16):
        x = whole.bfloat16()
        wanted = nn.functional.cross_entropy(x, target, label_smoothing=0.2)
        found = entropy(x[part((3, 11), backend, 1)], target)
    assert found.dtype is wanted.dtype is torch.float32
    equal("loss", found, wanted, 1e-6)


def looks_up(backend: Backend) -> None:
    """Embeddings cut by words or by features, whole or split outputs, with padding: exact, on more
    workers than words too."""
    axis = axis_of(backend)
    for words, padding in ((11, None), (5, 3), (2, 0)):
        twin = filled(nn.Embedding(words, 5, padding_idx=padding), 0, whole=True)
        text = torch.randint(words, (3, 4), generator=torch.Generator().manual_seed(1))
        wanted = twin(text)
        wanted.square().sum().backward()
        for kind in (RowwiseParallel, ColwiseParallel):
            for layout in (REPLICATED, 1, -1):
                style = kind(output_layouts=layout)
                net = parallelize_module(copy.deepcopy(twin), axis, style)
                here = ... if layout is REPLICATED else part(wanted.shape, backend, layout)
                y = net(text)
                y.square().sum().backward()
                assert torch.equal(y, wanted[here]), style
                block = net.spaces["weight"].slices(net.worker)
                assert torch.equal(net.weight.grad, twin.weight.grad[block]), style


def prepares_the_net_itself(backend: Backend) -> None:
    """Conversions of the input and output of the net that is made parallel: of attention, one
    message each way."""
    axis = axis_of(backend)
    twin = filled(Attention(6, 4, 4), 0)
    given: dict[str, Any] = {
        "": PrepareModuleInput(REPLICATED, COPIES),
        "[qkv]": ColwiseParallel(COPIES, heads=4),
        "o": RowwiseParallel(heads=4),
    }
    net = parallelize_module(copy.deepcopy(twin), axis, given)
    x, y = (values(2, 5, 6, seed=1).requires_grad_() for _ in range(2))
    wanted, found = twin(x), net(y)
    wanted.square().sum().backward()
    found.square().sum().backward()
    equal("output", found, wanted)
    equal("gradient", y.grad, x.grad)
    same_gradients(net, twin)
    each = {"R_{C→R} forward": 1, "E_{R→C} adjoint": 1}
    assert counted(axis.backend) == (each if axis.size > 1 else {})


def prepares_chains(backend: Backend) -> None:
    """Conversions before and after a Sequential, and of modules in it, count in the comparison of
    layouts along it."""
    axis = axis_of(backend)
    twin = filled(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3)), 0)
    given: dict[str, Any] = {
        "": PrepareModuleInput(1, COPIES),
        "0": ColwiseParallel(COPIES),
        "1": PrepareModuleOutput(-1, REPLICATED),
        "2": ColwiseParallel(output_layouts=1),
    }
    x = values(2, 8, 3, seed=1)
    wanted = twin(x)
    wanted.square().sum().backward()
    here = part(x.shape, backend, 1)
    net = parallelize_module(copy.deepcopy(twin), axis, given, inputs=1)
    found = net(x[here])
    found.square().sum().backward()
    equal("output", found, wanted[here])
    same_gradients(net, twin)
    wrong = {**given, "": PrepareModuleInput(1, REPLICATED)}
    that = r"0: an input a copy on each .* expected; that of PrepareModuleInput of the net is whole"
    with pytest.raises(PartitionError, match=that):
        parallelize_module(copy.deepcopy(twin), axis, wrong, inputs=1)
    inside = {f"a.{name}".rstrip("."): style for name, style in wrong.items()}
    with pytest.raises(PartitionError, match=that.replace("the net", "a")):
        parallelize_module(nn.ModuleDict({"a": copy.deepcopy(twin)}), axis, inside, inputs=1)
    wrong = {**given, "1": PrepareModuleOutput(-1, COPIES)}
    that = r"2: an input whole .* expected; that of PrepareModuleOutput of 1 is a copy on each"
    with pytest.raises(PartitionError, match=that):
        parallelize_module(copy.deepcopy(twin), axis, wrong, inputs=1)
