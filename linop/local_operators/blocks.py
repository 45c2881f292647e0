"""Operators built of blocks, which may be matrices: block matrices, block-diagonal ones, stacks.

All blocks are in this process; `linop.local_operators.own_blocks` builds the same of blocks that
are each known to its worker alone, which is what the argument ``backend`` asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy

from linop.errors import ArgumentError
from linop.local_operators import own_blocks
from linop.local_operators.matrices import matrix
from linop.local_operators.relabelling import between
from linop.local_operators.scipy_operators import from_scipy
from linop.operators import algebra
from linop.operators.expressions import Identity, compose
from linop.operators.operator import LinearOperator
from linop.provenance import records_origin
from linop.spaces.direct_sums import distinct, joined_space
from linop.spaces.region import Region
from linop.spaces.space import Space


@records_origin
def block_diag(*blocks: Any, backend: Any = None) -> LinearOperator:
    """The block-diagonal operator diag(A, B, …), as `scipy.linalg.block_diag`. Regions whose name
    is in several blocks are renamed: ``x`` of the first block is ``x0``.

    Args:
        blocks: operators; or matrices (NumPy's, SciPy's sparse ones) and SciPy's or PyLops'
            operators, on regions ``x`` and ``y`` of worker 0, as for `matrix` and `from_scipy`.
            Matrices get the dtype of the first operator among them, else their common one.
        backend: of an SPMD program, in which every worker gives its own blocks and no others;
            collective. A block is on the worker that gives it, whichever its regions name, and must
            be on one. Workers may give several blocks, or none.

    Returns:
        An operator between direct sums. With a backend, the block of worker k has regions ``x@k``
        and ``y@k``; domain and codomain are tensor spaces, cut along dimension 0, where each worker
        has one region, and their shapes differ in dimension 0 alone. A block is applied by its
        worker only: compile the operator.

    Raises:
        SpaceError: dtypes differ. ArgumentError: there is no block, or one is no operator; or, with
            a backend, one is not on a single worker. With a backend on every worker.

    Example:
        >>> D = linop.block_diag(np.diag([1.0, 2.0]), np.diag([3.0, 4.0]))
        >>> (D @ np.ones(4)).tolist()
        [1.0, 2.0, 3.0, 4.0]
    """
    if own_blocks.is_spmd(backend):
        return own_blocks.block_diag(
            lambda: block_diag(*_here(_operators(blocks), backend)), len(blocks), backend
        )
    if not blocks:
        raise ArgumentError("block_diag: expected at least one block")
    ops = _operators(blocks)
    ends = distinct([op.domain for op in ops]), distinct([op.codomain for op in ops])
    return algebra.direct_sum(*map(between, ops, *ends))


def vstack(*blocks: Any, backend: Any = None) -> LinearOperator:
    """The block column [A; B; …], from the common domain to the direct sum of the codomains.

    Args:
        blocks: operators, and matrices, as for `block_diag`; a matrix beside operators is from
            their domain.
        backend: of an SPMD program, in which every worker gives its own blocks; collective. The
            domain is then replicated: each worker passes all of x, and gets its own part of the
            result; the adjoint sums over the workers. The blocks' domains have equal shapes.

    Raises:
        RegionError: without a backend, two codomains of operators share the name of a region
            (`block` renames them).
        SpaceError: domains or dtypes differ. Otherwise as `block_diag`.

    Example:
        >>> A = linop.vstack(np.eye(2), np.array([[1.0, 1.0]]))  # with the sum below
        >>> (A @ np.array([2.0, 3.0])).tolist()
        [2.0, 3.0, 5.0]
        >>> (A.H @ np.ones(3)).tolist()
        [2.0, 2.0]
    """
    if own_blocks.is_spmd(backend):
        return own_blocks.vstack(
            lambda: block([[A] for A in _here(blocks, backend)]), len(blocks), backend
        )
    return block([[one] for one in blocks]) if _any_matrix(blocks) else algebra.vstack(*blocks)


def hstack(*blocks: Any, backend: Any = None) -> LinearOperator:
    """The block row [A B …], from the direct sum of the domains to the common codomain.

    Args:
        blocks: operators, and matrices, as for `block_diag`; a matrix beside operators is to their
            codomain.
        backend: of an SPMD program, in which every worker gives its own blocks; collective. The
            codomain is then replicated: each worker passes its own part of x, and gets the sum.
            The adjoint of a `vstack`.

    Raises:
        RegionError: without a backend, two domains of operators share the name of a region
            (`block` renames them).
        SpaceError: codomains or dtypes differ. Otherwise as `block_diag`.

    Example:
        >>> row = linop.hstack(np.ones((1, 2)), 3 * np.ones((1, 2)))
        >>> (row @ np.array([1.0, 1.0, 1.0, 1.0])).tolist()
        [8.0]
        >>> (row.H @ np.array([1.0])).tolist()
        [1.0, 1.0, 3.0, 3.0]
    """
    if own_blocks.is_spmd(backend):
        column = own_blocks.vstack(
            lambda: block([_here(blocks, backend)]).euclidean_adjoint, len(blocks), backend
        )
        return column.euclidean_adjoint
    return block([blocks]) if _any_matrix(blocks) else algebra.hstack(*blocks)


@records_origin
def block(blocks: Sequence[Sequence[Any]]) -> LinearOperator:
    """The operator of a block matrix, as `scipy.sparse.block_array` and PyLops' ``Block``: from the
    direct sum of the columns' domains to that of the rows' codomains. Regions whose name is in
    several columns (rows) are renamed: ``x`` of the first one is ``x0``.

    Args:
        blocks: rows of operators, matrices (as for `block_diag`), and None for zero blocks; at
            least one in each row and column is not None. A matrix beside operators is from its
            column's domain to its row's codomain. Matrices alone are on regions of worker 0, from
            ``x`` to ``y``; to ``x`` if rows and columns have the same sizes.

    Raises:
        ArgumentError: rows have different lengths, or a row or column has no block.
        SpaceError: in a column, domains differ; in a row, codomains; or dtypes. ShapeError: a
            matrix does not fit its column and row.

    Example:
        >>> A, B = np.eye(2), np.ones((2, 1))
        >>> M = linop.block([[A, B], [None, np.full((1, 1), 5.0)]])
        >>> M.todense().tolist()
        [[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 5.0]]
    """
    rows = [list(row) for row in blocks]
    if len({len(row) for row in rows}) != 1 or not rows[0]:
        raise ArgumentError(f"block: rows of equal length expected, given {list(map(len, rows))}")
    given = {(i, j): A for i, row in enumerate(rows) for j, A in enumerate(row) if A is not None}
    dtype = _dtype("block", given.values())
    like = _held(given.values())
    columns = enumerate(zip(*rows, strict=True))
    domains = [_end("column", column, j, dtype, like) for j, column in columns]
    codomains = [_end("row", row, i, dtype, like) for i, row in enumerate(rows)]
    if len(_foreign(given.values())) == len(given) and _shapes(domains) == _shapes(codomains):
        codomains = domains
    ops = {(i, j): _operator(A, dtype, domains[j], codomains[i]) for (i, j), A in given.items()}
    for (i, j), op in ops.items():
        op.domain.same_as(domains[j], f"block ({i}, {j}), its domain and its column's")
        op.codomain.same_as(codomains[i], f"block ({i}, {j}), its codomain and its row's")
    return _assembled(ops, distinct(domains), distinct(codomains))


def _assembled(
    ops: Mapping[tuple[int, int], LinearOperator],
    domains: Sequence[Space],
    codomains: Sequence[Space],
) -> LinearOperator:
    """The sum of the blocks (row, column), each between an allocation of the other rows' regions
    and a deallocation of the other columns', with its regions renamed."""
    domain, codomain = joined_space(domains), joined_space(codomains)
    terms = []
    for (i, j), op in ops.items():
        into = algebra.restricted(codomain, codomains[i]).euclidean_adjoint
        out = algebra.restricted(domain, domains[j])
        named = between(op, domains[j], codomains[i])
        named = named if isinstance(out, Identity) else compose(named, out)
        terms.append(named if isinstance(into, Identity) else compose(into, named))
    return algebra.total(terms)


