"""Torch's functions of whole models, done with distributed ones: SPMD programs for two workers or
more, each ``contract(backend)``. Networks are beside their twins of torch.nn. Needs torch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch.nn.utils import parametrizations

from linop import Partition, TensorSpace, layers
from linop.backends import Backend
from linop.errors import ArgumentError, BackendError
from linop.layers.agreement.input_agreement import agreement_of
from support.contracts.plans import mine, raised, size
from support.layers.cases import WIDE, block, normal, same

FEATURES = 6


def pair(backend: Backend, **options: Any) -> tuple[Any, Any]:
    """A network and its twin, with equal parameters: cut weights, biases that one worker has, a
    convolution whose parameters others lack, and affine ones in blocks."""
    n = size(backend)
    P, M = Partition((1, n)), Partition((1, 1, n))
    with layers.seeded(3):
        net = torch.nn.Sequential(
            layers.Linear(P, FEATURES * n, 5, P_W=P, **options),
            torch.nn.Tanh(),
            layers.LayerNorm(P, 5),
            layers.Linear(P, 5, 4 * n, P_W=Partition((n, 1)), **options),
            torch.nn.Unflatten(1, (1, 4)),
            layers.Conv1d(M, 1, 2, 3, padding=1, **options),
        ).to(WIDE)
    with layers.seeded(3):
        twin = torch.nn.Sequential(
            torch.nn.Linear(FEATURES * n, 5, **options),
            torch.nn.Tanh(),
            torch.nn.LayerNorm(5),
            torch.nn.Linear(5, 4 * n, **options),
            torch.nn.Unflatten(1, (1, 4 * n)),
            torch.nn.Conv1d(1, 2, 3, padding=1, **options),
        ).to(WIDE)
    equal_blocks(net, twin)
    return net, twin


def equal_blocks(net: Any, twin: Any) -> None:
    """Every worker's parameters are its blocks of the twin's."""
    wholes = dict(twin.named_parameters())
    for name, parameter in net.named_parameters():
        layer = net.get_submodule(name.rpartition(".")[0])
        same(parameter, wholes[name][layer.spaces[name.rpartition(".")[2]].slices(layer.worker)])


def run(backend: Backend, net: Any, twin: Any, scale: float = 1.0) -> None:
    """Forward and back, both."""
    n = size(backend)
    whole = normal((3, FEATURES * n), 7)
    X = TensorSpace((3, FEATURES * n), Partition((1, n)))
    (scale * net(block(X, whole, backend)).square()).sum().backward()
    (scale * twin(whole).square()).sum().backward()


def gradients_are_clipped_by_the_norm_of_all(backend: Backend) -> None:
    for kind in (2.0, 1, inf, 3.0, -inf):
        net, twin = pair(backend)
        run(backend, net, twin)
        wanted = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5, kind)
        given = layers.clip_grad_norm_(net.parameters() if kind == 1 else net, 0.5, kind)
        same(given, wanted)
        for name, parameter in net.named_parameters():
            layer = net.get_submodule(name.rpartition(".")[0])
            where = layer.spaces[name.rpartition(".")[2]].slices(layer.worker)
            same(parameter.grad, twin.get_parameter(name).grad[where])
        assert agreement_of(backend).gather_objects(given.item()) == [given.item()] * size(backend)


def whole_parameters_count_once(backend: Backend) -> None:
    """A plain module behind a replicated or gathered tensor has its whole gradient everywhere."""
    net, twin = (torch.nn.Linear(3, 2).to(WIDE) for _ in range(2))
    net.load_state_dict({"weight": normal((2, 3), 1), "bias": normal((2,), 2)})
    twin.load_state_dict(net.state_dict())
    for model in (net, twin):
        model(normal((4, 3), 5)).square().sum().backward()
    wanted = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    same(layers.clip_grad_norm_(net, float("inf")), wanted)
    same(layers.clip_grad_norm_(net, 0.1), wanted)
    same(net.weight.grad, twin.weight.grad)


def partial_gradients_are_told(backend: Backend) -> None:
    """A plain module on a block has the gradient of that."""
    n = size(backend)
    plain = torch.nn.PReLU().to(WIDE)
    net = torch.nn.ModuleDict({"act": plain, "sum": layers.AllReduce(Partition((n,)))})
    net["sum"](plain(normal((5,), mine(backend)))).sum().backward()
    text = raised(BackendError, lambda: layers.clip_grad_norm_(net, 1.0))
    assert "the gradient of parameter 'act.weight', of shape (1,), has norm" in text, text
    assert "a plain module on a tensor that is cut has that of its block alone" in text, text


def norms_may_be_infinite(backend: Backend) -> None:
    net, twin = pair(backend)
    run(backend, net, twin)
    if mine(backend) == 1:
        net[0].weight.grad[0, 0] = inf
    text = raised(BackendError, lambda: layers.clip_grad_norm_(net, 1.0, error_if_nonfinite=True))
    assert "the norm of order 2.0 of all gradients is inf" in text, text
    assert layers.clip_grad_norm_(net, 1.0).item() == inf
    text = raised(ArgumentError, lambda: layers.clip_grad_norm_(net, 1.0, 0))
    assert "norm_type=0" in text, text


def steps_are_skipped_together(backend: Backend) -> None:
    """And made together, as the twin's."""
    for optimizer in (
        lambda ps: torch.optim.SGD(ps, 0.1),
        lambda ps: torch.optim.Adam(ps, 0.1, fused=True),
    ):
        net, twin = pair(backend)
        opts = [optimizer([{"params": model.parameters()}]) for model in (net, twin)]
        scalers = [
            layers.GradScaler(init_scale=8.0, growth_interval=1),
            torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1),
        ]
        assert all(scaler.scale(torch.ones(())).item() == 8 for scaler in scalers)
        for step in range(3):
            run(backend, net, twin, scalers[0].get_scale())
            if step == 1:
                twin[0].weight.grad[0, 0] = inf
                if mine(backend) == 0:
                    net[0].weight.grad[0, 0] = inf
            for model, opt, scaler in zip((net, twin), opts, scalers, strict=True):
                scaler.step(opt)
                scaler.update()
                model.zero_grad()
            equal_blocks(net, twin)
            assert scalers[0].get_scale() == scalers[1].get_scale() == (16, 8, 16)[step]


