"""The five memory operators as linear operators on spaces (paper, section 2).

Allocate (with its adjoint deallocate), clear and add are primitive; copy and move are compositions
of them. All other data movement is composed of these, in `linop.operators.collectives` and other
modules.
"""

from __future__ import annotations

from collections.abc import Sequence

from linop.errors import ArgumentError, ShapeError, SpaceError, expect
from linop.normal_form.primitives import Action, Add, Allocate, Clear, Deallocate, InPlace
from linop.operators.expressions import Primitives, compose
from linop.operators.operator import LinearOperator
from linop.provenance import records_origin
from linop.spaces.region import Part, Region, Subset, as_subset
from linop.spaces.space import Space


@records_origin
def allocate(space: Space, *regions: Region) -> LinearOperator:
    """A_b: space -> space ⊕ b, allocates regions filled with zeros (paper, equation 3). Its adjoint
    is `deallocate`.

    Raises:
        RegionError: the space has a region of that name already.

    Example:
        >>> a, b = linop.Region("a", 2), linop.Region("b", 1)
        >>> A = linop.allocate(linop.Space(a), b)
        >>> A.to_matrix().toarray().tolist()  # b is zero
        [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
        >>> A.H.equals(linop.deallocate(A.codomain, b))
        True
    """
    return _primitive(expect("allocate", space, Space), Allocate(_regions("allocate", regions)))


@records_origin
def deallocate(space: Space, *regions: Region) -> LinearOperator:
    """D_b = A_b*: space ⊕ b -> space, removes regions (paper, equation 4). Its adjoint is
    `allocate`.

    Raises:
        RegionError: the space has no such region.

    Example:
        >>> a, b = linop.Region("a", 2), linop.Region("b", 1)
        >>> D = linop.deallocate(linop.Space([a, b]), b)
        >>> print(D.codomain)
        a[2]@0
        >>> D.H.equals(linop.allocate(linop.Space(a), b))
        True
    """
    gone = Deallocate(_regions("deallocate", regions))
    return _primitive(expect("deallocate", space, Space), gone)


@records_origin
def clear(space: Space, part: Part) -> LinearOperator:
    """K_b: sets a region, or a subset of one, to zero (paper, equation 5). Self-adjoint.

    Example:
        >>> a = linop.Region("a", 3)
        >>> K = linop.clear(linop.Space(a), a[0:2])
        >>> K(linop.Space(a).vector(np.ones(3)))["a"].tolist()
        [0.0, 0.0, 1.0]
        >>> K.H.equals(K), (K @ K).equals(K)
        (True, True)
    """
    return _primitive(space, Clear(expect("clear", space, Space).require(part)))


@records_origin
def add(space: Space, a: Part, b: Part) -> LinearOperator:
    """S_{a→b}: adds a to b in place, b += a (paper, equation 6). Its adjoint is S_{b→a}.

    Args:
        space: domain and codomain.
        a, b: regions of the space, or subsets of them, of equal shape.

    Raises:
        ShapeError: a and b differ in shape. SpaceError: they share elements.

    Example:
        >>> a, b = linop.Region("a", 1), linop.Region("b", 1, workers=1)
        >>> S = linop.add(linop.Space([a, b]), a, b)
        >>> S.to_matrix().toarray().tolist()  # b += a
        [[1.0, 0.0], [1.0, 1.0]]
        >>> S.H.equals(linop.add(linop.Space([a, b]), b, a))
        True
    """
    source, target = expect("add", space, Space).require(a), space.require(b)
    if source.shape != target.shape:
        raise ShapeError(
            f"add {source} to {target}: shapes {source.shape} and {target.shape} must be equal"
        )
    if source.overlaps(target):
        raise SpaceError(
            f"add {source} to {target}: they overlap; go through a region between them"
        )
    return _primitive(space, Add(source, target))


@records_origin
def copy(space: Space, a: Part, b: Part) -> LinearOperator:
    """C_{a→b}: in place, S_{a→b} K_b, if the space has b's region; else out of place, S_{a→b} A_b,
    with b's region allocated (paper, section 2 and appendix A.2).

    Args:
        space: the domain.
        a: a region of the space, or a subset of one.
        b: a region, of the space or new, or a subset of one; of a's shape.

    Raises:
        ShapeError: a and b differ in shape. SpaceError: they share elements.

    Example:
        >>> a, b = linop.Region("a", 1), linop.Region("b", 1, workers=1)
        >>> C = linop.copy(linop.Space([a, b]), a, b)
        >>> C.to_matrix().toarray().tolist()  # b = a
        [[1.0, 0.0], [1.0, 0.0]]
        >>> C.H.to_matrix().toarray().tolist()  # a += b, then b = 0
        [[1.0, 1.0], [0.0, 0.0]]
    """
    target = as_subset(b)
    bring = _allocate_or_clear(expect("copy", space, Space), target)
    return compose(add(bring.codomain, a, target), bring)


@records_origin
def move(space: Space, a: Part, b: Part) -> LinearOperator:
    """M_{a→b}: in place, K_a S_{a→b} K_b, if the space has b's region; else out of place,
    D_a S_{a→b} A_b, where a must be a whole region, which is deallocated (paper, section 2 and
    appendix A.3).

    Args:
        space, a, b: as for `copy`.

    Raises:
        ShapeError: a and b differ in shape.
        SpaceError: they share elements; or b's region is new, and a is not a whole region.

    Example:
        >>> a, b = linop.Region("a", 1), linop.Region("b", 1, workers=1)
        >>> M = linop.move(linop.Space(a), a, b)
        >>> print(M.codomain)
        b[1]@1
        >>> M.H.equals(linop.move(linop.Space(b), b, a))
        True
    """
    source, target = as_subset(a), as_subset(b)
    copied = copy(space, source, target)
    if target.region.name in space:
        return compose(clear(copied.codomain, source), copied)
    if not source.whole:
        raise SpaceError(
            f"move {source} to the new region {target.region.name!r}: only a whole region can "
            f"leave the space; allocate {target.region.name!r} first to move in place"
        )
    return compose(deallocate(copied.codomain, source.region), copied)


def clears(space: Space, parts: Sequence[Subset]) -> LinearOperator:
    """The composition of `clear` for each of one or more subsets, the first applied first."""
    return Primitives(space, InPlace(parts, parts), space)


def adds(space: Space, sources: Sequence[Subset], targets: Sequence[Subset]) -> LinearOperator:
    """The composition of `add` for one or more pairs of subsets, the first applied first. The pairs
    are not checked."""
    return Primitives(space, InPlace(targets, sources), space)


def copies(space: Space, sources: Sequence[Subset], targets: Sequence[Subset]) -> LinearOperator:
    """The composition of in-place `copy` for one or more pairs of subsets, the first applied first.
    The pairs are not checked."""
    twice = [target for target in targets for _ in range(2)]
    each = [part for pair in zip(targets, sources, strict=True) for part in pair]
    return Primitives(space, InPlace(twice, each), space)


def _allocate_or_clear(space: Space, target: Subset) -> LinearOperator:
    if target.region.name in space:
        return clear(space, target)
    return allocate(space, target.region)


def _primitive(space: Space, action: Action) -> LinearOperator:
    return Primitives(space, (action,), action.codomain(space))


def _regions(what: str, regions: tuple[Region, ...]) -> tuple[Region, ...]:
    for region in regions:
        if not isinstance(region, Region):
            raise ArgumentError(f"{what}: expected a whole Region, given {region!r}")
    if not regions:
        raise ArgumentError(f"{what}: expected at least one region")
    return regions
