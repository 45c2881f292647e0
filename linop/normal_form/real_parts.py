"""The normal form of an operator over the real numbers: on rows of real parts
(`linop.spaces.real_parts`).

A complex coefficient a + ib of a transfer becomes four real ones, between parts: multiplying by i
is data movement. Local maps get views as complex arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import scipy

from linop.caching import attributes, cached_property
from linop.errors import DTypeError, SpaceError
from linop.normal_form.boxes import Ints, Table, concatenate
from linop.normal_form.columns import each, multiples, ones
from linop.normal_form.kronecker import NO_AXIS, Kronecker, Relation
from linop.normal_form.maps import Call, Function, LocalMap, Port
from linop.normal_form.movement import Movement
from linop.normal_form.stages import Stages
from linop.normal_form.table_algebra import ScaledTable
from linop.normal_form.transfer_table import IdentityTable, TransferTable, digest_of
from linop.spaces.array_modules import HOST, Namespace
from linop.spaces.real_parts import in_parts, of_parts, parts_of
from linop.spaces.space import Space


class RealTable(TransferTable):
    """Transfers of complex numbers as transfers of their parts.

    Args:
        of: the table between complex regions.
        ndims: (n,) the numbers of dimensions of the destination regions, after which those of the
            parts come.
    """

    def __init__(self, of: TransferTable, ndims: Ints) -> None:
        self.of, self.ndims = of, ndims
        self.width = int(ndims.max(initial=0)) + 1
        self.depth = of.depth + 1

    @cached_property
    def short(self) -> bool:
        return self.of.short

    def _all(self) -> Table:
        return self._apart(self.of.table)

    def _into(self, dst: Ints) -> Table:
        return self._apart(self.of.into(dst))

    def _out_of(self, src: Ints) -> Table:
        return self._apart(self.of.out_of(src))

    def _apart(self, table: Table) -> Table:
        imag = each(table.coef, lambda number: number.imag)
        mixed = np.asarray(imag != 0, bool)
        if not mixed.any():
            return self._parts(table, 0, 0, 2)
        some = table.take(mixed)
        real, imag = each(some.coef, lambda number: number.real), imag[mixed]
        split = [self._parts(table.take(~mixed), 0, 0, 2)]
        for at, of, coef in ((0, 0, real), (1, 1, real), (0, 1, multiples(imag, -1)), (1, 0, imag)):
            rows = replace(self._parts(some, at, of, 1), coef=coef)
            split.append(rows.take(np.asarray(coef != 0, bool)))
        return concatenate(*split)

    def _parts(self, table: Table, at: int, of: int, extent: int) -> Table:
        """The rows with a box of parts in the dimension after those of their regions."""
        wide = table.of_ndim(self.width)
        rows, column = np.arange(len(table)), self.ndims[table.dst]
        boxes = []
        for box, value in ((wide.at, at), (wide.of, of), (wide.extent, extent)):
            box = box.copy()
            box[rows, column] = value
            boxes.append(box)
        starts, sources, extents = boxes
        return replace(wide, at=starts, of=sources, extent=extents)

    @cached_property
    def digest(self) -> bytes:
        return digest_of("parts", self.of.digest, self.ndims)


def stages_over_reals(stages: Stages) -> Stages:
    """Stages over the real numbers."""
    movements = tuple(movement_over_reals(movement) for movement in stages.movements)
    layers = tuple(
        tuple(Call(map_over_reals(call.map), call.inputs, call.outputs) for call in layer)
        for layer in stages.layers
    )
    return Stages(movements, layers)


def movement_over_reals(movement: Movement) -> Movement:
    """A movement over the real numbers. What is known of its table stays known."""
    domain, codomain = movement.domain.over_reals(), movement.codomain.over_reals()
    rows = movement.transfers
    if movement.domain.dtype.kind == "c":
        rows = _table(rows, movement.codomain, codomain)
    made = Movement(domain, codomain, rows)
    made._factors = tuple(map(movement_over_reals, movement._factors))
    return made


def _table(rows: TransferTable, complex_space: Space, real_space: Space) -> TransferTable:
    if isinstance(rows, IdentityTable):
        return IdentityTable(real_space.numbering.shapes)
    if isinstance(rows, ScaledTable) and not (rows.conjugated or rows.scalar.imag):
        return ScaledTable(_table(rows.of, complex_space, real_space), rows.scalar)
    ndims = np.array([region.ndim for region in complex_space.regions], np.int64)
    if isinstance(rows, Kronecker):
        dim = int(ndims.max(initial=0))
        zero = np.zeros((1, 1), np.int64)
        whole = Table(zero[0], zero[0], zero, zero, zero + 2, ones(1))
        parts = Relation(whole, NO_AXIS, NO_AXIS, dim)
        return Kronecker([*rows.relations, parts], dim + 1, rows.sizes)
    return RealTable(rows, ndims)


def map_over_reals(local: LocalMap) -> LocalMap:
    """A local map over the real numbers."""
    known = attributes(local)
    if "over_reals" not in known:

        def port(namespace: Namespace) -> tuple[Function, Function]:
            if namespace is HOST:
                return local.forward, local.backward
            assert local.port is not None
            return local.port(namespace)

        domain, codomain, portable = local.domain, local.codomain, local.port is not None
        made = parts_map(
            domain, codomain, port, local.symbol, local.matrix, portable, fresh=local.fresh
        )
        if local.inside is not None:
            there, back = (_inside(function, domain) for function in local.inside)
            made = replace(made, inside=(there, back))
        known["over_reals"] = made
        attributes(local.adjoint)["over_reals"] = made.adjoint
    found: LocalMap = known["over_reals"]
    return found


def _inside(function: Callable[[Any], None], space: Space) -> Callable[[Any], None]:
    """A function that overwrites its argument, on rows of parts."""
    return lambda rows: function(of_parts(rows, space.dtype))


def parts_map(
    domain: Space,
    codomain: Space,
    port: Port,
    symbol: str,
    matrix: Any = None,
    portable: bool = True,
    fresh: bool = True,
) -> LocalMap:
    """A pair of functions on arrays of two spaces, linear over the real numbers and adjoint to each
    other for the real inner product, as a local map over the reals.

    Args:
        domain, codomain: spaces of a real dtype and of the complex one, in any order, or of one.
        port: returns the functions for an array module.
        matrix: returns the matrix M of x -> M x, of which a real codomain has the real part.
        portable, fresh: as for `linop.local_operators.functions.local_operator`.

    Raises:
        SpaceError: the dtypes are neither equal, nor a real one and the complex one of such parts.
    """
    if parts_of(domain.dtype)[1] != parts_of(codomain.dtype)[1]:
        raise SpaceError(
            f"local operator {symbol}: domain of dtype {domain.dtype}, codomain of "
            f"{codomain.dtype}; expected equal ones, or a real one and the complex one of such "
            f"parts, as float64 and complex128"
        )

    def viewed(function: Function, source: Space, target: Space) -> Function:
        def given(x: Any) -> Any:
            return of_parts(x, source.dtype)

        def parts(y: Any) -> Any:
            y = y if hasattr(y, "reshape") else np.asarray(y)
            if y.dtype == parts_of(target.dtype)[1]:  # real results in a complex space
                y = y.astype(target.dtype, copy=False)
            if y.dtype != target.dtype:
                raise DTypeError(f"dtype {y.dtype}, {target.dtype} expected")
            return in_parts(y)

        return lambda x: each_array(parts, function(each_array(given, x)))

    def ported(namespace: Namespace) -> tuple[Function, Function]:
        forward, backward = port(namespace)
        return viewed(forward, domain, codomain), viewed(backward, codomain, domain)

    known = None
    if matrix is not None:

        def known() -> scipy.sparse.csr_array:
            return _parts_of_matrix(matrix(), domain.dtype.kind, codomain.dtype.kind)

    forward, backward = ported(HOST)
    return LocalMap(
        domain.over_reals(),
        codomain.over_reals(),
        forward,
        backward,
        symbol,
        known,
        ported if portable else None,
        fresh=fresh,
    )


def each_array(function: Function, x: Any) -> Any:
    """A function of each array of what a local map takes or returns."""
    if isinstance(x, Mapping):
        return {name: function(array) for name, array in x.items()}
    return None if x is None else function(x)


def _parts_of_matrix(matrix: Any, source: str, target: str) -> scipy.sparse.csr_array:
    """The matrix of parts, of a complex matrix: each entry is a block of at most 2 × 2."""
    given = scipy.sparse.csr_array(matrix)
    real = np.array([[1, 0], [0, 1]])[: 2 if target == "c" else 1, : 2 if source == "c" else 1]
    imag = np.array([[0, -1], [1, 0]])[: 2 if target == "c" else 1, : 2 if source == "c" else 1]
    found = scipy.sparse.kron(given.real, real) + scipy.sparse.kron(given.imag, imag)
    return scipy.sparse.csr_array(found)
