"""Cases of torch modules: each builds a linop module that moves data, and other implementations.

A case is one function, registered by `case`. All its sides differentiate with torch's autograd.
Layers with parameters, and training steps, are in `benchmarks.layers.training`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI

import linop
from benchmarks.harness.measure import After
from benchmarks.harness.sides import Rival, Run
from benchmarks.harness.task import (
    BOTH,
    BY_HAND,
    DTENSOR,
    EMPTY,
    GLOO,
    HAND_COPIES,
    PLAN,
    PROMISED,
    SIZES,
)
from benchmarks.layers import by_hand, gloo
from linop import Partition, layers
from linop.layers.agreement.input_agreement import agreement_of

Tensor = Any
Value = Callable[[Any], Any]
"""Gives this rank's array from a result or a gradient."""


def array(x: Tensor) -> Any:
    """A view of a tensor's memory, as a NumPy array."""
    return x.detach().numpy()


@dataclass
class Side:
    """One implementation of the module, with its gradient.

    Args:
        forward: computes the result, in an autograd graph.
        x: the argument, whose gradient is compared.
        gradient: of the result; None if the side has no correct backward.
        value, slope: give this rank's array of the result, and of the argument's gradient.
        tolerance: relative difference from linop's that is allowed in both; None: no comparison.
        finish: waits for a result.
        parameters: leaves whose `.grad` is filled too; None: only the argument's is computed. Some
            workers of linop hold none.
    """

    forward: Run
    x: Tensor
    gradient: Tensor | None
    value: Value = array
    slope: Value = array
    tolerance: float | None = 0
    finish: Value = lambda x: x
    parameters: Sequence[Tensor] | None = None

    def rivals(self, comm: MPI.Intracomm) -> dict[str, Rival]:
        """The timed functions, by direction."""
        forward = Rival(self._forward, self.tolerance, self.value)
        if self.gradient is None:
            return {"forward": forward}
        backward = After(comm, self._forward, self._backward)
        return {
            "forward": forward,
            "backward": Rival(backward, self.tolerance, self.slope),
            "both": Rival(self._both, self.tolerance, self.slope),
        }

    def _forward(self) -> Tensor:
        return self.finish(self.forward())

    def _backward(self, y: Tensor) -> Tensor:
        if self.parameters is None:
            return self.finish(torch.autograd.grad(y, self.x, self.gradient)[0])
        for leaf in (self.x, *self.parameters):
            leaf.grad = None
        y.backward(self.gradient)
        return self.finish(self.x.grad)

    def _both(self) -> Tensor:
        return self._backward(self._forward())


Sides = dict[str, dict[str, Rival]]
"""The timed functions, by name of the side, linop's first; then by direction."""
Build = Callable[[MPI.Intracomm, int, bool], Sides]


class Entry(NamedTuple):
    """A registered case."""

    name: str
    build: Build
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    kind: str


CASES: list[Entry] = []
BRIDGE, MOVEMENT, LAYER, STEP = "bridge", "movement", "layer", "step"


def case(
    name: str,
    kind: str,
    sizes: tuple[int, ...] = SIZES,
    ranks: tuple[int, ...] = (2, 4),
) -> Callable[[Build], Build]:
    """Register ``build(comm, bytes, peers) -> Sides``. `peers`: torch.distributed is running."""

    def register(build: Build) -> Build:
        CASES.append(Entry(name, build, sizes, ranks, kind))
        return build

    return register


def drawn(shape: Sequence[int], seed: int) -> Tensor:
    """A float32 tensor of whole numbers from -9 to 9, whose sums are exact."""
    numbers = np.random.default_rng(seed).integers(-9, 10, tuple(shape))
    return torch.from_numpy(numbers.astype(np.float32))


def leaf(shape: Sequence[int], seed: int) -> Tensor:
    return drawn(shape, seed).requires_grad_()


@dataclass
class Movement:
    """Sides of a case of a module that moves data, with one argument and one gradient for all."""

    comm: MPI.Intracomm
    module: layers.Movement
    x: Tensor
    sides: Sides = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.y = self.module(self.x).detach()
        self.gradient = drawn(self.y.shape, 100 + self.comm.rank)
        self.add("linop", partial(self.module, self.x))
        self.add(PROMISED, self._promised)

    def _promised(self) -> Tensor:
        # Entering the context takes longer than what it saves, and is not a matter of every call.
        agreement = agreement_of(self.module.backend)
        agreement.shapes_are_fixed = True
        y = self.module(self.x)
        agreement.shapes_are_fixed = False
        return y

    def add(self, name: str, forward: Run, **options: Any) -> None:
        side = Side(forward, self.x, self.gradient, **options)
        self.sides[name] = side.rivals(self.comm)


