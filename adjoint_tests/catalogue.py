"""Every operator of linop, as a factory that the generic tests run over.

A factory is registered by `operator_factory`, with the strategy of its descriptions. A new operator
is tested in every way the moment a factory for it stands here, and nobody has to remember.

    describe(name, workers)     a Hypothesis strategy of descriptions: small, plain, picklable data
    build(name, description)    the operator, the same in every process
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pylops
import scipy.sparse
import scipy.sparse.linalg
from hypothesis import reject
from hypothesis import strategies as st

import linop
from describing import (
    COMPLEX,
    COMPUTED,
    MOVED,
    Description,
    boxes,
    dtype_of,
    grids,
    holders,
    lengths,
    orders,
    pairs,
    part_of,
    partition_of,
    parts,
    region_of,
    seeds,
    shapes,
    space_of,
    spaces,
    tensor_of,
    tensors,
    whole,
    whole_numbers,
)
from linop import LinearOperator, Region, Space


@dataclass(frozen=True)
class Factory:
    """How operators of one kind are described and built."""

    name: str
    describe: Callable[[int], st.SearchStrategy[Description]]
    """The strategy of descriptions for a number of workers."""
    build: Callable[..., LinearOperator]
    """The operator, from a description's items."""
    pure: bool
    """Whether it is movement alone."""
    exact: bool
    """Whether all of its arithmetic on whole numbers is exact."""


FACTORIES: dict[str, Factory] = {}


def operator_factory(
    describe: Callable[[int], st.SearchStrategy[Description]],
    *,
    pure: bool = True,
    exact: bool = True,
) -> Callable[[Callable[..., LinearOperator]], Callable[..., LinearOperator]]:
    """Register a function as the factory of the operators it builds, under its own name."""

    def register(build: Callable[..., LinearOperator]) -> Callable[..., LinearOperator]:
        name = build.__name__
        if name in FACTORIES:
            raise ValueError(f"two factories are called {name}")
        FACTORIES[name] = Factory(name, describe, build, pure, exact)
        return build

    return register


def describe(name: str, workers: int = 8) -> st.SearchStrategy[Description]:
    """Descriptions of operators of this kind, on workers 0 to workers - 1."""
    return FACTORIES[name].describe(workers)


def build(name: str, description: Description) -> LinearOperator:
    """The operator of a description."""
    return FACTORIES[name].build(**description)


def operators(name: str, workers: int = 8) -> st.SearchStrategy[LinearOperator]:
    """Operators of this kind."""
    return describe(name, workers).map(lambda description: build(name, description))


# Memory operators (paper, section 2)


@st.composite
def _space_and_new_region(draw: st.DrawFn, workers: int) -> Description:
    new = ("new", draw(st.integers(0, 3).flatmap(lambda d: shapes(d, 3))), draw(holders(workers)))
    return {"space": draw(spaces(workers, least=0)), "region": new}


@operator_factory(_space_and_new_region)
def allocate(space: Any, region: Any) -> LinearOperator:
    return linop.allocate(space_of(space), region_of(region))


@st.composite
def _space_and_old_regions(draw: st.DrawFn, workers: int) -> Description:
    space = draw(spaces(workers))
    names = [name for name, _, _ in space["regions"]]
    return {"space": space, "names": tuple(draw(st.permutations(names))[: draw(st.integers(1, 2))])}


@operator_factory(_space_and_old_regions)
def deallocate(space: Any, names: Any) -> LinearOperator:
    whole_space = space_of(space)
    return linop.deallocate(whole_space, *(whole_space[name] for name in names))


@st.composite
def _space_and_part(draw: st.DrawFn, workers: int) -> Description:
    space = draw(spaces(workers))
    return {"space": space, "part": draw(parts(space))}


@operator_factory(_space_and_part)
def clear(space: Any, part: Any) -> LinearOperator:
    whole_space = space_of(space)
    return linop.clear(whole_space, part_of(whole_space, part))


@st.composite
def _space_and_pair(draw: st.DrawFn, workers: int) -> Description:
    space = draw(spaces(workers, least=2))
    a, b = draw(pairs(space))
    return {"space": space, "a": a, "b": b}


@operator_factory(_space_and_pair)
def add(space: Any, a: Any, b: Any) -> LinearOperator:
    whole_space = space_of(space)
    return linop.add(whole_space, part_of(whole_space, a), part_of(whole_space, b))


@operator_factory(_space_and_pair)
def copy_in_place(space: Any, a: Any, b: Any) -> LinearOperator:
    whole_space = space_of(space)
    return linop.copy(whole_space, part_of(whole_space, a), part_of(whole_space, b))


@operator_factory(_space_and_pair)
def move_in_place(space: Any, a: Any, b: Any) -> LinearOperator:
    whole_space = space_of(space)
    return linop.move(whole_space, part_of(whole_space, a), part_of(whole_space, b))


