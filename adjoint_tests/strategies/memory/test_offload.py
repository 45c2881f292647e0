"""Chains whose saved tensors are moved to another memory are the plain chains, bit for bit, and
keep what is predicted at each point; in host memory, and on a simulated device."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import copy

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import linop
from linop.errors import ArgumentError, BackendError
from linop.strategies import Mesh, Reversible, checkpoint, fully_shard, offload
from support.device.simulated import ARRAYS
from support.strategies.data.shards import weak
from support.strategies.memory.saved_memory import (
    WIDTH,
    Held,
    layer,
    loss,
    pair,
    reversible,
    storing,
)
from support.strategies.tensor.tensor_networks import equal, filled, values

INPUT = 5 * WIDTH * 8
"""Bytes of a module's input."""
LAYER = INPUT + 2 * 2 * INPUT
"""Bytes that `layer` saves: its input, and those of its GELU and second Linear."""


class Projections(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Saves parts of one tensor, a mask, an expanded tensor, and memory that is changed later."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(WIDTH, 3 * WIDTH)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Any) -> Any:
        q, k, v = self.all(x).chunk(3, -1)
        weights = torch.softmax(q @ k.mT, -1)
        y = torch.where(v > 0, v, 0.1 * v).sin() * self.scale.expand(WIDTH)
        return torch.relu_(weights @ y) + x


def chain(depth: int, drop: float, projections: bool) -> Any:
    modules = [Projections() if projections and k % 2 else layer(drop) for k in range(depth)]
    return filled(nn.Sequential(*modules), 0)


def is_plain(net: Any, twin: Any, micro: int, order: int) -> None:
    """Gradients of micro-batches, all forwards before the backwards, in one order or the other."""
    each = []
    for model in (net, twin):
        torch.manual_seed(3)
        x = [values(5, WIDTH, seed=m).requires_grad_() for m in range(micro)]
        losses = [model(one).square().sum() for one in x]
        for one in losses[::order]:
            one.backward()
        each.append([*losses, *(one.grad for one in x), *(p.grad for p in model.parameters())])
    for found, wanted in zip(*each, strict=True):
        assert torch.equal(found, wanted)


WAYS = st.tuples(
    st.integers(1, 5),  # depth
    st.integers(0, 3),  # prefetch
    st.none() | st.integers(1, 3),  # every
    st.sampled_from([0.0, 0.3]),  # drop
    st.booleans(),  # projections
    st.integers(1, 3),  # micro-batches
    st.sampled_from([1, -1]),
    st.sampled_from(["activations", "parameters", "activations parameters"]),
)


def drawn(way: Any) -> None:
    depth, prefetch, every, drop, projections, micro, order, moved = way
    twin = chain(depth, drop, projections)
    moves = {key: key in moved for key in ("activations", "parameters")}
    net = offload(copy.deepcopy(twin), prefetch=prefetch, **moves)
    assert list(net.state_dict()) == list(twin.state_dict())
    if every is not None:
        net = checkpoint(net, every=every)
    is_plain(net, twin, micro, order)
    assert net.bytes_here == net.bytes_leaving == 0
    if net.window is not None:
        assert net.window.bytes_here == net.window.bytes_away == 0


@given(WAYS)
def test_plain_in_host_memory(way: Any) -> None:
    drawn(way)


@given(WAYS)
def test_plain_on_a_simulated_device(way: Any) -> None:
    linop.launch(lambda backend: drawn(way), 1, "threads", arrays=ARRAYS)


def test_a_part_of_a_storage() -> None:
    # Less than half of it, and not its beginning: in the window it is where it was.
    net, twin = chain(2, 0.0, False), chain(2, 0.0, False)
    batch = values(9, WIDTH, seed=0)
    for model in (offload(net, prefetch=2), twin):
        model(batch[6:8]).square().sum().backward()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def noted(net: Any, note: Any) -> None:
    """Call `note` after the forward of each module, and before its backward."""

    def after(module: Any, x: Any, y: Any) -> None:
        note()
        y.register_hook(lambda gradient: note())

    for module in net:
        module.register_forward_hook(after)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("depth", [1, 4, 7])
def test_bytes_at_each_point(depth: int, prefetch: int) -> None:
    net = offload(chain(depth, 0.0, False), prefetch=prefetch)
    window, points = net.window, []

    def note(*unused: Any) -> None:
        points.append((window.bytes_here // LAYER, window.bytes_away // LAYER))

    noted(net, note)
    x = values(5, WIDTH, seed=1).requires_grad_()
    with Held(net) as held:
        y = net(x)
    inside = min(depth, prefetch + 1)
    # In both memories; and the output, and the input, if it is not in the window.
    given = INPUT if inside < depth else 0
    assert held.bytes == depth * LAYER + INPUT + given
    assert window.bytes_here == inside * LAYER
    assert window.bytes_away == (depth - inside) * LAYER
    y.square().sum().backward()
    forward = [(min(k + 1, inside), max(0, k + 1 - inside)) for k in range(depth)]
    # Before the backward of module k that of k + 1 has ended: what it needed is forgotten.
    backward = [
        (inside if k == depth - 1 else min(k + 1, prefetch), min(k + 1, depth - inside))
        for k in reversed(range(depth))
    ]
    assert points == forward + backward
    assert window.bytes_here == window.bytes_away == 0


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("depth", [1, 4, 7])
def test_bytes_of_parameters_at_each_point(depth: int, prefetch: int) -> None:
    """Copies are here for the module that computes, and for so many ahead, in the first forward,
    too; gradients, on their way for as long as the copies were."""
    net = offload(chain(depth, 0.0, False), prefetch=prefetch, activations=False, parameters=True)
    size = sum(p.numel() * p.element_size() for p in net[0].parameters())
    points: list[Any] = []
    here: list[Any] = []
    """True if the memory of copies that modules had is in use."""

    def note(module: Any, *unused: Any) -> None:
        if module is not None:
            here.append(weak(module[0].weight))
        unstarted = sum(alive() for alive in here) * size - net.bytes_here
        assert unstarted <= 0, "more copies than are counted"
        points.append((net.bytes_here / size, net.bytes_leaving / size))

    for module in net:
        module.register_forward_pre_hook(note)
        module.register_forward_hook(
            lambda module, x, y: y.register_hook(lambda gradient: note(None)) and None
        )
    for _ in range(2):
        y = net(values(5, WIDTH, seed=1).requires_grad_())
        assert not any(alive() for alive in here)
        y.square().sum().backward()
        last = depth - 1
        forward = [(min(prefetch, last - k) + 1, 0) for k in range(depth)]
        # Before the backward of a module, whose own copies are brought in by it.
        backward = [
            (0 if k == last else min(prefetch, k + 1), min(prefetch, last - k))
            for k in reversed(range(depth))
        ]
        assert points == forward + backward
        assert net.bytes_here == net.bytes_leaving == 0
        assert not any(alive() for alive in here)
        del points[:], here[:]


def test_parameters_move_while_the_device_computes() -> None:
    """O.H of parameters and O of gradients are queued on streams of their own."""

    def program(backend: Any) -> None:
        under_way = []
        net = offload(chain(4, 0.0, False), activations=False, parameters=True)
        streams = [unit._bridge.queue.queue for unit in net.units]

        def note(*unused: Any) -> None:
            under_way.append([k for k, s in enumerate(streams) if s.added > s.done])

        noted(net, note)
        net(values(5, WIDTH, seed=1).requires_grad_()).square().sum().backward()
        # In forward copies of the next module's; before the backward of one copies of its own, and
        # gradients of the one after it.
        assert under_way == [[1], [2], [3], [], [], [2, 3], [1, 2], [0, 1]]

    linop.launch(program, 1, "threads", arrays=ARRAYS)


def test_parameters_train_as_plain_ones() -> None:
    """Steps of an optimizer in host memory, states, and no gradients; parameters without dimensions
    and frozen ones."""
    twin = nn.Sequential(Projections(), nn.Tanh(), layer(), nn.Linear(WIDTH, WIDTH)).double()
    filled(twin, 0)
    twin[3].bias.requires_grad_(False)
    twin[0].register_parameter("unused", nn.Parameter(torch.tensor(1.0)))
    net = offload(copy.deepcopy(twin), activations=False, parameters=True)
    adams = [torch.optim.Adam(model.parameters(), lr=2.0**-5) for model in (net, twin)]
    x = values(5, WIDTH, seed=1)
    for _ in range(3):
        for model, adam in zip((net, twin), adams, strict=True):
            adam.zero_grad()
            model(x).square().sum().backward()
            adam.step()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    with torch.no_grad():
        net.load_state_dict({key: 2 * value for key, value in net.state_dict().items()})
        twin.load_state_dict(net.state_dict())
        assert torch.equal(net(x), twin(x))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_shards_in_host_memory_of_a_simulated_device(prefetch: int) -> None:
    """G O.H of shards of two workers; their gradients, O G.H."""
    twin = chain(4, 0.0, True)
    rows = values(4, 5, WIDTH, seed=1)
    sum(twin(x).square().sum() for x in rows).backward()

    def program(backend: Any) -> None:
        axis = Mesh(backend, dp=2)["dp"]
        net = copy.deepcopy(twin)
        for p in net.parameters():
            p.grad = None
        for module in net:
            fully_shard(module, axis, prefetch=prefetch, offload=True)
        for x in rows[2 * axis.index :][:2]:
            net(x).square().sum().backward()
        for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
            mine = q.grad.tensor_split(2)[axis.index] if len(q) > 1 else q.grad[axis.index :][:1]
            equal(name, p.grad, mine.reshape(p.shape), 1e-12)

    linop.launch(program, 2, "threads", arrays=ARRAYS)


def test_moves_while_the_device_computes() -> None:
    """O and O.H are queued on a stream of their own, and nobody waits for them while the next
    module computes."""

    def program(backend: Any) -> None:
        under_way = []
        net = offload(chain(5, 0.0, False))

        def note(*unused: Any) -> None:
            stream = net.window._mover.stream.queue
            under_way.append(stream.added > stream.done)

        noted(net, note)
        net(values(5, WIDTH, seed=1)).square().sum().backward()
        # The first to leave does so while the third computes. The last but one is still here.
        assert under_way == [False, False, True, True, True, True, False, True, True, True]

    linop.launch(program, 1, "threads", arrays=ARRAYS)


def test_again_and_gradients_of_gradients() -> None:
    net = chain(4, 0.0, True)
    results = []
    for model in (net, offload(net, prefetch=0)):
        x = values(5, WIDTH, seed=1).requires_grad_()
        y = model(x).square().sum()
        inputs = [x, *model.parameters()]
        first = torch.autograd.grad(y, inputs, retain_graph=True)
        again = torch.autograd.grad(y, inputs, create_graph=True)
        twice = torch.autograd.grad(sum(g.square().sum() for g in again), inputs)
        results.append((*first, *again, *twice))
        with torch.no_grad():
            results[-1] += (model.eval()(x),)
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)


class Versions(nn.Module):  # type: ignore[misc]
    """Saves one memory twice, before and after it was changed; backward needs the second alone."""

    def forward(self, x: Any) -> Any:
        y = x * 1
        unused = y.sin()  # saves y
        y.detach().mul_(2)
        return y.cos() + 0 * unused.detach()


def test_versions() -> None:
    """A tensor saved after a change in place is the changed one."""
    results = []
    for net in (nn.Sequential(Versions()), offload(nn.Sequential(Versions()))):
        x = values(5, 8, seed=1).requires_grad_()
        net(x).sum().backward()
        results.append(x.grad)
    assert torch.equal(*results)


def test_reversible_blocks() -> None:
    """They keep one pair, and nothing is left to be moved; chains in them are moved."""
    net = reversible(3)
    twin = copy.deepcopy(net)
    outside = offload(copy.deepcopy(net), prefetch=0)
    inside = copy.deepcopy(net)
    for block in inside:
        block.f = offload(block.f, prefetch=0)
    wanted = pair()
    loss(storing(twin, wanted)).backward()
    for model in (outside, inside):
        x = pair()
        y = model(x)
        if model is outside:
            assert model.window.bytes_here == model.window.bytes_away == 0
        else:
            assert all(isinstance(b, Reversible) and b.f.window.bytes_away > 0 for b in model)
        loss(y).backward()
        for one, other in zip(x, wanted, strict=True):
            equal("input", one.grad, other.grad, 1e-11)
        for (name, p), q in zip(model.named_parameters(), twin.named_parameters(), strict=True):
            equal(name, p.grad, q[1].grad, 1e-11)


class Late(nn.Module):  # type: ignore[misc]
    """Changes what was saved."""

    def forward(self, x: Any) -> Any:
        y = x.sin()
        x.add_(1)
        return y


@pytest.mark.parametrize("after", [0, 2])
def test_refused(after: int) -> None:
    with pytest.raises(
        ArgumentError, match=r"offload: a torch.nn.Sequential or ModuleList expected, given Lin"
    ):
        offload(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match=r"prefetch=-1; at least 0 expected"):
        offload(nn.Sequential(), prefetch=-1)
    with pytest.raises(ArgumentError, match=r"prefetch"):
        offload(nn.Sequential(), prefetch=1.5)
    with pytest.raises(ArgumentError, match=r"activations=True or parameters=True expected"):
        offload(nn.Sequential(), activations=False)
    with pytest.raises(ArgumentError, match=r"has no parameters to be moved"):
        offload(nn.Sequential(nn.Tanh()), parameters=True)
    shared = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    shared[1].weight = shared[0].weight
    with pytest.raises(ArgumentError, match=r"'1.weight' is one of module '0', too"):
        offload(shared, parameters=True)
    moved = offload(nn.Sequential(nn.Linear(2, 2)), parameters=True)
    with pytest.raises(ArgumentError, match=r"'0.weight' is shard already; .*offload=True"):
        offload(moved, parameters=True)
    net = offload(nn.Sequential(nn.Tanh(), Late(), *[nn.Tanh() for _ in range(after)]))
    with pytest.raises(BackendError, match="was changed in place after it was saved"):
        net(values(5, 8, seed=1).requires_grad_()).sum().backward()


@pytest.mark.parametrize("every", [1, 2])
def test_frozen_parameters_in_checkpoints(every: int) -> None:
    torch.manual_seed(0)
    twin = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    twin[1].requires_grad_(False)
    twin[2].weight.requires_grad_(False)
    net = checkpoint(offload(copy.deepcopy(twin), parameters=True), every=every)
    for model in (net, twin):
        model(torch.ones(2, 3)).square().sum().backward()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad) if q.requires_grad else p.grad is None
