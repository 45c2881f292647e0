"""Factories of memory operators, of random programs of them, and of the algebra: sums, powers,
stacks, …"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

import linop
from linop import LinearOperator, Region, Space
from linop.spaces.region import MEMORIES
from linop.testing.describing import (
    COMPLEX,
    COMPUTED,
    Description,
    dtype_of,
    holders,
    pairs,
    part_of,
    parts,
    placements,
    region_of,
    seeds,
    shapes,
    space_of,
    spaces,
    whole_numbers,
)
from linop.testing.factories.registry import operator_factory

# Memory operators (paper, section 2)


@st.composite
def _space_and_new_region(draw: st.DrawFn, workers: int) -> Description:
    shape = draw(st.integers(0, 3).flatmap(lambda d: shapes(d, 3)))
    new = ("new", shape, *draw(placements(workers)))
    return {"space": draw(spaces(workers, least=0)), "region": new}


@operator_factory(_space_and_new_region)
def allocate(space: Any, region: Any) -> LinearOperator:
    return linop.allocate(space_of(space), region_of(region))


@st.composite
def _space_and_old_regions(draw: st.DrawFn, workers: int) -> Description:
    space = draw(spaces(workers))
    names = [name for name, *_ in space["regions"]]
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
def _space_part_and_placement(draw: st.DrawFn, workers: int) -> Description:
    space = draw(spaces(workers))
    return {"space": space, "a": draw(parts(space)), "to": draw(placements(workers))}


@operator_factory(_space_part_and_placement)
def copy_out_of_place(space: Any, a: Any, to: Any) -> LinearOperator:
    whole_space = space_of(space)
    source = part_of(whole_space, a)
    return linop.copy(whole_space, source, Region("new", source.shape, *to))


@operator_factory(_space_part_and_placement)
def send_recv(space: Any, a: Any, to: Any) -> LinearOperator:
    whole_space = space_of(space)
    source = part_of(whole_space, a)
    return linop.send_recv(whole_space, source, Region("new", source.shape, *to))


@st.composite
def _space_part_and_larger_region(draw: st.DrawFn, workers: int) -> Description:
    described = draw(_space_part_and_placement(workers))
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
    new = Region("new", tuple(map(sum, sizes)), *to)
    return linop.copy(whole_space, source, new[tuple(slice(b, b + n) for b, n, _ in sizes)])


@st.composite
def _space_region_and_placement(draw: st.DrawFn, workers: int) -> Description:
    space = draw(spaces(workers))
    name, *_ = draw(st.sampled_from(space["regions"]))
    return {"space": space, "name": name, "to": draw(placements(workers))}


@operator_factory(_space_region_and_placement)
def move_out_of_place(space: Any, name: Any, to: Any) -> LinearOperator:
    whole_space = space_of(space)
    region = whole_space[name]
    return linop.move(whole_space, region, Region("new", region.shape, *to))


@st.composite
def _space_and_memory(draw: st.DrawFn, workers: int) -> Description:
    return {
        "space": draw(spaces(workers, least=0)),
        "memory": draw(st.sampled_from(MEMORIES)),
    }


@operator_factory(_space_and_memory)
def offload(space: Any, memory: Any) -> LinearOperator:
    return linop.offload(space_of(space), memory)


# Programs of memory and local operators

DescribedAction = tuple[Any, ...]


@st.composite
def steps_in_place(
    draw: st.DrawFn, space: Description, most: int, depth: int
) -> tuple[DescribedAction, ...]:
    """Steps of a program from a space to itself.

    Args:
        most: largest number of steps.
        depth: 0 for no sums, adjoints or conjugates of programs.
    """
    kinds = ["add", "copy", "move", "clear", "scale", "diagonal", "power"]
    kinds += ["sum", "adjoint", "conj"] if depth else []
    steps: list[DescribedAction] = []
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
            inner = draw(steps_in_place(space, 1, 0))
            steps.append((kind, inner, draw(st.integers(0, 2))))
        elif kind == "sum":
            terms = tuple(draw(steps_in_place(space, 2, 0)) for _ in range(2))
            steps.append((kind, terms))
        else:
            steps.append((kind, draw(steps_in_place(space, 2, 0))))
    return tuple(steps)


def _alike(space: Description) -> list[int]:
    """For each region, the number of regions with as many dimensions, itself included, plus one if
    it can be paired with itself; [0] for no region. `pairs` needs one that is 2 or more."""
    ranks = [len(shape) for _, shape, *_ in space["regions"]]
    return [ranks.count(rank) + (rank > 0) for rank in ranks] or [0]


@st.composite
def _programs(draw: st.DrawFn, workers: int) -> Description:
    """A space, and steps of a program that may allocate and deallocate regions."""
    rank = draw(st.integers(0, 2))
    space = draw(spaces(workers, COMPUTED, ndim=rank, least=0, most=3))
    regions = {region[0]: region for region in space["regions"]}
    steps: list[DescribedAction] = []
    for k in range(draw(st.integers(1, 4))):
        now = {**space, "regions": tuple(regions.values())}
        kind = draw(
            st.sampled_from(["in place", "allocate", "deallocate", "copy", "move", "matrix"])
        )
        if not regions or kind == "allocate":
            shape = draw(shapes(draw(st.sampled_from([rank, 0, 1])), 3))
            regions[f"n{k}"] = new = (f"n{k}", shape, *draw(placements(workers)))
            steps.append(("allocate", new))
        elif kind == "in place":
            steps += draw(steps_in_place(now, 3, 1))
        elif kind == "deallocate":
            name = draw(st.sampled_from(sorted(regions)))
            del regions[name]
            steps.append((kind, name))
        elif kind == "copy":
            name, box = draw(parts(now))
            shape = tuple(b - a for a, b in box)
            regions[f"n{k}"] = new = (f"n{k}", shape, *draw(placements(workers)))
            steps.append(("copy_new", (name, box), new))
        elif kind == "move":
            name, shape, *_ = draw(st.sampled_from(now["regions"]))
            del regions[name]
            regions[f"n{k}"] = new = (f"n{k}", shape, *draw(placements(workers)))
            steps.append(("move_new", name, new))
        else:
            name, _, *placement = draw(st.sampled_from(now["regions"]))
            del regions[name]
            regions[f"n{k}"] = new = (f"n{k}", draw(shapes(draw(st.integers(0, 2)), 3)), *placement)
            steps.append(("matrix", name, new, draw(seeds)))
    return {"space": space, "steps": tuple(steps)}


def _beside(op: LinearOperator, space: Space) -> LinearOperator:
    """The direct sum of an operator on some regions of a space and the identity on the others."""
    rest = [region for region in space if region not in op.domain]
    return linop.direct_sum(op, linop.identity(Space(rest, space.dtype))) if rest else op


def _step(space: Space, kind: str, *rest: Any) -> LinearOperator:
    """The operator of one step of a program, on a space."""
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
            return _beside(
                linop.local_operators.diagonal(values, Space(region, space.dtype)), space
            )
        case "matrix", (name, new, seed):
            region, target = space[name], region_of(new)
            values = whole_numbers((target.size, region.size), space.dtype, seed)
            sides = Space(region, space.dtype), Space(target, space.dtype)
            return _beside(linop.local_operators.matrix(values, *sides), space)
        case "sum", (terms,):
            first, second = (program(space, term) for term in terms)
            return first + second
        case "adjoint", (inner,):
            return program(space, inner).H
        case "conj", (inner,):
            return program(space, inner).conj()
        case "power", (inner, exponent):
            return program(space, inner) ** exponent
        case "allocate", (new,):
            return linop.allocate(space, region_of(new))
        case "deallocate", (name,):
            return linop.deallocate(space, space[name])
        case "copy_new", (a, new):
            return linop.copy(space, part_of(space, a), region_of(new))
        case "move_new", (name, new):
            return linop.move(space, space[name], region_of(new))
    raise ValueError(f"no step {kind} {rest}")


def program(space: Space, steps: Sequence[DescribedAction]) -> LinearOperator:
    op = linop.identity(space)
    for step in steps:
        op = _step(op.codomain, *step) @ op
    return op


@operator_factory(_programs, pure=False)
def random_composition(space: Any, steps: Any) -> LinearOperator:
    return program(space_of(space), steps)


@st.composite
def _movement_programs(draw: st.DrawFn, workers: int) -> Description:
    """Programs of up to 8 adds, copies, moves and clears, on subsets of a few regions."""
    space = draw(spaces(workers, COMPUTED, least=2))
    steps: list[DescribedAction] = []
    for _ in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from(["add", "copy", "move", "clear"]))
        if kind == "clear":
            steps.append((kind, draw(parts(space))))
        else:
            steps.append((kind, *draw(pairs(space))))
    return {"space": space, "steps": tuple(steps)}


@operator_factory(_movement_programs)
def random_movement(space: Any, steps: Any) -> LinearOperator:
    return program(space_of(space), steps)


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
    return scalar * program(space_of(space), steps)


@st.composite
def _program_and_power(draw: st.DrawFn, workers: int) -> Description:
    space = draw(spaces(workers, COMPUTED, least=2))
    steps = draw(steps_in_place(space, 2, 0))
    return {"space": space, "steps": steps, "exponent": draw(st.integers(0, 3))}


@operator_factory(_program_and_power, pure=False)
def power(space: Any, steps: Any, exponent: Any) -> LinearOperator:
    return program(space_of(space), steps) ** exponent


@st.composite
def _program_terms(draw: st.DrawFn, workers: int) -> Description:
    space = draw(spaces(workers, COMPUTED, least=2))
    terms = tuple(draw(steps_in_place(space, 2, 1)) for _ in range(draw(st.integers(2, 3))))
    return {"space": space, "terms": terms, "minus": draw(st.booleans())}


@operator_factory(_program_terms, pure=False)
def sum_of_operators(space: Any, terms: Any, minus: Any) -> LinearOperator:
    first, *rest = (program(space_of(space), steps) for steps in terms)
    total = first
    for term in rest:
        total = total - term if minus else total + term
    return total


@st.composite
def _blocks(draw: st.DrawFn, workers: int) -> Description:
    """Programs on spaces whose regions' names differ."""
    dtype = draw(st.sampled_from(COMPUTED))
    blocks = []
    for k in range(draw(st.integers(1, 3))):
        space = draw(spaces(workers, (dtype,), most=2, prefix=f"b{k}."))
        blocks.append((space, draw(steps_in_place(space, 2, 0))))
    return {"blocks": tuple(blocks)}


@operator_factory(_blocks, pure=False)
def direct_sum(blocks: Any) -> LinearOperator:
    return linop.direct_sum(*(program(space_of(space), steps) for space, steps in blocks))


@st.composite
def _blocks_to_one(draw: st.DrawFn, workers: int) -> Description:
    """Several 1-d regions, and one region to which each of them is mapped."""
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
    """For each size, a move of a region to the workers of the common one, then a matrix to it."""
    target = Space(region_of(common), dtype_of(dtype))
    ops = []
    for k, (size, held) in enumerate(zip(sizes, fans, strict=True)):
        source = Space(Region(f"x{k}", size, held), dtype_of(dtype))
        moved = linop.move(source, source.regions[0], Region(f"m{k}", size, common[2]))
        values = whole_numbers((target.size, size), target.dtype, seed + k)
        ops.append(linop.local_operators.matrix(values, moved.codomain, target) @ moved)
    return ops


@operator_factory(_blocks_to_one, pure=False)
def hstack(**described: Any) -> LinearOperator:
    return linop.hstack(*_fan(**described))


@operator_factory(_blocks_to_one, pure=False)
def vstack(**described: Any) -> LinearOperator:
    return linop.vstack(*(op.T for op in _fan(**described)))