@operator_factory(_space_and_pair)
def send_recv_in_place(space: Any, a: Any, b: Any) -> LinearOperator:
    whole_space = space_of(space)
    return linop.send_recv(whole_space, part_of(whole_space, a), part_of(whole_space, b))


@st.composite
def _space_part_and_holders(draw: st.DrawFn, workers: int) -> Description:
    space = draw(spaces(workers))
    return {"space": space, "a": draw(parts(space)), "to": draw(holders(workers))}


@operator_factory(_space_part_and_holders)
def copy_out_of_place(space: Any, a: Any, to: Any) -> LinearOperator:
    whole_space = space_of(space)
    source = part_of(whole_space, a)
    return linop.copy(whole_space, source, Region("new", source.shape, to))


@operator_factory(_space_part_and_holders)
def send_recv(space: Any, a: Any, to: Any) -> LinearOperator:
    whole_space = space_of(space)
    source = part_of(whole_space, a)
    return linop.send_recv(whole_space, source, Region("new", source.shape, to))


@st.composite
def _space_part_and_larger_region(draw: st.DrawFn, workers: int) -> Description:
    described = draw(_space_part_and_holders(workers))
    before = tuple(draw(st.integers(0, 2)) for _ in described["a"][1])
    after = tuple(draw(st.integers(0, 2)) for _ in before)
    return {**described, "before": before, "after": after}


@operator_factory(_space_part_and_larger_region)
def copy_into_a_part_of_a_new_region(
    space: Any, a: Any, to: Any, before: Any, after: Any
) -> LinearOperator:
    whole_space = space_of(space)
    source = part_of(whole_space, a)
    sizes = list(zip(before, source.shape, after, strict=True))
    new = Region("new", tuple(map(sum, sizes)), to)
    return linop.copy(whole_space, source, new[tuple(slice(b, b + n) for b, n, _ in sizes)])


@st.composite
def _space_region_and_holders(draw: st.DrawFn, workers: int) -> Description:
    space = draw(spaces(workers))
    name, _, _ = draw(st.sampled_from(space["regions"]))
    return {"space": space, "name": name, "to": draw(holders(workers))}


@operator_factory(_space_region_and_holders)
def move_out_of_place(space: Any, name: Any, to: Any) -> LinearOperator:
    whole_space = space_of(space)
    region = whole_space[name]
    return linop.move(whole_space, region, Region("new", region.shape, to))


# Programs of these, and of local operators (design section 3)

Step = tuple[Any, ...]


@st.composite
def _steps_in_place(draw: st.DrawFn, space: Description, most: int, depth: int) -> tuple[Step, ...]:
    """Steps that lead from a space to itself."""
    kinds = ["add", "copy", "move", "clear", "scale", "diagonal", "power"]
    kinds += ["sum", "adjoint", "conj"] if depth else []
    steps: list[Step] = []
    for _ in range(draw(st.integers(0, most))):
        kind = draw(st.sampled_from(kinds))
        if not space["regions"]:
            kind = "scale"
        if kind in ("add", "copy", "move"):
            if max(_alike(space)) < 2:
                continue
            steps.append((kind, *draw(pairs(space))))
        elif kind == "clear":
            steps.append((kind, draw(parts(space))))
        elif kind == "scale":
            steps.append((kind, draw(st.sampled_from([-1, 2, 0]))))
        elif kind == "diagonal":
            steps.append((kind, draw(st.sampled_from(space["regions"]))[0], draw(seeds)))
        elif kind == "power":
            inner = draw(_steps_in_place(space, 1, 0))
            steps.append((kind, inner, draw(st.integers(0, 2))))
        elif kind == "sum":
            terms = tuple(draw(_steps_in_place(space, 2, 0)) for _ in range(2))
            steps.append((kind, terms))
        else:
            steps.append((kind, draw(_steps_in_place(space, 2, 0))))
    return tuple(steps)


def _alike(space: Description) -> list[int]:
    """How many different parts there are for each region to pair with: with itself one counts."""
    ranks = [len(shape) for _, shape, _ in space["regions"]]
    return [ranks.count(rank) + (rank > 0) for rank in ranks] or [0]


