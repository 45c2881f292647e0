"""Local maps (linear maps inside one worker's memory), and layers of them.

They are the steps of an operator that are not data movement. User-facing constructors are in
`linop.local_operators`; this module applies maps, checks their results and builds their matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import scipy

from linop.caching import attributes, cached_property
from linop.errors import ArgumentError, BackendError, DTypeError, ShapeError
from linop.spaces.array_modules import HOST, Namespace
from linop.spaces.region import Region
from linop.spaces.scalars import Array, sparse_dtype
from linop.spaces.space import Space

Function = Callable[[Any], Any]
Port = Callable[[Namespace], tuple[Function, Function]]
"""Builds the pair (forward, backward) of a local map for the arrays of an array module."""


@dataclass(frozen=True, eq=False)
class LocalMap:
    """A linear map inside one worker's memory: a pair of functions that are each other's adjoint.

    A function takes and returns the bare array of a side with one region, a dict by region name
    otherwise, and must not change its argument. `matrix` builds the sparse matrix,
    (codomain.size, domain.size); None if it is unknown. `port` builds the functions for device
    arrays; None if they take NumPy's only. `fresh`: both functions return newly allocated arrays
    that have no other reference, and write to no other memory. Functions that are not fresh get
    read-only views (of NumPy arrays), and their results are copied. `apart`: `forward` of a map
    with several arguments as a function of their arrays, in the order of the domain's regions;
    faster, since no dict is made. `inside`: both functions of a map between regions of one shape in
    a form that overwrites the argument with the result, and returns nothing.
    """

    domain: Space
    codomain: Space
    forward: Function
    backward: Function
    symbol: str
    matrix: Callable[[], scipy.sparse.sparray] | None = None
    port: Port | None = None
    namespace: Namespace = HOST
    fresh: bool = False
    apart: Callable[..., Any] | None = None
    inside: tuple[Callable[[Any], None], Callable[[Any], None]] | None = None

    def on(self, namespace: Namespace) -> LocalMap:
        """The same map for the arrays of another module; its constants (a matrix, a kernel) are
        copied to their memory in this call.

        Raises:
            ArgumentError: the map has no `port`: it takes NumPy arrays only.
        """
        if namespace.ndarray is self.namespace.ndarray:
            return self
        forward, backward = self._ported()(namespace)
        return replace(
            self,
            forward=forward,
            backward=backward,
            matrix=None,
            port=None,
            namespace=namespace,
            apart=None,
            inside=None,
        )

    def check_on(self, namespace: Namespace) -> None:
        """Check, without building it, that `on` succeeds; raises as `on`."""
        if namespace.ndarray is not self.namespace.ndarray:
            self._ported()

    def _ported(self) -> Port:
        if self.port is None:
            raise ArgumentError(
                f"local operator {self.symbol} computes with NumPy's arrays alone, not with those "
                f"of a device; put all its regions in memory='host', or give linop.local a pair of "
                f"functions that take these"
            )
        return self.port

    @cached_property
    def adjoint(self) -> LocalMap:
        """The map with forward and backward exchanged; its symbol gains or loses a star."""
        known = self.matrix
        matrix = None if known is None else lambda: known().conj().T
        starred = self.symbol[:-1] if self.symbol.endswith("*") else self.symbol + "*"
        port = None if self.port is None else _swapped(self.port)
        back = replace(
            self,
            domain=self.codomain,
            codomain=self.domain,
            forward=self.backward,
            backward=self.forward,
            symbol=starred,
            matrix=matrix,
            port=port,
            apart=None,
            inside=None if self.inside is None else self.inside[::-1],
        )
        attributes(back)["adjoint"] = self
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
        other = replace(
            self,
            forward=forward,
            backward=backward,
            symbol=barred,
            matrix=matrix,
            port=ports,
            apart=None,
            inside=None,
        )
        attributes(other)["conj"] = self
        return other

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        """Apply the map to arrays in the order of the domain's regions; returns arrays in the
        order of the codomain's, each newly allocated.

        Raises:
            ArgumentError, ShapeError, DTypeError: the function's result does not fit the codomain.
        """
        given = arrays if self.fresh else [read_only(array) for array in arrays]
        return self.checked(self.forward(bare_or_dict(self.domain.regions, given)))

    def checked(self, result: Any) -> list[Array]:
        """Check a function's result, and return it as arrays in the order of the codomain's
        regions; copied unless the map is fresh.

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
            found = [self.codomain.check(self.codomain[n], taken(result[n]), kind) for n in names]
        except (ArgumentError, ShapeError, DTypeError) as error:
            raise type(error)(f"local operator {self.symbol} returned: {error}") from None
        return found if self.fresh else [array.copy() for array in found]

    def to_matrix(self) -> scipy.sparse.csr_array:
        """The matrix, of shape `shape`: as known, else by applying the map to unit vectors."""
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