def square(size: int) -> tuple[int, int]:
    """The shape of a square float32 block of about `size` bytes."""
    side = math.isqrt(size // 4)
    return side, side


# The bridge


def _bridge(comm: MPI.Intracomm, op: linop.LinearOperator, shape: Sequence[int]) -> Sides:
    """An operator in autograd, beside its plan alone, and beside an identity Function."""
    x, g = leaf(shape, comm.rank), drawn(shape, 100 + comm.rank)
    plan = op.compile(linop.backends.current())
    ours = Side(partial(linop.autograd.apply, op, x), x, g).rivals(comm)
    given, back = array(x), array(g)
    alone = {
        "forward": Rival(partial(plan, given)),
        "backward": Rival(partial(plan.H, back)),
        "both": Rival(lambda: (plan(given), plan.H(back))[1]),
    }
    nothing = Side(partial(by_hand.Nothing.apply, x), x, g, tolerance=None).rivals(comm)
    module = layers.AllReduce(Partition((comm.size,)))
    # One after the other in one sample: what a plan moves leaves less of torch in the caches.
    together = {
        direction: Rival(partial(_one_by_one, nothing[direction].run, alone[direction].run), None)
        for direction in ("forward", "both")
    }
    sides: Sides = {"linop": ours, PLAN: alone, EMPTY: nothing, BOTH: together}
    if len(op.domain.regions) == comm.size:
        sides["layers.AllReduce"] = Side(partial(module, x), x, g, tolerance=None).rivals(comm)
    return sides


def _one_by_one(first: Run, second: Run) -> Any:
    return first(), second()


@case("bridge: all-reduce", BRIDGE, SIZES[:3])
def bridge(comm: MPI.Intracomm, size: int, peers: bool) -> Sides:
    shape = square(size)
    X = linop.TensorSpace(shape, Partition((comm.size,)), np.float32, [linop.COPIES])
    return _bridge(comm, linop.all_reduce(X), shape)


@case("bridge: local", BRIDGE, SIZES[:3])
def local(comm: MPI.Intracomm, size: int, peers: bool) -> Sides:
    """A local operator, without messages: every worker scales its block."""
    rows, columns = square(size)
    X = linop.TensorSpace((rows * comm.size, columns), Partition((comm.size, 1)), np.float32)
    sides = _bridge(comm, 2 * linop.identity(X), (rows, columns))
    del sides["layers.AllReduce"]
    return sides


# Movement


@case("Broadcast", MOVEMENT)
def broadcast(comm: MPI.Intracomm, size: int, peers: bool) -> Sides:
    shape, root = square(size), comm.rank == 0
    module = layers.Broadcast(Partition((1,)), Partition((comm.size,)))
    this = Movement(comm, module, leaf(shape if root else (0,), 1))
    this.add(BY_HAND, lambda: by_hand.Broadcast.apply(this.x, comm, shape))
    this.add(HAND_COPIES, lambda: by_hand.Broadcast.apply(this.x, comm, shape, True))
    if peers:
        x = leaf(shape, 1)
        # torch needs a full argument on the other ranks, where its gradient is zero.
        other = Side(partial(gloo.broadcast, x), x, this.gradient, slope=_only_at_root)
        this.sides[GLOO] = other.rivals(comm)
    return this.sides


@case("SumReduce", MOVEMENT)
def sum_reduce(comm: MPI.Intracomm, size: int, peers: bool) -> Sides:
    module = layers.SumReduce(Partition((comm.size,)), Partition((1,)))
    this = Movement(comm, module, leaf(square(size), comm.rank))
    this.add(BY_HAND, lambda: by_hand.SumReduce.apply(this.x, comm))
    this.add(HAND_COPIES, lambda: by_hand.SumReduce.apply(this.x, comm, True))
    if peers:
        # torch's result is undefined on the other ranks.
        gradient = this.gradient if comm.rank == 0 else torch.zeros(square(size))
        other = Side(partial(gloo.reduce, this.x), this.x, gradient, value=_only_at_root)
        this.sides[GLOO] = other.rivals(comm)
    return this.sides


def _only_at_root(y: Tensor) -> Any:
    return array(y) if MPI.COMM_WORLD.rank == 0 else np.empty(0, np.float32)


@case("AllReduce", MOVEMENT)
def all_reduce(comm: MPI.Intracomm, size: int, peers: bool) -> Sides:
    module = layers.AllReduce(Partition((comm.size,)))
    this = Movement(comm, module, leaf(square(size), comm.rank))
    this.add(BY_HAND, lambda: by_hand.AllReduce.apply(this.x, comm))
    if peers:
        this.add(GLOO, partial(gloo.all_reduce, this.x))
    return this.sides


@case("AllGather", MOVEMENT)
def all_gather(comm: MPI.Intracomm, size: int, peers: bool) -> Sides:
    module = layers.AllGather(Partition((comm.size,)))
    this = Movement(comm, module, leaf(square(size), comm.rank))
    this.add(BY_HAND, lambda: by_hand.AllGather.apply(this.x, comm))
    if peers:
        this.add(
            GLOO,
            partial(gloo.all_gather, this.x),
            finish=gloo.waited,
            value=gloo.array,
            slope=gloo.array,
        )
    return this.sides


@case("AllGather, replicated", MOVEMENT)
def replicate(comm: MPI.Intracomm, size: int, peers: bool) -> Sides:
    """All-gather into a replicated tensor: the gradient is a local slice."""
    module = layers.AllGather(Partition((comm.size,)), into=linop.REPLICATED)
    this = Movement(comm, module, leaf(square(size), comm.rank))
    this.gradient.copy_(drawn(this.gradient.shape, 100))  # the same on all
    this.add(BY_HAND, lambda: by_hand.Replicated.apply(this.x, comm))
    if peers:
        this.sides[DTENSOR] = gloo.redistributed(comm, this.x, this.gradient, "S0", "R")
    return this.sides


@case("ReduceScatter", MOVEMENT)
def reduce_scatter(comm: MPI.Intracomm, size: int, peers: bool) -> Sides:
    module = layers.ReduceScatter(Partition((comm.size,)))
    this = Movement(comm, module, leaf(square(size), comm.rank))
    this.add(BY_HAND, lambda: by_hand.ReduceScatter.apply(this.x, comm))
    if peers:
        this.add(
            GLOO,
            partial(gloo.reduce_scatter, this.x),
            finish=gloo.waited,
            value=gloo.array,
            slope=gloo.array,
        )
        this.sides[DTENSOR] = gloo.redistributed(comm, this.x, this.gradient, "P", "S0")
    return this.sides


@case("Repartition P×1 → 1×P", MOVEMENT)
def repartition(comm: MPI.Intracomm, size: int, peers: bool) -> Sides:
    p, (side, _) = comm.size, square(size)
    module = layers.Repartition(Partition((p, 1)), Partition((1, p)))
    this = Movement(comm, module, leaf((side * 2 // p, side * p // 2), comm.rank))
    this.add(BY_HAND, lambda: by_hand.RowsToColumns.apply(this.x, comm))
    if peers:
        this.add(
            GLOO,
            partial(gloo.rows_to_columns, this.x, p),
            finish=gloo.waited,
            value=gloo.array,
            slope=gloo.array,
        )
        this.sides[DTENSOR] = gloo.redistributed(comm, this.x, this.gradient, "S0", "S1")
    return this.sides


def grid_of(ranks: int) -> tuple[int, int]:
    """A nearly square grid of ranks: 2×1, 2×2."""
    rows, columns = MPI.Compute_dims(ranks, 2)
    return rows, columns


@case("HaloExchange 2-D, width 1", MOVEMENT)
def halo(comm: MPI.Intracomm, size: int, peers: bool) -> Sides:
    """Halo exchange beside one by hand; torch.distributed has none."""
    grid, shape = grid_of(comm.size), square(size)
    module = layers.HaloExchange(Partition(grid), 3, padding=1)
    this = Movement(comm, module, leaf(shape, comm.rank))
    near = by_hand.Neighbours(comm, grid, shape, (1, 1))
    this.add(BY_HAND, lambda: by_hand.Halo.apply(this.x, near))
    return this.sides