@st.composite
def _programs(draw: st.DrawFn, workers: int) -> Description:
    """A space, and steps that may bring regions into it and take them out."""
    rank = draw(st.integers(0, 2))
    space = draw(spaces(workers, COMPUTED, ndim=rank, least=0, most=3))
    regions = {name: (name, shape, to) for name, shape, to in space["regions"]}
    steps: list[Step] = []
    for k in range(draw(st.integers(1, 4))):
        now = {**space, "regions": tuple(regions.values())}
        kind = draw(
            st.sampled_from(["in place", "allocate", "deallocate", "copy", "move", "matrix"])
        )
        if not regions or kind == "allocate":
            shape = draw(shapes(draw(st.sampled_from([rank, 0, 1])), 3))
            regions[f"n{k}"] = new = (f"n{k}", shape, draw(holders(workers)))
            steps.append(("allocate", new))
        elif kind == "in place":
            steps += draw(_steps_in_place(now, 3, 1))
        elif kind == "deallocate":
            name = draw(st.sampled_from(sorted(regions)))
            del regions[name]
            steps.append((kind, name))
        elif kind == "copy":
            name, box = draw(parts(now))
            shape = tuple(b - a for a, b in box)
            regions[f"n{k}"] = new = (f"n{k}", shape, draw(holders(workers)))
            steps.append(("copy_new", (name, box), new))
        elif kind == "move":
            name, shape, _ = draw(st.sampled_from(now["regions"]))
            del regions[name]
            regions[f"n{k}"] = new = (f"n{k}", shape, draw(holders(workers)))
            steps.append(("move_new", name, new))
        else:
            name, _, held = draw(st.sampled_from(now["regions"]))
            del regions[name]
            regions[f"n{k}"] = new = (f"n{k}", draw(shapes(draw(st.integers(0, 2)), 3)), held)
            steps.append(("matrix", name, new, draw(seeds)))
    return {"space": space, "steps": tuple(steps)}


def _beside(op: LinearOperator, space: Space) -> LinearOperator:
    """An operator on some regions of a space, the rest passing by."""
    rest = [region for region in space if region not in op.domain]
    return linop.direct_sum(op, linop.identity(Space(rest, space.dtype))) if rest else op


def _step(space: Space, kind: str, *rest: Any) -> LinearOperator:
    """One step of a program."""
    match kind, rest:
        case (("add" | "copy" | "move"), (a, b)):
            return getattr(linop, kind)(space, part_of(space, a), part_of(space, b))
        case "clear", (part,):
            return linop.clear(space, part_of(space, part))
        case "scale", (scalar,):
            return scalar * linop.identity(space)
        case "diagonal", (name, seed):
            region = space[name]
            values = whole_numbers(region.shape, space.dtype, seed)
            return _beside(linop.diagonal(values, Space(region, space.dtype)), space)
        case "matrix", (name, new, seed):
            region, target = space[name], region_of(new)
            values = whole_numbers((target.size, region.size), space.dtype, seed)
            sides = Space(region, space.dtype), Space(target, space.dtype)
            return _beside(linop.matrix(values, *sides), space)
        case "sum", (terms,):
            first, second = (_program(space, term) for term in terms)
            return first + second
        case "adjoint", (inner,):
            return _program(space, inner).H
        case "conj", (inner,):
            return _program(space, inner).conj()
        case "power", (inner, exponent):
            return _program(space, inner) ** exponent
        case "allocate", (new,):
            return linop.allocate(space, region_of(new))
        case "deallocate", (name,):
            return linop.deallocate(space, space[name])
        case "copy_new", (a, new):
            return linop.copy(space, part_of(space, a), region_of(new))
        case "move_new", (name, new):
            return linop.move(space, space[name], region_of(new))
    raise ValueError(f"no step {kind} {rest}")


def _program(space: Space, steps: Sequence[Step]) -> LinearOperator:
    op = linop.identity(space)
    for step in steps:
        op = _step(op.codomain, *step) @ op
    return op


@operator_factory(_programs, pure=False)
def random_composition(space: Any, steps: Any) -> LinearOperator:
    return _program(space_of(space), steps)


@st.composite
def _movement_programs(draw: st.DrawFn, workers: int) -> Description:
    """Longer programs of adds, copies, moves and clears, on subsets of a few regions."""
    space = draw(spaces(workers, COMPUTED, least=2))
    steps: list[Step] = []
    for _ in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from(["add", "copy", "move", "clear"]))
        if kind == "clear":
            steps.append((kind, draw(parts(space))))
        else:
            steps.append((kind, *draw(pairs(space))))
    return {"space": space, "steps": tuple(steps)}


@operator_factory(_movement_programs)
def random_movement(space: Any, steps: Any) -> LinearOperator:
    return _program(space_of(space), steps)


# The algebra


@operator_factory(lambda workers: st.fixed_dictionaries({"space": spaces(workers, least=0)}))
def identity(space: Any) -> LinearOperator:
    return linop.identity(space_of(space))


@st.composite
def _two_spaces(draw: st.DrawFn, workers: int) -> Description:
    domain = draw(spaces(workers, least=0))
    codomain = draw(spaces(workers, (domain["dtype"],), least=0, prefix="y"))
    return {"domain": domain, "codomain": codomain}


@operator_factory(_two_spaces)
def zero(domain: Any, codomain: Any) -> LinearOperator:
    return linop.zero(space_of(domain), space_of(codomain))


