"""Operators on other regions of the same shapes: of other names, or on another worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from linop.normal_form.maps import Function, LocalMap
from linop.operators.expressions import Identity, Local, compose
from linop.operators.named_movement import out_of_place
from linop.operators.operator import LinearOperator
from linop.spaces.array_modules import Namespace
from linop.spaces.space import Space

Names = Mapping[str, str]


def between(op: LinearOperator, domain: Space, codomain: Space) -> LinearOperator:
    """An operator between spaces of other names of regions, in the same order: a local operator as
    the same map, others between moves."""
    if op.domain == domain and op.codomain == codomain:
        return op
    if isinstance(op, Local):
        return Local(relabelled(op.map, domain, codomain))
    return compose(moved(op.codomain, codomain), op, moved(op.domain, domain).euclidean_adjoint)


def moved(space: Space, other: Space) -> LinearOperator:
    """The move of every region to that of the other space, in order; on the same workers."""
    return out_of_place(space, other, zip(space.regions, other.regions, strict=True))


def as_map(op: LinearOperator) -> LocalMap:
    """An operator inside one worker's memory as a single local map. Unless it is a local operator
    already, it computes with NumPy's arrays, and interprets the operator."""
    if isinstance(op, Local):
        return op.map
    if isinstance(op, Identity):
        return LocalMap(op.domain, op.codomain, _same, _same, "I", op.to_matrix)
    known = all(call.map.matrix is not None for call in op.stages.calls)
    text = " ".join(str(op).split())
    matrix = op.to_matrix if known else None
    symbol = f"({text})" if op.loose else text
    return LocalMap(op.domain, op.codomain, op, op.euclidean_adjoint, symbol, matrix)


def _same(x: Any) -> Any:
    return x


def relabelled(local: LocalMap, domain: Space, codomain: Space) -> LocalMap:
    """A local map between spaces of other regions, in the same order and of the same shapes."""
    ins = _names(domain, local.domain)
    outs = _names(codomain, local.codomain)
    forward = _renaming(local.forward, ins, _inverse(outs))
    backward = _renaming(local.backward, outs, _inverse(ins))
    port = local.port

    def ported(namespace: Namespace) -> tuple[Function, Function]:
        assert port is not None
        there, back = port(namespace)
        return _renaming(there, ins, _inverse(outs)), _renaming(back, outs, _inverse(ins))

    return replace(
        local,
        domain=domain,
        codomain=codomain,
        forward=forward,
        backward=backward,
        port=None if port is None else ported,
        apart=None,
    )


def _names(space: Space, other: Space) -> Names:
    """The names of regions of another space, by those of a space."""
    return {a.name: b.name for a, b in zip(space.regions, other.regions, strict=True)}


def _inverse(names: Names) -> Names:
    return {new: old for old, new in names.items()}


def _renaming(function: Function, ins: Names, outs: Names) -> Function:
    """A function with the names of the regions of its arguments and results replaced."""

    def call(x: Any) -> Any:
        y = function(_renamed(x, ins))
        return _renamed(y, outs)

    return call


def _renamed(x: Any, names: Names) -> Any:
    return {names[n]: a for n, a in x.items()} if isinstance(x, Mapping) else x
