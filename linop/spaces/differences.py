"""Texts of errors about spaces: in which regions, dtypes or inner products two of them differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from linop.spaces.region import Region, memory_mark

if TYPE_CHECKING:
    from linop.spaces.space import Space


def side_by_side(left: Space, right: Space) -> str:
    """The regions, dtypes and inner products in which two spaces differ, in two columns; at most 12
    rows."""
    if left.has_regions_of(right):
        return (
            f"  inner product {inner_text(left)}  ≠  {inner_text(right)}\n"
            f"linop.identity(X, Y) maps one to the other; X.euclidean and X.with_inner(…) are "
            f"spaces of the same regions"
        )
    names = list(dict.fromkeys([*left.numbering.index, *right.numbering.index]))
    rows = [("dtype " + left.dtype.name, "dtype " + right.dtype.name)]
    rows += [(_describe(left, n), _describe(right, n)) for n in names]
    rows = [r for r in rows if r[0] != r[1]][:12] or rows[:1]
    width = max(len(a) for a, _ in rows)
    return "\n".join(f"  {a:<{width}}  ≠  {b}" for a, b in rows)


def inner_text(space: Space) -> str:
    """The inner product of a space, in words."""
    return "Euclidean" if space.inner_product is None else str(space.inner_product)


def replicas_text(given: Sequence[Region], names: Sequence[str]) -> str:
    """The end of an error of duplicate regions, if they are replicated ones."""
    shared = next((r for r in given if r.name in names and r.replicated), None)
    if shared is None:
        return ""
    return (
        f"; {shared.name!r} is replicated: one region of the workers {shared.workers}. Take it, "
        f"and a local operator on it, once and not for each worker"
    )


def _describe(space: Space, name: str) -> str:
    if name not in space:
        return f"(no {name!r})"
    region = space[name]
    return f"{name!r} shape {region.shape} on worker {workers_text(region)}{memory_mark(region)}"


def workers_text(region: Region) -> str:
    """The workers that hold a region."""
    return ",".join(map(str, region.workers))
