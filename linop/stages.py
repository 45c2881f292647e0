"""An operator as alternating stages, M_k L_k ··· L_1 M_0: movements and layers of local maps.

This is the normal form of every operator. One that only moves data is a single movement; wherever a
local map stands, its arguments are moved into place before it and its results away after it. The
algebra (compose, add, scale, direct sum, adjoint) closes over stages, so lowering meets nothing
else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy

from linop.errors import ArgumentError, DTypeError, ShapeError, UndecidableError
from linop.movement import Movement
from linop.namespace import HOST, Namespace
from linop.primitives import Delta
from linop.region import Region, as_subset
from linop.rows import digest_of
from linop.scalars import Array, Scalar, sparse_dtype
from linop.shares import in_shares
from linop.space import Space

Function = Callable[[Any], Any]
Port = Callable[[Namespace], tuple[Function, Function]]
"""Makes both functions of a local map for other arrays than NumPy's."""


@dataclass(frozen=True, eq=False)
class LocalMap:
    """A linear map inside one worker's memory: a pair of functions that are each other's adjoint.

    A function gets and returns the bare array of a side with one region, a dict by region name
    otherwise, and must not change its argument. `matrix` builds the sparse matrix where it is
    known. `port` makes the functions for other arrays; None where they know NumPy's alone.
    """

    domain: Space
    codomain: Space
    forward: Function
    backward: Function
    symbol: str
    matrix: Callable[[], scipy.sparse.sparray] | None = None
    port: Port | None = None
    namespace: Namespace = HOST

    def on(self, namespace: Namespace) -> LocalMap:
        """The same map on other arrays, with what it has to know of its own (a matrix, a kernel)
        copied there now.

        Raises:
            ArgumentError: it is known for NumPy's alone.
        """
        if namespace.ndarray is self.namespace.ndarray:
            return self
        forward, backward = self._ported()(namespace)
        return LocalMap(
            self.domain, self.codomain, forward, backward, self.symbol, namespace=namespace
        )

    def check_on(self, namespace: Namespace) -> None:
        """Check that the map can be had on other arrays; see `on`."""
        if namespace.ndarray is not self.namespace.ndarray:
            self._ported()

    def _ported(self) -> Port:
        if self.port is None:
            raise ArgumentError(
                f"local operator {self.symbol} computes with NumPy's arrays alone, not with those "
                f"of a device; give linop.local a pair of functions that take these"
            )
        return self.port

    @cached_property
    def adjoint(self) -> LocalMap:
        """The same pair, the other way round."""
        known = self.matrix
        matrix = None if known is None else lambda: known().conj().T
        starred = self.symbol[:-1] if self.symbol.endswith("*") else self.symbol + "*"
        port = None if self.port is None else _swapped(self.port)
        back = LocalMap(
            self.codomain, self.domain, self.backward, self.forward, starred, matrix, port
        )
        back.__dict__["adjoint"] = self
        return back

    @cached_property
    def conj(self) -> LocalMap:
        """x -> conj(A conj(x)); itself on a real space."""
        if self.domain.dtype.kind != "c":
            return self

        def conjugated(f: Function) -> Function:
            return lambda x: _conj(f(_conj(x)))

        known = self.matrix
        matrix = None if known is None else lambda: known().conj()
        forward, backward = conjugated(self.forward), conjugated(self.backward)
        barred = f"conj({self.symbol})"
        port = self.port

        def ported(namespace: Namespace) -> tuple[Function, Function]:
            assert port is not None
            there, back = port(namespace)
            return conjugated(there), conjugated(back)

        ports = None if port is None else ported
        other = LocalMap(self.domain, self.codomain, forward, backward, barred, matrix, ports)
        other.__dict__["conj"] = self
        return other

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        """Results for arguments, both in the order of the regions.

        Raises:
            ArgumentError, ShapeError, DTypeError: the function's result does not fit the codomain.
        """
        return self.checked(self.forward(bare_or_dict(self.domain.regions, arrays)))

    def checked(self, result: Any) -> list[Array]:
        """What the function returned, as arrays in the order of the codomain's regions.

        Raises:
            ArgumentError, ShapeError, DTypeError: it does not fit the codomain.
        """
        names = [region.name for region in self.codomain.regions]
        if len(names) == 1 and not isinstance(result, Mapping):
            result = {names[0]: result}
        if not isinstance(result, Mapping) or sorted(result) != sorted(names):
            raise ShapeError(
                f"local operator {self.symbol}: returned {type(result).__name__}; expected arrays "
                f"for the regions {names}"
            )
        try:
            taken, kind = self.namespace.taken, self.namespace.ndarray
            return [self.codomain.check(self.codomain[n], taken(result[n]), kind) for n in names]
        except (ArgumentError, ShapeError, DTypeError) as error:
            raise type(error)(f"local operator {self.symbol} returned: {error}") from None

    def to_matrix(self) -> scipy.sparse.csr_array:
        """The matrix: as known, else found by applying the function to unit vectors."""
        if self.matrix is not None:
            return scipy.sparse.csr_array(self.matrix())
        columns = []
        for k in range(self.domain.size):
            unit = np.zeros(self.domain.size, self.domain.dtype)
            unit[k] = 1
            vector = self.domain.unflatten(unit)
            outputs = self([vector[r.name] for r in self.domain.regions])
            columns += [np.ravel(y) for y in outputs]
        flat = np.concatenate(columns) if columns else np.zeros(0)
        dense = flat.reshape(self.shape[::-1]).T
        return scipy.sparse.csr_array(dense.astype(sparse_dtype(self.domain.dtype)))

    @property
    def shape(self) -> tuple[int, int]:
        return self.codomain.size, self.domain.size