@st.composite
def _program_and_scalar(draw: st.DrawFn, workers: int) -> Description:
    described = draw(_movement_programs(workers))
    scalars: list[Any] = [2, -1, 0, 3]
    if described["space"]["dtype"] in COMPLEX:
        scalars += [1j, 2 - 1j]
    return {**described, "scalar": draw(st.sampled_from(scalars))}


@operator_factory(_program_and_scalar)
def scaled(space: Any, steps: Any, scalar: Any) -> LinearOperator:
    return scalar * _program(space_of(space), steps)


@st.composite
def _program_and_power(draw: st.DrawFn, workers: int) -> Description:
    space = draw(spaces(workers, COMPUTED, least=2))
    steps = draw(_steps_in_place(space, 2, 0))
    return {"space": space, "steps": steps, "exponent": draw(st.integers(0, 3))}


@operator_factory(_program_and_power, pure=False)
def power(space: Any, steps: Any, exponent: Any) -> LinearOperator:
    return _program(space_of(space), steps) ** exponent


@st.composite
def _program_terms(draw: st.DrawFn, workers: int) -> Description:
    space = draw(spaces(workers, COMPUTED, least=2))
    terms = tuple(draw(_steps_in_place(space, 2, 1)) for _ in range(draw(st.integers(2, 3))))
    return {"space": space, "terms": terms, "minus": draw(st.booleans())}


@operator_factory(_program_terms, pure=False)
def sum_of_operators(space: Any, terms: Any, minus: Any) -> LinearOperator:
    first, *rest = (_program(space_of(space), steps) for steps in terms)
    total = first
    for term in rest:
        total = total - term if minus else total + term
    return total


@st.composite
def _blocks(draw: st.DrawFn, workers: int) -> Description:
    """Matrices or programs on spaces that share no names."""
    dtype = draw(st.sampled_from(COMPUTED))
    blocks = []
    for k in range(draw(st.integers(1, 3))):
        space = draw(spaces(workers, (dtype,), most=2, prefix=f"b{k}."))
        blocks.append((space, draw(_steps_in_place(space, 2, 0))))
    return {"blocks": tuple(blocks)}


@operator_factory(_blocks, pure=False)
def direct_sum(blocks: Any) -> LinearOperator:
    return linop.direct_sum(*(_program(space_of(space), steps) for space, steps in blocks))


@st.composite
def _blocks_to_one(draw: st.DrawFn, workers: int) -> Description:
    """Regions of one size each, and one region that all of them are mapped to."""
    dtype = draw(st.sampled_from(COMPUTED))
    to = draw(holders(workers))
    sizes = tuple(draw(st.integers(0, 4)) for _ in range(draw(st.integers(1, 3))))
    return {
        "dtype": dtype,
        "sizes": sizes,
        "common": ("y", draw(shapes(draw(st.integers(0, 2)), 3)), to),
        "seed": draw(seeds),
        "fans": tuple(draw(holders(workers)) for _ in sizes),
    }


def _fan(dtype: str, sizes: Any, common: Any, seed: int, fans: Any) -> list[LinearOperator]:
    """From a region of each size, moved to the workers of the common one, by a matrix to it."""
    target = Space(region_of(common), dtype_of(dtype))
    ops = []
    for k, (size, held) in enumerate(zip(sizes, fans, strict=True)):
        source = Space(Region(f"x{k}", size, held), dtype_of(dtype))
        moved = linop.move(source, source.regions[0], Region(f"m{k}", size, common[2]))
        values = whole_numbers((target.size, size), target.dtype, seed + k)
        ops.append(linop.matrix(values, moved.codomain, target) @ moved)
    return ops


@operator_factory(_blocks_to_one, pure=False)
def hstack(**described: Any) -> LinearOperator:
    return linop.hstack(*_fan(**described))


@operator_factory(_blocks_to_one, pure=False)
def vstack(**described: Any) -> LinearOperator:
    return linop.vstack(*(op.T for op in _fan(**described)))


# Collectives (paper, section 3)


@st.composite
def _tensor_and_target(draw: st.DrawFn, workers: int, source: Description) -> Description:
    """The same global tensor in any other blocks."""
    return draw(
        tensors(
            workers,
            dtypes=(source["dtype"],),
            shape=source["shape"],
            overlapping=True,
            name=draw(st.sampled_from(["x", "y"])),
        )
    )


def _disjoint(workers: int, **kwargs: Any) -> st.SearchStrategy[Description]:
    """A tensor each element of which is in one block."""
    return tensors(workers, roles=("split", "replicated"), **kwargs).filter(_no_copies)


def _no_copies(described: Description) -> bool:
    axes = zip(described["axes"], described["grid"], strict=True)
    return all(role != "copies" or n == 1 for role, n in axes)


@st.composite
def _repartitions(draw: st.DrawFn, workers: int) -> Description:
    source = draw(_disjoint(workers))
    return {"source": source, "target": draw(_tensor_and_target(workers, source))}