def read_only(array: Array) -> Array:
    """A read-only view of a NumPy array; a device array unchanged, since it has no such views."""
    if not isinstance(array, np.ndarray):
        return array
    view = array.view()
    view.flags.writeable = False
    return view


@dataclass(frozen=True)
class Call:
    """A local map applied to named regions of a stage, in the order of its domain and codomain."""

    map: LocalMap
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def adjoint(self) -> Call:
        return Call(self.map.adjoint, self.outputs, self.inputs)

    def renamed(self, names: Mapping[str, str]) -> Call:
        """The same map applied to regions of other names, by their names here."""
        if not names:
            return self
        sides = (tuple(names.get(n, n) for n in side) for side in (self.inputs, self.outputs))
        return Call(self.map, *sides)

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers that apply it; several if its regions are replicated."""
        sides = (*self.map.domain.regions, *self.map.codomain.regions)
        return sides[0].workers if sides else ()


Layer = tuple[Call, ...]
"""Calls on disjoint regions; the other regions of the stage are unchanged."""


def by_worker(layer: Layer) -> dict[int, Layer]:
    """The calls of each worker.

    Raises:
        BackendError: a local map spans several workers.
    """
    found: dict[int, list[Call]] = {}
    for call in layer:
        sides = (*call.map.domain.regions, *call.map.codomain.regions)
        if len({r.workers for r in sides}) > 1:
            held = ", ".join(f"{r.name} on {r.workers}" for r in sides)
            raise BackendError(
                f"local operator {call.map.symbol} spans several workers ({held}); "
                f"move its regions to one worker first"
            )
        for worker in call.workers:
            found.setdefault(worker, []).append(call)
    return {worker: tuple(calls) for worker, calls in found.items()}


def bare_or_dict(regions: Sequence[Region], arrays: Sequence[Array]) -> Any:
    """The arrays of one side of an operator in the form that users' functions take: None for no
    region, the bare array for one, a dict by region name for several."""
    if len(regions) == 1:
        return arrays[0]
    return {r.name: a for r, a in zip(regions, arrays, strict=True)} or None


def _conj(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {name: _conj(array) for name, array in x.items()}
    y = None if x is None else np.conj(x)
    return np.asarray(y) if isinstance(y, np.generic) else y  # a ufunc returns a scalar for 0-d


def _swapped(port: Port) -> Port:
    return lambda namespace: port(namespace)[::-1]


PositionedBlock: TypeAlias = "tuple[scipy.sparse.sparray, Array, Array]"
"""A matrix block, and the positions in flat vectors of its rows and of its columns."""


def layer_blocks(before: Space, after: Space, layer: Layer) -> list[PositionedBlock]:
    """The blocks of a layer's matrix: those of its maps, and one identity for unchanged regions."""
    touched = {name for call in layer for name in (*call.inputs, *call.outputs)}
    same = tuple(name for name in before.offsets if name not in touched)
    identity = scipy.sparse.eye_array(sum(before[name].size for name in same))
    blocks = [(same, same, identity)] if same else []
    blocks += [(call.inputs, call.outputs, call.map.to_matrix()) for call in layer]
    return [(m, _positions(after, out), _positions(before, of)) for of, out, m in blocks]


def layer_matrix(
    before: Space, after: Space, layer: Layer, dtype: np.dtype[Any]
) -> scipy.sparse.csr_array:
    """The matrix of a layer in a dtype, (after.size, before.size)."""
    shape = (after.size, before.size)
    rows, columns, values = [], [], []
    for matrix, at, of in layer_blocks(before, after, layer):
        coo = scipy.sparse.coo_array(matrix)
        rows.append(at[coo.row])
        columns.append(of[coo.col])
        values.append(coo.data.astype(dtype))
    if not rows:
        return scipy.sparse.csr_array(shape, dtype=dtype)
    index = (np.concatenate(rows), np.concatenate(columns))
    return scipy.sparse.csr_array((np.concatenate(values), index), shape=shape)


def _positions(space: Space, names: Sequence[str]) -> Array:
    ranges = [space.offsets[n] + np.arange(space[n].size) for n in names]
    return np.concatenate(ranges) if ranges else np.zeros(0, np.int64)
