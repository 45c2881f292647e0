"""torch.compile(fullgraph=True) and torch.export go through operators, layers and tensor-parallel
nets; eager calls keep forward mode and double backward."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

import linop
from linop import Region, Space
from linop.backends.autograd.functions import FOLLOWS
from linop.errors import BackendError
from support.layers.compiled import nets_of_layers, tensor_parallel_nets
from support.requirements import needs_mpi
from support.workers import on_ranks

if not FOLLOWS:
    pytest.skip("torch's compiler runs modules since 2.13", allow_module_level=True)

X = Space([Region("x", 4)])
XS = torch.arange(4.0, dtype=torch.float64)


def net_of(factor: float) -> Any:
    return torch.nn.Sequential(torch.nn.Tanh(), linop.autograd.Module(factor * linop.identity(X)))


def test_operators_are_nodes_of_one_graph() -> None:
    net = net_of(3)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for module, twin in ((compiled, net), (torch.export.export(net, (XS,)).module(), net)):
        x, y = XS.clone().requires_grad_(), XS.clone().requires_grad_()
        module(x).square().sum().backward()
        twin(y).square().sum().backward()
        assert torch.equal(x.grad, y.grad)
    for copied in (copy.deepcopy(net), net_of(5)):  # not taken for the first
        again = torch.compile(copied, fullgraph=True, backend="aot_eager")
        assert torch.equal(again(XS), copied(XS))
    jacobian = torch.func.jacfwd(net)(XS)  # eager calls are as before
    assert torch.equal(torch.func.jacrev(net)(XS), jacobian)
    assert torch.autograd.gradgradcheck(net, XS.clone().requires_grad_())


def test_plans_are_run_as_often_as_in_eager_calls() -> None:
    """Forward's stay in forward, also if their argument is kept; equal ones are not made one."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import default_partition

    twice, counts = linop.autograd.Module(3 * linop.identity(X)), []

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice = twice

        def forward(self, x: Any) -> Any:
            return self.twice(x) + self.twice(x) * x.sin()

    def counted(graph: Any, inputs: Any) -> Any:
        counts.append(sum("linop.plan" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=counted, bw_compiler=counted, partition_fn=default_partition)
    torch.compile(Net(), fullgraph=True, backend=backend)(
        XS.clone().requires_grad_()
    ).sum().backward()
    assert counts == [2, 2]


def test_another_operator_is_traced_again() -> None:
    net = net_of(3)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(XS), 3 * XS.tanh())
    net[1].op = 7 * linop.identity(X)
    assert torch.equal(compiled(XS), 7 * XS.tanh())


def test_attributes_of_layers_are_those_of_the_trace() -> None:
    """As the docs say: a copy, or a reset, has others."""
    norm = linop.layers.LayerNorm(linop.Partition((1, 1)), 4).double()
    x = torch.stack([XS, XS.square()])
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    compiled(x)
    norm.eps = 1.0
    copied = torch.compile(copy.deepcopy(norm), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(copied(x), norm(x))
    torch.compiler.reset()
    torch.testing.assert_close(compiled(x), norm(x))


def test_shapes_alone() -> None:
    """Of tensors without values."""
    with torch._subclasses.FakeTensorMode() as mode:
        y = net_of(3)(mode.from_tensor(XS))
    assert (y.shape, y.dtype) == (XS.shape, XS.dtype)


def test_graphs_whose_operator_is_gone() -> None:
    net_of(3)(XS)
    torch.compile(net_of(3), fullgraph=True, backend="aot_eager")(XS)
    with pytest.raises(BackendError, match="the operator of this graph is gone"):
        torch.ops.linop.plan([XS], None, 10**9)


@needs_mpi
def test_nets_on_ranks() -> None:
    on_ranks(2, tensor_parallel_nets)
    on_ranks(2, nets_of_layers)
