"""Distributed layers against their sequential twins of torch.nn, as SPMD programs: on threads, and
on ranks. Needs torch.

A `Case` is a small description, which Hypothesis draws and which travels to the ranks. Every worker
computes the whole with the twin, and compares its blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

import linop
from linop import Partition, TensorSpace
from linop.backends import Backend
from linop.spaces.blocks import is_disjoint
from linop.spaces.partition import balanced
from support.contracts.plans import mine

WIDE = torch.float64
TOLERANCE = 1e-12
"""Of results of size 1 in float64: sums in another order."""
_TWINS = threading.Lock()


@dataclass(frozen=True)
class Case:
    """A layer, and what it is given.

    Args:
        layer: its name in linop.layers; that of its twin in torch.nn, if `twin` says no other.
        partitions: its first arguments; the first one is the input's.
        shape: of the global input.
        arguments, options: those of torch.nn.
        places: keyword arguments that torch.nn does not have.
        output: the partition of the output, by default that of the input.
        kept: so many first dimensions of the output are cut as those of the input; all others are
            balanced.
        sizes: lengths of the output's blocks in other dimensions, where they are not balanced.
        ends: whether grids of two axes split the first and the last dimension.
        seed: of parameters, input, and where the input is cut.
        call: keyword arguments of a call, beside the input.
    """

    layer: str
    partitions: tuple[Partition, ...]
    shape: tuple[int, ...]
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Any] = field(default_factory=dict)
    output: Partition | None = None
    twin: str | None = None
    kept: int = 0
    ends: bool = False
    sizes: dict[int, Any] = field(default_factory=dict)
    seed: int = 0
    call: dict[str, Any] = field(default_factory=dict)

    @property
    def workers(self) -> int:
        """How many it needs."""
        placed = [p for p in self.places.values() if isinstance(p, Partition)]
        every = [*self.partitions, *placed, *([self.output] if self.output else [])]
        return 1 + max(w for partition in every for w in partition.workers)


def is_its_twin(backend: Backend, case: Case) -> None:
    """Output, gradient of the input, and gradients of the parameters are the twin's."""
    layer, twin = made(backend, case)
    P_x, P_y = case.partitions[0], case.output or case.partitions[0]
    whole = normal(case.shape, case.seed).requires_grad_()
    wanted = twin(whole, **case.call)
    upstream = normal(tuple(wanted.shape), case.seed + 1)
    wanted.backward(upstream)
    axes = [
        (0, len(case.shape) - 1) if case.ends and P.ndim == 2 else range(P.ndim) for P in (P_x, P_y)
    ]
    X = cut(case.shape, P_x, case.seed, axes[0])
    kept = {d: X.bounds[d] for d in range(case.kept)}
    Y = TensorSpace(tuple(wanted.shape), P_y, axes=axes[1], bounds=kept, sizes=case.sizes)
    x = block(X, whole, backend, gradient=True)
    y = layer(x, **case.call)
    weights = block(Y, upstream, backend)
    if mine(backend) in P_y:
        same(y, block(Y, wanted, backend))
    else:
        assert (y.ndim, y.shape[-1], y.dtype) == (2, 0, WIDE), y
        weights = torch.empty_like(y)
    y.backward(weights)
    if mine(backend) in P_x:
        same(x.grad, block(X, whole.grad, backend))
    same(x, block(X, normal(case.shape, case.seed), backend))  # nothing is changed
    same(upstream, normal(tuple(wanted.shape), case.seed + 1))
    same_parameters(layer, twin, gradients=True)


def made(backend: Backend, case: Case) -> tuple[Any, Any]:
    """The layer and its twin, of one seed."""
    with _TWINS:  # others may be drawing theirs
        torch.manual_seed(case.seed)
    kind = getattr(linop.layers, case.layer)
    layer = kind(*case.partitions, *case.arguments, **case.options, **case.places).to(WIDE)
    with _TWINS:
        torch.manual_seed(case.seed)
        twin = getattr(torch.nn, case.twin or case.layer)(*case.arguments, **case.options).to(WIDE)
    same_parameters(layer, twin)
    return layer, twin


def same_parameters(layer: Any, twin: Any, gradients: bool = False) -> None:
    """Every worker's blocks are those of the twin's parameters, or their gradients; and each
    element of them is on some worker."""
    wholes = dict(twin.named_parameters())
    for name, parameter in layer.named_parameters():
        whole, part = (wholes[name], parameter)
        if gradients:
            whole, part = whole.grad, parameter.grad
        same(part, whole[layer.spaces[name].slices(layer.worker)])
    assert set(layer.spaces) >= set(wholes)
    for name, whole in wholes.items():
        assert layer.spaces[name].global_shape == tuple(whole.shape)
        assert is_disjoint(layer.spaces[name])


def same(given: Any, wanted: Any, tolerance: float = TOLERANCE) -> None:
    """Tensors of equal shape and dtype, and equal up to the tolerance."""
    assert given is not None, "no gradient"
    assert (given.shape, given.dtype) == (wanted.shape, wanted.dtype), (given, wanted)
    if wanted.numel():
        worst = (given - wanted).abs().max().item()
        assert worst <= tolerance * max(1, wanted.abs().max().item()), (worst, given, wanted)


def normal(shape: tuple[int, ...], seed: int) -> Any:
    """A random tensor, with a generator of its own: threads share torch's."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=WIDE)


def block(X: TensorSpace, whole: Any, backend: Backend, gradient: bool = False) -> Any:
    """This worker's block of a global tensor: a view, so that strides are those of the whole."""
    worker = mine(backend)
    if worker not in X.partition:
        return torch.empty((X.global_shape[0], 0), dtype=whole.dtype, requires_grad=gradient)
    return whole.detach()[X.slices(worker)].requires_grad_(gradient)


def cut(
    shape: tuple[int, ...], P: Partition, seed: int, axes: Sequence[int] | None = None
) -> TensorSpace:
    """A tensor cut over a partition; into blocks of any lengths, empty ones too, if the seed is
    odd."""
    rng = np.random.default_rng(seed)
    sizes = {}
    axes = range(P.ndim) if axes is None else axes
    for d, parts in zip(axes, P.shape, strict=True):
        n = shape[d]
        stops = sorted(rng.integers(0, n + 1, parts - 1))
        lengths = np.diff([0, *stops, n]).tolist()
        sizes[d] = lengths if seed % 2 else balanced(n, parts)
    return TensorSpace(shape, P, axes=axes, sizes=sizes)


@st.composite
def grids(draw: Any, most: int, ndim: int, workers: int | None = None) -> Partition:
    """Grids of so many axes and at most so many workers, which may be any of the first ones."""
    shape = []
    for _ in range(ndim):
        shape.append(draw(st.integers(1, max(1, most // int(np.prod(shape, dtype=int))))))
    count = int(np.prod(shape, dtype=int))
    chosen = draw(st.permutations(range(workers or most)))[:count]
    return Partition(draw(st.permutations(shape)), chosen)