def _shapes(spaces: Sequence[Space]) -> list[list[tuple[int, ...]]]:
    return [[region.shape for region in space] for space in spaces]


def _here(blocks: Iterable[Any], backend: Any) -> list[Any]:
    """The blocks, those that are operators as ones of this worker."""
    return [
        own_blocks.here(A, backend.worker) if isinstance(A, LinearOperator) else A for A in blocks
    ]


def _any_matrix(blocks: Sequence[Any]) -> bool:
    return any(map(_is_matrix, _foreign(blocks)))


def _foreign(blocks: Iterable[Any]) -> list[Any]:
    return [one for one in blocks if not isinstance(one, LinearOperator)]


def _is_matrix(one: Any) -> bool:
    """True for a matrix, and for an operator of SciPy's or PyLops'."""
    if hasattr(one, "matvec") or scipy.sparse.issparse(one):
        return True
    try:
        array = np.asarray(one)
    except (TypeError, ValueError):  # rows of different lengths
        return False
    return array.ndim == 2 and array.dtype.kind in "biufcV"


def _dtype(what: str, blocks: Iterable[Any]) -> np.dtype[Any] | None:
    """The dtype of matrices among blocks: the first operator's, else their common one; None without
    any.

    Raises:
        ArgumentError: one is neither an operator nor a matrix.
    """
    known, given = [], []
    for one in blocks:
        if isinstance(one, LinearOperator):
            known.append(one.dtype)
        elif not _is_matrix(one):
            raise ArgumentError(f"{what}: expected operators or matrices, given {one!r}")
        elif not hasattr(one, "matvec"):
            given.append(one.dtype if hasattr(one, "dtype") else np.asarray(one).dtype)
    return known[0] if known else np.result_type(*given) if given else None


