"""A pair of functions as an operator inside one worker's memory; checks of its regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from linop.errors import ArgumentError, SpaceError
from linop.local_operators.real_linear import real_linear
from linop.normal_form.maps import Function, LocalMap, Port
from linop.normal_form.real_parts import parts_map
from linop.operators.expressions import Local
from linop.operators.operator import LinearOperator
from linop.operators.real_linear import RealLinear
from linop.provenance import records_origin
from linop.spaces.array_modules import HOST
from linop.spaces.region import Region
from linop.spaces.space import Space

RegionOrSpace = Region | Space


@records_origin
def local(
    domain: RegionOrSpace,
    codomain: RegionOrSpace,
    forward: Function,
    adjoint: Function,
    *,
    name: str = "L",
    dtype: npt.DTypeLike = np.float64,
    clinear: bool = True,
) -> LinearOperator:
    """A linear map given as a function and its adjoint, that of Euclidean inner products, whichever
    the spaces have. Neither is checked here: `linop.testing.check_adjoint` tests that they are
    linear and adjoint.

    Args:
        domain, codomain: regions or spaces, all on one worker.
        forward, adjoint: functions of a bare array if a side has one region, otherwise of a dict of
            arrays by region name; results likewise. They must not change their argument, which is
            read-only in host memory. Results are copied, so they may be views or reused buffers. On
            a device backend, arrays are device arrays; NumPy arrays if all regions are in host
            memory.
        name: the symbol.
        dtype: of the space, if a `Region` is given.
        clinear: False if the functions, of complex arrays, are linear over the real numbers only:
            the adjoint is then that for real inner products, Re <F x, y> = Re <x, F* y>. Methods of
            operators that say so (PyLops' ``clinear=False``) are taken at their word, as are
            functions between a real and a complex space.

    Raises:
        ArgumentError: a side is neither a `Region` nor a `Space`.
        SpaceError: regions are on different workers, or the sides' dtypes differ otherwise than as
            a real one and the complex one with such parts.

    Example:
        >>> x = linop.Region("x", 3)
        >>> A = linop.local(x, x, np.cumsum, lambda y: np.cumsum(y[::-1])[::-1])
        >>> (A @ np.ones(3)).tolist()
        [1.0, 2.0, 3.0]
        >>> (A.H @ np.array([0.0, 0.0, 1.0])).tolist()
        [1.0, 1.0, 1.0]
        >>> bool(linop.testing.check_adjoint(A))
        True
    """
    source, target = as_space(domain, dtype), as_space(codomain, dtype)
    return local_operator(
        source,
        target,
        lambda namespace: (forward, adjoint),
        name,
        fresh=False,
        clinear=clinear and not real_linear(forward, adjoint),
    )


def local_operator(
    domain: Space,
    codomain: Space,
    port: Port,
    name: str,
    known: Any = None,
    portable: bool = True,
    fresh: bool = True,
    clinear: bool = True,
    inside: tuple[Callable[[Any], None], Callable[[Any], None]] | None = None,
) -> LinearOperator:
    """A pair of functions as an operator.

    Args:
        domain, codomain: spaces, all regions of which are on the same workers.
        port: returns (forward, adjoint) for an array module, such as NumPy's or CuPy's.
        name: the symbol.
        known: returns the sparse matrix; None if it is unknown.
        portable: True if `port` accepts other array modules than NumPy's.
        fresh: True if both functions return newly allocated memory, and write to nothing else; see
            `LocalMap`.
        clinear: as for `local`.
        inside: both functions in a form that overwrites the argument of NumPy with the result.

    Raises:
        SpaceError: the regions are on different workers, or dtypes differ, unless as for `local`.
    """
    holders = {r.workers for space in (domain, codomain) for r in space.regions}
    if len(holders) > 1:
        raise SpaceError(
            f"local operator {name}: its regions are on different workers: {domain} -> {codomain}; "
            f"a local operator stays inside one worker{_cure(holders)}"
        )
    if domain.dtype != codomain.dtype or not (clinear or domain.dtype.kind != "c"):
        parts = parts_map(domain, codomain, port, name, known, portable, fresh=fresh)
        return RealLinear(Local(parts), domain, codomain)
    forward, backward = port(HOST)
    ported = port if portable else None
    how = {"fresh": fresh, "inside": inside}
    return Local(LocalMap(domain, codomain, forward, backward, name, known, ported, **how))  # type: ignore[arg-type]


def _cure(holders: set[tuple[int, ...]]) -> str:
    """The end of an error of regions on different workers: how to put them on the same ones."""
    shared = max(holders, key=len)
    if len(shared) == 1:
        return "; move the data between workers by another operator, such as linop.send_recv"
    return (
        f". A replicated region is on all of its workers, {shared}, and all of them compute: give "
        f"both sides regions with workers={shared}, once for all of them; or copy it first to a "
        f"region of one worker, linop.copy(space, replicated, own)"
    )


def as_space(given: RegionOrSpace, dtype: npt.DTypeLike) -> Space:
    """A `Space` as it is; a `Region` as the space of that region alone, with the given dtype.

    Raises:
        ArgumentError: it is neither.
    """
    if isinstance(given, Space):
        return given
    if isinstance(given, Region):
        return Space(given, dtype)
    raise ArgumentError(f"expected a Region or a Space, given {given!r}")


def single_region(what: str, space: Space) -> Region:
    """The only region of a space.

    Raises:
        SpaceError: it has none, or several.
    """
    if len(space) != 1:
        raise SpaceError(f"{what}: a space of one region expected, given {space}")
    return space.regions[0]