@dataclass(frozen=True)
class Call:
    """A local map applied to named regions of a stage."""

    map: LocalMap
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def adjoint(self) -> Call:
        return Call(self.map.adjoint, self.outputs, self.inputs)

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers that compute it; several if its regions are replicated."""
        sides = (*self.map.domain.regions, *self.map.codomain.regions)
        return sides[0].workers if sides else ()


Layer = tuple[Call, ...]
"""Calls on disjoint regions; the other regions of the stage pass through."""


@dataclass(frozen=True, eq=False)
class Stages:
    """M_k L_k ··· L_1 M_0, first applied first: ``len(movements) == len(layers) + 1``."""

    movements: tuple[Movement, ...]
    layers: tuple[Layer, ...] = ()

    @property
    def domain(self) -> Space:
        return self.movements[0].domain

    @property
    def codomain(self) -> Space:
        return self.movements[-1].codomain

    @property
    def pure(self) -> bool:
        """Whether this moves data and does nothing else."""
        return not any(self.layers) and len(self.movements) == 1

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(call for layer in self.layers for call in layer)

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """Every worker that has something to do, in order."""
        spaces = [s for m in self.factored.movements for s in (m.domain, m.codomain)]
        return tuple(sorted(set().union(*(space.workers for space in spaces))))

    @cached_property
    def factored(self) -> Stages:
        """The stages as they run: movements whose product is far longer than they, one by one; sums
        that several workers want, in shares where that is predicted to be faster."""
        movements: list[Movement] = []
        layers: list[Layer] = []
        for movement, layer in zip(self.movements, (*self.layers, None), strict=True):
            pieces = [piece for one in movement.factored() for piece in in_shares(one)]
            movements += pieces
            layers += [()] * (len(pieces) - 1) + ([] if layer is None else [layer])
        same = len(movements) == len(self.movements)
        return self if same else Stages(tuple(movements), tuple(layers))

    @staticmethod
    def of_map(local: LocalMap) -> Stages:
        """A local map as stages."""
        names = (tuple(r.name for r in side.regions) for side in (local.domain, local.codomain))
        movements = tuple(Movement.between(s, s) for s in (local.domain, local.codomain))
        return Stages(movements, ((Call(local, *names),),))

    def after(self, right: Stages) -> Stages:
        """The composition self ∘ right: the movements that meet become one."""
        middle = self.movements[0] @ right.movements[-1]
        return Stages(
            (*right.movements[:-1], middle, *self.movements[1:]), (*right.layers, *self.layers)
        )

    def scale(self, scalar: Scalar) -> Stages:
        return Stages((*self.movements[:-1], self.movements[-1].scale(scalar)), self.layers)

    def adjoint(self) -> Stages:
        """By transposition: the second road to an adjoint."""
        return Stages(
            tuple(m.adjoint() for m in reversed(self.movements)),
            tuple(tuple(call.adjoint for call in layer) for layer in reversed(self.layers)),
        )

    @staticmethod
    def direct_sum(blocks: Sequence[Stages], domain: Space, codomain: Space) -> Stages:
        """The block diagonal: all blocks stage by stage, side by side."""
        depth = max((len(block.layers) for block in blocks), default=0)
        padded = [
            block._renamed(f"{{}}⟨{k}⟩".format, inner=True)._deepened(depth)
            for k, block in enumerate(blocks)
        ]
        movements = []
        for i in range(depth + 1):
            parts = [block.movements[i] for block in padded]
            first = domain if i == 0 else _union([p.domain for p in parts], domain)
            last = codomain if i == depth else _union([p.codomain for p in parts], domain)
            movements.append(Movement.direct_sum(parts, first, last))
        layers = [tuple(c for block in padded for c in block.layers[i]) for i in range(depth)]
        return Stages(tuple(movements), tuple(layers))

    @staticmethod
    def sum(terms: Sequence[Stages]) -> Stages:
        """ΣA_i; where local maps are involved, as [I ··· I] diag(A_1 ··· A_n) [I; ···; I], so that
        every term has its own copy of the argument and nothing new is needed to run it."""
        if all(term.pure for term in terms):
            total = terms[0].movements[0]
            for term in terms[1:]:
                total = total + term.movements[0]
            return Stages((total,))
        domain, codomain = terms[0].domain, terms[0].codomain
        apart = [t._renamed(f"{{}}+{k}".format) for k, t in enumerate(terms)]
        spread = _union([t.domain for t in apart], domain)
        gathered = _union([t.codomain for t in apart], domain)
        copies = _renaming(domain, spread, len(terms))
        totals = _renaming(codomain, gathered, len(terms)).adjoint()
        wide = Stages.direct_sum(apart, spread, gathered)
        return Stages((totals,)).after(wide).after(Stages((copies,)))

    def _deepened(self, depth: int) -> Stages:
        more = depth - len(self.layers)
        still = Movement.between(self.codomain, self.codomain)
        return Stages(self.movements + (still,) * more, self.layers + ((),) * more)

    def _renamed(self, rename: Callable[[str], str], inner: bool = False) -> Stages:
        """The same stages over regions of other names; only those between stages if `inner`."""
        last = len(self.movements) - 1
        movements = []
        for i, m in enumerate(self.movements):
            domain = m.domain if inner and i == 0 else _rename(m.domain, rename)
            codomain = m.codomain if inner and i == last else _rename(m.codomain, rename)
            movements.append(Movement(domain, codomain, m.rows))
        layers = tuple(
            tuple(
                Call(c.map, tuple(map(rename, c.inputs)), tuple(map(rename, c.outputs)))
                for c in layer
            )
            for layer in self.layers
        )
        return Stages(tuple(movements), layers)

    def same_as(self, other: Stages) -> bool:
        """Whether both are the same movements around the same local maps: a proof of equality,
        and no proof of the contrary."""
        return (
            len(self.movements) == len(other.movements)
            and self.layers == other.layers
            and all(a == b for a, b in zip(self.movements, other.movements, strict=True))
        )

    def equals(self, other: Stages) -> bool:
        """Whether both are the same map, for all vectors.

        Raises:
            UndecidableError: it depends on local maps of unknown matrix, or on rounding.
        """
        if self.same_as(other):
            return True
        if self.pure and other.pure:
            return False
        calls = (*self.calls, *other.calls)
        unknown = sorted({c.map.symbol for c in calls if c.map.matrix is None})
        if unknown:
            raise UndecidableError(
                f"equals: cannot decide; the matrix of {', '.join(unknown)} is not known. Compare "
                f"to_matrix() of both, which applies them to unit vectors"
            )
        into = Movement.between(self.domain, other.domain).to_matrix()
        out = Movement.between(other.codomain, self.codomain).to_matrix()
        return _same_matrix(self.to_matrix(), out @ other.to_matrix() @ into, self.domain.dtype)

    def to_matrix(self) -> scipy.sparse.csr_array:
        """The sparse matrix, codomain.size x domain.size."""
        matrix = self.movements[0].to_matrix()
        for i, layer in enumerate(self.layers):
            before, after = self.movements[i].codomain, self.movements[i + 1].domain
            matrix = (
                self.movements[i + 1].to_matrix() @ _layer_matrix(before, after, layer) @ matrix
            )
        return scipy.sparse.csr_array(matrix)

    @cached_property
    def fingerprint(self) -> bytes:
        """A digest that workers compare to know that they built the same operator. Of local maps it
        covers regions and names, not values: those may be known to their own worker only."""
        return digest_of(*(m.fingerprint for m in self.movements), *self._layers_text)

    @cached_property
    def digest(self) -> bytes:
        """As `fingerprint`, but of how the operator was made, found without its transfers: equal
        ones mean equal operators, others nothing."""
        return digest_of(*(m.digest for m in self.movements), *self._layers_text)

    @property
    def _layers_text(self) -> list[str]:
        return [repr([(c.map.symbol, c.inputs, c.outputs) for c in layer]) for layer in self.layers]


def bare_or_dict(regions: Sequence[Region], arrays: Sequence[Array]) -> Any:
    """The arrays of one side of an operator as users meet them: none is `None`, one is the bare
    array, several are a dict by region name."""
    if len(regions) == 1:
        return arrays[0]
    return {r.name: a for r, a in zip(regions, arrays, strict=True)} or None


def _conj(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {name: _conj(array) for name, array in x.items()}
    y = None if x is None else np.conj(x)
    return np.asarray(y) if isinstance(y, np.generic) else y  # a ufunc's, for no dimensions


def _swapped(port: Port) -> Port:
    return lambda namespace: port(namespace)[::-1]


def _rename(space: Space, rename: Callable[[str], str]) -> Space:
    renamed = (Region.checked(rename(r.name), r.shape, r.workers, r.memory) for r in space.regions)
    return Space(renamed, space.dtype)


def _union(spaces: Sequence[Space], like: Space) -> Space:
    return Space((region for space in spaces for region in space.regions), like.dtype)


def _renaming(narrow: Space, wide: Space, copies: int) -> Movement:
    """[I; ···; I] from a space to so many copies of it, whose regions are called ``name+k``."""
    blocks: list[Delta] = [
        (as_subset(wide[f"{region.name}+{k}"]), as_subset(region), 1)
        for k in range(copies)
        for region in narrow.regions
    ]
    return Movement.of_blocks(narrow, wide, blocks)


def _layer_matrix(before: Space, after: Space, layer: Layer) -> scipy.sparse.csr_array:
    """The matrix of a layer: its maps' matrices in their places, identity where regions pass."""
    used = {name for call in layer for name in call.inputs}
    made = {name for call in layer for name in call.outputs}
    blocks: list[tuple[tuple[str, ...], tuple[str, ...], scipy.sparse.sparray]] = [
        ((r.name,), (r.name,), scipy.sparse.eye_array(r.size))
        for r in before.regions
        if r.name not in used and r.name not in made
    ]
    blocks += [(call.inputs, call.outputs, call.map.to_matrix()) for call in layer]
    rows, columns, values = [], [], []
    for inputs, outputs, matrix in blocks:
        coo = scipy.sparse.coo_array(matrix)
        rows.append(_positions(after, outputs)[coo.row])
        columns.append(_positions(before, inputs)[coo.col])
        values.append(coo.data)
    shape = (after.size, before.size)
    if not blocks:
        return scipy.sparse.csr_array(shape, dtype=before.dtype)
    index = (np.concatenate(rows), np.concatenate(columns))
    return scipy.sparse.csr_array((np.concatenate(values), index), shape=shape)


def _positions(space: Space, names: Sequence[str]) -> Array:
    ranges = [space.offsets[n] + np.arange(space[n].size) for n in names]
    return np.concatenate(ranges) if ranges else np.zeros(0, np.int64)


def _same_matrix(
    a: scipy.sparse.csr_array, b: scipy.sparse.csr_array, dtype: np.dtype[Any]
) -> bool:
    """Whether two matrices are equal, entry by entry.

    Raises:
        UndecidableError: they differ by no more than rounding of their entries.
    """
    difference = abs(a - b)
    worst = difference.max() if difference.nnz else 0
    if worst == 0:
        return True
    eps = np.finfo(dtype if dtype.kind in "fc" else np.float64).eps
    if worst <= 16 * eps * max(abs(a).max(), abs(b).max()):
        raise UndecidableError(
            f"equals: cannot decide; the matrices differ by {worst:.1e}, which may be rounding. "
            f"Compare to_matrix() of both with a tolerance of your own"
        )
    return False