def initialisers_see_the_whole(backend: Backend) -> None:
    net, twin = pair(backend)
    init = torch.nn.init
    for function, arguments in (
        (init.kaiming_uniform_, {"a": 0.5, "nonlinearity": "leaky_relu"}),
        (init.xavier_normal_, {}),
        (init.orthogonal_, {"gain": 2.0}),
        (init.trunc_normal_, {"std": 0.02}),
    ):
        with layers.seeded(5):
            for k in (0, 3, 5):
                layers.initialize(net[k], "weight", function, **arguments)
                layers.initialize(net[k], "bias", init.uniform_, -1, 1)
        with layers.seeded(5):
            for k in (0, 3, 5):
                function(twin[k].weight, **arguments)
                init.uniform_(twin[k].bias, -1, 1)
        equal_blocks(net, twin)
    text = raised(ArgumentError, lambda: layers.initialize(net[0], "gain", init.ones_))
    assert "Linear has no parameter 'gain'; it has ['weight', 'bias']" in text, text
    text = raised(ArgumentError, lambda: layers.initialize(net[1], "weight", init.ones_))
    assert "given a Tanh" in text, text


def plain_modules_are_the_same_everywhere(backend: Backend) -> None:
    """Of threads too, which share torch's generator; and that goes on as if nothing had been."""
    torch.manual_seed(11)  # by all: what it was
    agreement = agreement_of(backend)
    agreement.gather_objects(None)
    before = torch.get_rng_state()
    with layers.seeded(2):
        made = torch.nn.Sequential(
            torch.nn.Linear(50, 40), torch.nn.Conv2d(3, 4, 3), torch.nn.Embedding(7, 3)
        )
        drawn = torch.rand(4), torch.randperm(9), torch.empty(3).exponential_()
    agreement.gather_objects(None)
    assert torch.equal(torch.get_rng_state(), before)
    agreement.gather_objects(None)
    values = [*[p.detach() for p in made.parameters()], *drawn]
    for theirs in agreement.gather_objects(values):
        assert all(torch.equal(one, other) for one, other in zip(values, theirs, strict=True))
    if mine(backend) == 0:
        with torch.random.fork_rng():
            torch.manual_seed(2)
            wanted = torch.nn.Linear(50, 40)
        assert torch.equal(made[0].weight, wanted.weight)