def _operators(blocks: Sequence[Any]) -> list[LinearOperator]:
    dtype = _dtype("block_diag", blocks)
    return [_operator(one, dtype) for one in blocks]


def _held(blocks: Iterable[Any]) -> tuple[tuple[int, ...], str]:
    """Workers and memory of the first operator among blocks; worker 0 without any."""
    ops = [one for one in blocks if isinstance(one, LinearOperator)]
    held = ((r.workers, r.memory) for op in ops for side in (op.domain, op.codomain) for r in side)
    return next(held, ((0,), "default"))


def _operator(
    one: Any, dtype: Any, domain: Space | None = None, codomain: Space | None = None
) -> LinearOperator:
    """A block as an operator: an operator itself, whose spaces are not changed.

    Args:
        dtype: of a matrix's spaces; of those that are None.
    """
    if isinstance(one, LinearOperator):
        return one
    if hasattr(one, "matvec"):
        return from_scipy(one, domain, codomain)
    A = one if scipy.sparse.issparse(one) else np.asarray(one)
    if domain is None:
        domain = Space(Region("x", A.shape[1]), dtype)
    return matrix(A, domain, codomain)


def _end(
    what: str, blocks: Sequence[Any], k: int, dtype: Any, like: tuple[tuple[int, ...], str]
) -> Space:
    """The domain of a column of blocks, or the codomain of a row: that of its first operator, else
    a region of the size of its first matrix, on the workers and in the memory `like`.

    Raises:
        ArgumentError: all blocks are None, or one is neither an operator nor a matrix.
    """
    given = [one for one in blocks if one is not None]
    if not given:
        raise ArgumentError(
            f"block: {what} {k} has no block; give it a linop.zero(domain, codomain)"
        )
    for one in given:
        if isinstance(one, LinearOperator):
            known: Space = one.domain if what == "column" else one.codomain
            return known
    op = _operator(given[0], dtype)
    name, side = ("x", op.domain) if what == "column" else ("y", op.codomain)
    return Space(Region(name, side.regions[0].shape, *like), op.dtype)