@operator_factory(_repartitions)
def repartition(source: Any, target: Any) -> LinearOperator:
    return linop.repartition(tensor_of(source), tensor_of(target))


@st.composite
def _apart(draw: st.DrawFn, workers: int) -> Description:
    """From the lower half of the workers to the upper half; more workers than elements likely."""
    if workers < 2:
        reject()
    half = workers // 2
    shape = (draw(st.integers(0, 5)), draw(st.integers(1, 3)))
    source = draw(_disjoint(half, shape=shape, dtypes=MOVED))
    grid = draw(grids(half, 1, 2))
    others = draw(orders(half, math.prod(grid)))
    return {"source": source, "grid": grid, "workers": tuple(w + half for w in others)}


@operator_factory(_apart)
def repartition_to_other_workers(source: Any, grid: Any, workers: Any) -> LinearOperator:
    return linop.repartition(tensor_of(source), linop.Partition(grid, workers))


@st.composite
def _scatters(draw: st.DrawFn, workers: int) -> Description:
    source = draw(
        tensors(workers, roles=("split",), grid=(1,), uneven=False).filter(
            lambda t: "copies" not in t["axes"] or t["shape"] == ()
        )
    )
    return {"source": source, "target": draw(_tensor_and_target(workers, source))}


@operator_factory(_scatters)
def scatter(source: Any, target: Any) -> LinearOperator:
    return linop.scatter(tensor_of(source), tensor_of(target))


@st.composite
def _gathers(draw: st.DrawFn, workers: int) -> Description:
    return {"source": draw(_disjoint(workers)), "worker": draw(st.integers(0, workers - 1))}


@operator_factory(_gathers)
def gather(source: Any, worker: Any) -> LinearOperator:
    return linop.gather(tensor_of(source), worker)