def blocks_are_refused(backend: Backend) -> None:
    """By what torch would do to each block by itself; of copies of layers, too."""
    net, _ = pair(backend)
    run(backend, *pair(backend))
    for model in (net, copy.deepcopy(net), net.float()):
        linear = model[0]
        shape = linear.spaces["weight"].global_shape
        text = raised(
            ArgumentError, lambda m=model: torch.nn.utils.clip_grad_norm_(m.parameters(), 1)
        )
        assert text == (
            f"torch.nn.utils.clip_grad_norm_: given a parameter 'weight' of a Linear, of which "
            f"this worker has a block, not the whole of shape {shape}; "
            f"linop.layers.clip_grad_norm_ takes the norm of all workers' gradients"
        )
        linear.weight.grad = torch.ones_like(linear.weight)
        for of, tensor in (("a", linear.weight), ("the gradient of a", linear.weight.grad)):
            text = raised(ArgumentError, lambda t=tensor: torch.nn.utils.get_total_norm([t]))
            assert f"get_total_norm: given {of} parameter 'weight' of a Linear" in text, text
        for name in ("kaiming_normal_", "xavier_uniform_", "orthogonal_", "normal_"):
            text = raised(
                ArgumentError, lambda name=name, w=linear.weight: getattr(torch.nn.init, name)(w)
            )
            assert f"linop.layers.initialize(layer, 'weight', torch.nn.init.{name}, …)" in text
        torch.nn.init.zeros_(linear.weight)
        for kind in (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon):
            optimizer = kind([linear.weight])
            text = raised(ArgumentError, lambda o=optimizer: o.step(lambda: torch.ones(())))
            assert f"torch.optim.{kind.__name__}: given a parameter 'weight'" in text, text
        scaler = torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD([linear.weight], 0.1)
        scaler.scale(torch.ones(()))
        text = raised(ArgumentError, lambda s=scaler, o=optimizer: s.step(o))
        assert "linop.layers.GradScaler" in text, text


def norms_of_blocks_are_refused(backend: Backend) -> None:
    n = size(backend)
    P = Partition((1, n))
    x = torch.ones(2, 2)
    for norm in (
        parametrizations.spectral_norm,
        parametrizations.weight_norm,
        parametrizations.orthogonal,
        torch.nn.utils.spectral_norm,
    ):
        layer = layers.Linear(P, 2 * n, 4, P_W=P)
        layer(x)
        norm(layer)
        text = raised(ArgumentError, lambda layer=layer: layer(x))
        assert "of 'weight', of which workers have blocks, would be that of each block" in text


def plain_modules_on_blocks_are_warned_of(backend: Backend) -> None:
    """In debug mode, where they compute otherwise; and not where they do not. Of one worker of a
    process: warnings are caught for all of its threads."""
    n = size(backend)
    agreement_of(backend).debug = True
    channels, batch = Partition((1, n, 1)), Partition((n, 1, 1))
    nn, x = torch.nn, torch.ones(2, 4, 4)

    def warned(grid: Partition, *modules: Any) -> list[str]:
        net = nn.Sequential(layers.AvgPool1d(grid, 1), *modules)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            net(x)
        return [str(one.message) for one in caught]

    cut = "given a block of a tensor that is cut in dimensions"
    also = "use a layer of linop.layers, or gather the tensor first"
    assert warned(channels, nn.ReLU(), nn.GroupNorm(2, 4)) == [
        f"Sequential.2 (GroupNorm): {cut} [1], and its parameters' gradients are of this block "
        f"alone; {also}"
    ]
    for grid, module, words in (
        (channels, nn.PReLU(), "gradients are of this block alone"),
        (batch, nn.Linear(4, 3), "gradients are of this block alone"),
        (channels, nn.GroupNorm(2, 4, affine=False), "with the elements of this block alone"),
        (channels, nn.Softmax(1), "it computes along one of them"),
        (batch, nn.BatchNorm1d(4, affine=False), "with the elements of this block alone"),
        (Partition((1, 1, n)), nn.Flatten(), "it merges dimensions [2] of the block into others"),
        (channels, nn.AvgPool1d(2), "with the elements of this block alone"),
    ):
        (text,) = warned(grid, module)
        assert words in text, text
    for grid, module in (
        (channels, nn.Sequential(nn.Tanh(), nn.GELU())),
        (channels, nn.Flatten()),
        (channels, nn.Softmax(2)),
        (batch, nn.AvgPool1d(2)),
    ):
        assert warned(grid, module) == []


def whole_tensors_are_not_refused(backend: Backend) -> None:
    """Parameters that are no blocks, or of one worker's program, are torch's own business."""
    plain = torch.nn.Linear(4, 3)
    torch.nn.init.kaiming_uniform_(plain.weight)
    plain(torch.ones(2, 4)).sum().backward()
    assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0) > 0
    assert torch.nn.utils.clip_grad_norm_(plain.weight, 1.0) > 0
    torch.optim.Adafactor(plain.parameters()).step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(torch.optim.SGD(plain.parameters(), 0.1))
    parametrizations.spectral_norm(plain)(torch.ones(2, 4))


CONTRACTS: list[Callable[[Backend], None]] = [
    gradients_are_clipped_by_the_norm_of_all,
    whole_parameters_count_once,
    partial_gradients_are_told,
    norms_may_be_infinite,
    steps_are_skipped_together,
    initialisers_see_the_whole,
    plain_modules_are_the_same_everywhere,
    blocks_are_refused,
    norms_of_blocks_are_refused,
    whole_tensors_are_not_refused,
]
ALONE = [
    gradients_are_clipped_by_the_norm_of_all,
    steps_are_skipped_together,
    initialisers_see_the_whole,
    whole_tensors_are_not_refused,
]
"""True of a single worker, too."""