@st.composite
def _folded(draw: st.DrawFn, workers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A grid, and a smaller one that it folds to: an axis less on the left, or of extent 1."""
    large = draw(grids(workers))
    small = tuple(n if draw(st.booleans()) else 1 for n in large)
    ones = next((k for k, n in enumerate(small) if n > 1), len(small) - 1)
    return large, small[draw(st.integers(0, ones)) :]


@st.composite
def _broadcasts(draw: st.DrawFn, workers: int) -> Description:
    large, small = draw(_folded(workers))
    src, dest = draw(st.booleans()), draw(st.booleans())
    source = draw(tensors(workers, grid=small[::-1] if src else small))
    return {
        "source": source,
        "grid": large[::-1] if dest else large,
        "workers": draw(orders(workers, math.prod(large))),
        "transpose_src": src,
        "transpose_dest": dest,
    }


@operator_factory(_broadcasts)
def broadcast(
    source: Any, grid: Any, workers: Any, transpose_src: Any, transpose_dest: Any
) -> LinearOperator:
    X, partition = tensor_of(source), linop.Partition(grid, workers)
    return linop.broadcast(X, partition, transpose_src, transpose_dest)


@st.composite
def _sum_reductions(draw: st.DrawFn, workers: int) -> Description:
    large, small = draw(_folded(workers))
    src, dest = draw(st.booleans()), draw(st.booleans())
    padded = (1,) * (len(large) - len(small)) + small
    summed = {k: "copies" for k, (m, n) in enumerate(zip(padded, large, strict=True)) if m < n}
    last = len(large) - 1
    source = draw(
        tensors(
            workers,
            grid=large[::-1] if src else large,
            fixed={last - k: role for k, role in summed.items()} if src else summed,
        )
    )
    return {
        "source": source,
        "grid": small[::-1] if dest else small,
        "workers": draw(orders(workers, math.prod(small))),
        "transpose_src": src,
        "transpose_dest": dest,
    }


@operator_factory(_sum_reductions)
def sum_reduce(
    source: Any, grid: Any, workers: Any, transpose_src: Any, transpose_dest: Any
) -> LinearOperator:
    Y, partition = tensor_of(source), linop.Partition(grid, workers)
    return linop.sum_reduce(Y, partition, transpose_src, transpose_dest)


@st.composite
def _copies(draw: st.DrawFn, workers: int) -> Description:
    """A tensor with independent copies, and some of the grid axes that hold them."""
    source = draw(tensors(workers))
    held = [k for k, role in enumerate(source["axes"]) if role == "copies"]
    chosen = draw(st.none() | st.just(tuple(k for k in held if draw(st.booleans()))))
    return {"source": source, "grid_axes": chosen}


@operator_factory(_copies)
def all_reduce(source: Any, grid_axes: Any) -> LinearOperator:
    return linop.all_reduce(tensor_of(source), grid_axes)


@operator_factory(_copies)
def ring_all_reduce(source: Any, grid_axes: Any) -> LinearOperator:
    return linop.ring_all_reduce(tensor_of(source), grid_axes)


@st.composite
def _splits(draw: st.DrawFn, workers: int) -> Description:
    """A tensor, and some of the grid axes that split it."""
    source = draw(tensors(workers))
    split = [k for k, role in enumerate(source["axes"]) if isinstance(role, int)]
    chosen = draw(st.none() | st.just(tuple(k for k in split if draw(st.booleans()))))
    return {"source": source, "grid_axes": chosen}


@operator_factory(_splits)
def all_gather(source: Any, grid_axes: Any) -> LinearOperator:
    return linop.all_gather(tensor_of(source), grid_axes)


@operator_factory(_splits)
def all_gather_replicated(source: Any, grid_axes: Any) -> LinearOperator:
    return linop.all_gather(tensor_of(source), grid_axes, into=linop.REPLICATED)


@st.composite
def _reduce_scatters(draw: st.DrawFn, workers: int) -> Description:
    source = draw(tensors(workers, ndim=draw(st.integers(1, 3))))
    held = [k for k, role in enumerate(source["axes"]) if role == "copies"]
    free = [d for d in range(len(source["shape"])) if d not in source["axes"]]
    count = draw(st.integers(0, min(len(held), len(free))))
    axes = tuple(draw(st.permutations(held))[:count])
    return {"source": source, "grid_axes": axes, "dims": tuple(draw(st.permutations(free))[:count])}


@operator_factory(_reduce_scatters)
def reduce_scatter(source: Any, grid_axes: Any, dims: Any) -> LinearOperator:
    return linop.reduce_scatter(tensor_of(source), grid_axes, dims)


@st.composite
def _all_to_alls(draw: st.DrawFn, workers: int) -> Description:
    source = draw(tensors(workers, ndim=draw(st.integers(2, 3)), fixed={0: "split"}))
    free = [d for d in range(len(source["shape"])) if d not in source["axes"]]
    split = [k for k, role in enumerate(source["axes"]) if isinstance(role, int)]
    if not free:
        reject()
    dim = draw(st.sampled_from(free))
    return {"source": source, "grid_axis": draw(st.sampled_from(split)), "dim": dim}


@operator_factory(_all_to_alls)
def all_to_all(source: Any, grid_axis: Any, dim: Any) -> LinearOperator:
    return linop.all_to_all(tensor_of(source), grid_axis, dim)


@st.composite
def _shifts(draw: st.DrawFn, workers: int) -> Description:
    source = draw(tensors(workers))
    axes = [k for k, role in enumerate(source["axes"]) if role != "replicated"]
    if not axes:
        reject()
    return {
        "source": source,
        "steps": draw(st.integers(-3, 3)),
        "grid_axis": draw(st.sampled_from(axes)),
        "periodic": draw(st.booleans()),
    }


@operator_factory(_shifts)
def shift(source: Any, steps: Any, grid_axis: Any, periodic: Any) -> LinearOperator:
    return linop.shift(tensor_of(source), steps, grid_axis, periodic)


@st.composite
def kernels(draw: st.DrawFn, ndim: int) -> Description:
    """A sliding kernel: size, stride, padding and dilation of each dimension."""

    def numbers(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(least, most)) for _ in range(ndim))

    return {
        "kernel_size": numbers(1, 4),
        "stride": numbers(1, 3),
        "padding": numbers(0, 2),
        "dilation": numbers(1, 2),
    }


def fits(n: int, size: int, padding: int, dilation: int) -> bool:
    """Whether a sliding kernel has an output."""
    return n + 2 * padding >= dilation * (size - 1) + 1


@st.composite
def halos(
    draw: st.DrawFn,
    workers: int,
    dtypes: Sequence[str] = MOVED,
    roles: Sequence[str] = ("split", "copies", "replicated"),
    uneven: bool = True,
) -> Description:
    """A tensor, and a kernel that slides over it."""
    ndim = draw(st.integers(1, 3))
    kernel = draw(kernels(ndim))
    columns = zip(*(kernel[k] for k in ("kernel_size", "padding", "dilation")), strict=True)
    least = [max(0, d * (size - 1) + 1 - 2 * p) for size, p, d in columns]
    shape = tuple(n + draw(st.integers(0, (11, 5, 3)[ndim - 1])) for n in least)
    source = draw(tensors(workers, dtypes=dtypes, shape=shape, roles=roles, uneven=uneven))
    return {"source": source, **kernel}


@operator_factory(halos)
def halo_exchange(source: Any, **kernel: Any) -> LinearOperator:
    return linop.halo_exchange(tensor_of(source), **kernel)


@operator_factory(halos)
def halo_exchange_in_place(source: Any, **kernel: Any) -> LinearOperator:
    return linop.halo_exchange(tensor_of(source), **kernel, in_place=True)


# Local operators (design section 3)


@st.composite
def _matrices(draw: st.DrawFn, workers: int) -> Description:
    """Two spaces on the same workers, and a seed for the values between them."""
    held = draw(holders(workers))
    dtype = draw(st.sampled_from(COMPUTED))

    def side(letter: str) -> Description:
        count = draw(st.integers(0, 2))
        rank = draw(st.integers(0, 2))
        regions = tuple((f"{letter}{k}", draw(shapes(rank, 3)), held) for k in range(count))
        return {"regions": regions, "dtype": dtype}

    return {"domain": side("x"), "codomain": side("y"), "seed": draw(seeds)}


def _values(domain: Space, codomain: Space, seed: int) -> np.ndarray:
    return whole_numbers((codomain.size, domain.size), domain.dtype, seed)


@operator_factory(_matrices, pure=False)
def dense_matrix(domain: Any, codomain: Any, seed: Any) -> LinearOperator:
    source, target = space_of(domain), space_of(codomain)
    return linop.matrix(_values(source, target, seed), source, target)


@operator_factory(_matrices, pure=False)
def sparse_matrix(domain: Any, codomain: Any, seed: Any) -> LinearOperator:
    source, target = space_of(domain), space_of(codomain)
    return linop.matrix(scipy.sparse.csc_array(_values(source, target, seed)), source, target)


@operator_factory(_matrices, pure=False)
def pair_of_functions(domain: Any, codomain: Any, seed: Any) -> LinearOperator:
    source, target = space_of(domain), space_of(codomain)
    A = _values(source, target, seed)

    def applied(B: np.ndarray, before: Space, after: Space) -> Callable[[Any], Any]:
        def apply(x: Any) -> Any:
            # What comes is a bare array for one region, a dict for several, None for none.
            given = before.vector({} if x is None else x)
            result = after.unflatten(B @ before.flatten(given)).arrays
            return next(iter(result.values())) if len(result) == 1 else result

        return apply

    forward, backward = applied(A, source, target), applied(A.conj().T, target, source)
    return linop.local(source, target, forward, backward)


@operator_factory(_matrices, pure=False)
def of_scipy(domain: Any, codomain: Any, seed: Any) -> LinearOperator:
    source, target = space_of(domain), space_of(codomain)
    A = _values(source, target, seed)
    op = scipy.sparse.linalg.LinearOperator(
        A.shape, lambda x: A @ x, lambda y: A.conj().T @ y, dtype=A.dtype
    )
    return linop.from_scipy(op, source, target)


@st.composite
def _vectors(draw: st.DrawFn, workers: int) -> Description:
    return {
        "size": draw(st.integers(2, 8)),
        "to": draw(holders(workers)),
        "dtype": draw(st.sampled_from(("float64", "float32", "complex128", "complex64"))),
        "kind": draw(st.sampled_from(["difference", "restriction", "padding", "matrix"])),
        "seed": draw(seeds),
    }


@operator_factory(_vectors, pure=False)
def of_pylops(size: Any, to: Any, dtype: Any, kind: Any, seed: Any) -> LinearOperator:
    A: Any
    if kind == "difference":
        A = pylops.FirstDerivative(size, kind="forward", dtype=dtype)
    elif kind == "restriction":
        A = pylops.Restriction(size, np.arange(seed % 2, size, 2), dtype=dtype)
    elif kind == "padding":
        A = pylops.Pad(size, (seed % 3, 1), dtype=dtype)
    else:
        A = pylops.MatrixMult(whole_numbers((3, size), dtype, seed), dtype=dtype)
    domain = Space(Region("x", size, to), dtype_of(dtype))
    return linop.from_scipy(A, domain)


@st.composite
def _regions(draw: st.DrawFn, workers: int, dtypes: Sequence[str] = COMPUTED) -> Description:
    """One region, and a seed."""
    shape = draw(shapes(draw(st.integers(0, 3)), 4))
    space = {"regions": (("x", shape, draw(holders(workers))),)}
    return {"space": {**space, "dtype": draw(st.sampled_from(dtypes))}, "seed": draw(seeds)}


@operator_factory(_regions, pure=False)
def diagonal(space: Any, seed: Any) -> LinearOperator:
    domain = space_of(space)
    return linop.diagonal(whole_numbers(domain.regions[0].shape, domain.dtype, seed), domain)


@operator_factory(lambda workers: _regions(workers, COMPLEX), pure=False, exact=False)
def fft(space: Any, seed: Any) -> LinearOperator:
    del seed
    return linop.fft(space_of(space))


@st.composite
def _restrictions(draw: st.DrawFn, workers: int) -> Description:
    space = draw(spaces(workers, COMPUTED, most=1))
    shape = space["regions"][0][1]
    indices = st.lists(st.integers(0, math.prod(shape) - 1), max_size=5)
    keep = draw(boxes(shape) if not math.prod(shape) or draw(st.booleans()) else indices)
    return {"space": space, "keep": keep}


@operator_factory(_restrictions, pure=False)
def restriction(space: Any, keep: Any) -> LinearOperator:
    domain = space_of(space)
    chosen = part_of(domain, ("x0", keep)) if isinstance(keep, tuple) else np.array(keep, int)
    return linop.restriction(domain, chosen)


@st.composite
def _convolutions(draw: st.DrawFn, workers: int) -> Description:
    ndim = draw(st.integers(1, 2))
    kernel = draw(kernels(ndim))
    left = tuple(draw(st.integers(0, 2)) for _ in range(ndim))
    columns = zip(*(kernel[k] for k in ("kernel_size", "padding", "dilation")), left, strict=True)
    least = [max(1, d * (size - 1) + 1 - p - a) for size, p, d, a in columns]
    return {
        "shape": tuple(n + draw(st.integers(0, 3)) for n in least),
        "left": left,
        **kernel,
        "to": draw(holders(workers)),
        "dtype": draw(st.sampled_from(COMPUTED)),
        "seed": draw(seeds),
    }


# SciPy convolves by Fourier transforms where it expects that to be faster.
@operator_factory(_convolutions, pure=False, exact=False)
def convolution(
    shape: Any,
    left: Any,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    to: Any,
    dtype: Any,
    seed: Any,
) -> LinearOperator:
    kernel = whole_numbers(kernel_size, dtype, seed)
    pads = list(zip(left, padding, strict=True))
    columns = zip(shape, kernel_size, stride, pads, dilation, strict=True)
    out = tuple((n + sum(p) - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in columns)
    domain = Space(Region("x", shape, to), dtype_of(dtype))
    codomain = Space(Region("y", out, to), dtype_of(dtype))
    options = {"stride": stride, "padding": pads, "dilation": dilation}
    return linop.convolution(kernel, domain, codomain, **options)


@operator_factory(
    lambda workers: halos(workers, COMPUTED, ("split", "copies"), uneven=False),
    pure=False,
    exact=False,
)
def blur(source: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any) -> LinearOperator:
    """A convolution of the whole tensor: local convolutions after a halo exchange."""
    X = tensor_of(source)
    H = linop.halo_exchange(X, kernel_size, stride, padding, dilation)
    geometry = {w: _halo_of(X, w, kernel_size, stride, padding, dilation) for w in X.workers}
    values = whole_numbers(kernel_size, X.dtype, 7)
    blocks = []
    for region in H.codomain.regions:
        (worker,) = region.workers
        dims = geometry[worker]
        pads = [(h.left_padding, h.right_padding) for h in dims]
        columns = zip(region.shape, kernel_size, stride, pads, dilation, strict=True)
        out = tuple(max(0, (n + sum(p) - d * (k - 1) - 1) // s + 1) for n, k, s, p, d in columns)
        domain = Space(region, X.dtype)
        codomain = Space(Region(f"y@{worker}", out, worker), X.dtype)
        options = {"stride": stride, "padding": pads, "dilation": dilation}
        blocks.append(linop.convolution(values, domain, codomain, **options))
    return linop.direct_sum(*blocks) @ H


def _halo_of(X: linop.TensorSpace, worker: int, *kernel: Any) -> tuple[linop.HaloDim, ...]:
    """What a worker needs: halo_geometry's answer for the grid axes that split, laid out by
    dimension, since it knows no copies."""
    at = X.partition.coordinates(worker)
    grid = [X.partition.shape[X.axes.index(d)] if d in X.axes else 1 for d in range(X.ndim)]
    here = [at[X.axes.index(d)] if d in X.axes else 0 for d in range(X.ndim)]
    partition = linop.Partition(grid)
    return linop.halo_geometry(X.global_shape, partition, *kernel)[partition.worker(here)]


@st.composite
def _mixed_with_fft(draw: st.DrawFn, workers: int) -> Description:
    source = draw(
        tensors(workers, dtypes=COMPLEX, roles=("split",), ndim=2, grid=(draw(st.integers(1, 4)),))
        if workers >= 4
        else tensors(workers, dtypes=COMPLEX, roles=("split",), ndim=2, grid=(1,))
    )
    return {"source": source}


@operator_factory(_mixed_with_fft, pure=False, exact=False)
def fft_after_gather(source: Any) -> LinearOperator:
    """A global transform in the middle of communication: gathered, transformed, and back."""
    X = tensor_of(source)
    G = linop.gather(X)
    F = linop.fft(G.codomain, G.codomain)
    return G.H @ F @ G


NAMES = tuple(FACTORIES)
"""The names of all factories, in the order of this file."""

__all__ = [
    "FACTORIES",
    "NAMES",
    "Factory",
    "build",
    "describe",
    "lengths",
    "operator_factory",
    "operators",
    "partition_of",
    "whole",
]
