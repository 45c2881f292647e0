"""The protocol of SciPy's linear operators and of matrices, on flat and shaped NumPy arrays.

An operator is applied to arrays in this process, through its `domain` and `codomain`; plans under
MPI have `linop.interop`. Nothing here knows what an operator is made of.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from operator import matmul
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import scipy  # submodules load on first use

from linop.caching import cached_property
from linop.errors import ArgumentError, DTypeError, ShapeError, UndecidableError
from linop.spaces.region import integer
from linop.spaces.scalars import Array, array_of
from linop.spaces.space import Order, Space
from linop.spaces.vector import Vector

if TYPE_CHECKING:
    from linop.operators.operator import LinearOperator

DENSE = 1000
"""Operators of at most so many rows and columns have eigenvalues and norms from a dense matrix."""


class SciPyProtocol:
    """The methods that SciPy's solvers call, and that people know of matrices.

    Flat arrays are those of `Space.flatten`: the elements of a tensor space are in the C order of
    the global tensor, whatever its partition. Numbers of other dtypes, and lists, are converted
    (`Space.unflatten`); what the operator's dtype does not hold is a `DTypeError`.

    Flat arrays have the Euclidean inner product, as SciPy's solvers take it, whichever those of the
    spaces are: A^H is the conjugate transpose of the matrix, `LinearOperator.euclidean_adjoint`.
    """

    @cached_property
    def flat_ends(self) -> tuple[Space, Space]:
        """Domain and codomain, as the spaces whose orders flat vectors have. Where they are equal,
        one order holds for both, so that the matrix is that of an endomorphism: ``linop.shift`` has
        the blocks of its domain on other workers. The adjoint has the same order."""
        domain, codomain = self._op.domain, self._op.codomain
        if domain is codomain or domain != codomain:
            return domain, codomain
        one = min(domain, codomain, key=_preference)
        return one, one

    @property
    def _op(self) -> LinearOperator:
        return cast("LinearOperator", self)

    def matvec(self, x: npt.ArrayLike) -> Array:
        """A x, for x of shape (n,) or (n, 1), as an array of shape (m,) or (m, 1).

        Raises:
            ShapeError: another shape. DTypeError: as `Space.unflatten`.

        Example:
            >>> X = linop.TensorSpace((2, 2), linop.Partition((2, 1)))
            >>> linop.stencil(X, {(0, 0): 3.0}).matvec(np.arange(4.0)).tolist()
            [0.0, 3.0, 6.0, 9.0]
        """
        return _flat(self._op, x, "matvec")

    def rmatvec(self, y: npt.ArrayLike) -> Array:
        """A^H y, for y of shape (m,) or (m, 1), as an array of shape (n,) or (n, 1).

        Example:
            >>> X = linop.TensorSpace((3,), linop.Partition(3))
            >>> linop.shift(X, 1).rmatvec(np.arange(3.0)).tolist()
            [1.0, 2.0, 0.0]
        """
        return _flat(self._op.euclidean_adjoint, y, "rmatvec")

    def matmat(self, X: npt.ArrayLike) -> Array:
        """A X, for a matrix X of shape (n, k), as an array of shape (m, k)."""
        return _columns(self._op, X, "matmat")

    def rmatmat(self, Y: npt.ArrayLike) -> Array:
        """A^H Y, for a matrix Y of shape (m, k), as an array of shape (n, k)."""
        return _columns(self._op.euclidean_adjoint, Y, "rmatmat")

    def dot(self, x: Any) -> Any:
        """The product with an operator, a `Vector`, an array or a scalar: ``A @ x``; of a scalar
        ``A * x``."""
        scalar = isinstance(x, int | float | complex | np.number)
        return self._op * x if scalar or isinstance(x, np.ndarray) else self._op @ x

    ndim = 2
    """SciPy's sparse matrices ask for it."""

    def _joined(self, other: Any, join: Callable[[Any, Any], Any]) -> Any:
        """``join(A, other)`` of both as SciPy's operators, if the other one is SciPy's operator or
        sparse matrix, or PyLops' operator; else NotImplemented."""
        if not (hasattr(other, "matvec") or scipy.sparse.issparse(other)):
            return NotImplemented
        return join(self._op.to_scipy(), scipy.sparse.linalg.aslinearoperator(other))

    def _is_matrix(self, x: Array) -> bool:
        """True for an array of shape (n, k) that is not the domain's only region."""
        regions = self._op.domain.regions
        alone = len(regions) == 1 and regions[0].shape == x.shape
        return x.ndim == 2 and len(x) == self._op.shape[1] and not alone

    def __rmatmul__(self, other: Any) -> Any:
        """The product of an array of shape (m,) or (k, m) with the matrix."""
        if not isinstance(other, np.ndarray):
            return self._joined(other, lambda own, left: left @ own)
        transposed = self._op.T
        return transposed.matvec(other) if other.ndim == 1 else transposed.matmat(other.T).T

    def _applied(self, x: Any) -> Any:
        """``A @ x``, unless x is an operator.

        An array of shape (n,) is a flat vector, one of (n, k) a matrix. One of the shape of the
        domain's only region or global tensor is that, and gives one of the codomain's; a flat array
        if the codomain's regions overlap, or are several without being a tensor.

        Raises:
            ShapeError: another shape.
        """
        foreign = hasattr(x, "shape") and not isinstance(x, np.ndarray)
        if foreign and (composed := self._joined(x, matmul)) is not NotImplemented:
            return composed
        if x is None or foreign or isinstance(x, Vector | Mapping):
            return self._op(x)
        x = array_of(x, "operator @ x")
        domain, codomain = self.flat_ends
        natural, n = natural_shape(domain), self._op.shape[1]
        if x.shape == natural:
            result = natural_shape(codomain)
            return self.matvec(x.reshape(-1)).reshape(-1 if result is None else result)
        if x.ndim == 1:
            return self.matvec(x)
        if x.ndim == 2 and len(x) == n:
            return self.matmat(x)
        forms = f"({n},) or ({n}, k)" + (f" or {natural}" if natural not in (None, (n,)) else "")
        raise ShapeError(f"operator @ x: an array of shape {x.shape} given, {forms} expected")

    def todense(self) -> Array:
        """The matrix as an array of shape (m, n); see `LinearOperator.to_matrix`.

        Example:
            >>> X = linop.TensorSpace((2,), linop.Partition(2))
            >>> linop.stencil(X, {1: 5.0}).todense().tolist()
            [[0.0, 5.0], [0.0, 0.0]]
        """
        return cast(Array, self._op.to_matrix().toarray()).astype(self._op.dtype, copy=False)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("copy=False, but an operator's matrix is made when it is asked for")
        return self.todense().astype(dtype or self._op.dtype, copy=False)

    __iter__ = None
    """None: an operator is no sequence, although it has rows."""

    def __getitem__(self, index: Any) -> Any:
        """Entries, rows and columns of the matrix, as of a NumPy array: ``A[i, j]``, ``A[:, j]``,
        ``A[i]``, ``A[2:5, [0, 3]]``. The operator, or its adjoint, is applied once for each column
        or row, whichever are fewer.

        Raises:
            IndexError: as NumPy's.

        Example:
            >>> A = linop.local_operators.matrix(np.array([[1.0, 2.0], [3.0, 4.0]]))
            >>> float(A[1, 0]), A[:, 1].tolist()
            (3.0, [2.0, 4.0])
        """
        rows, columns = _rows_and_columns(index)
        # Of numbers of rows and columns, so that NumPy's own rules say what an index means.
        i, j = np.arange(self._op.shape[0])[rows], np.arange(self._op.shape[1])[columns]
        if i.ndim > 1 or j.ndim > 1:
            raise IndexError(
                f"an operator takes an index or two, each an integer, a slice or a sequence of "
                f"integers; given {index!r}"
            )
        if i.ndim == j.ndim == 1 and slice not in (type(rows), type(columns)):
            i, j = np.broadcast_arrays(i, j)  # pairs, as NumPy takes two sequences
            return np.array(
                [self[int(a), int(b)] for a, b in zip(i, j, strict=True)], self._op.dtype
            )
        if j.size <= i.size or not self._op.clinear:
            found = self._units(self._op, j)[i].reshape(i.shape + j.shape)
        else:
            found = (
                self._units(self._op.euclidean_adjoint, i)[j].conj().T.reshape(i.shape + j.shape)
            )
        return found if found.ndim else found[()]

    def _units(self, op: LinearOperator, which: Array) -> Array:
        """Columns of an operator's matrix."""
        columns = which.reshape(-1)
        if not op.clinear and op.domain.dtype.kind == "c":
            op.to_matrix()  # raises: there is none
        units = np.zeros((op.shape[1], columns.size), op.domain.dtype)
        units[columns, np.arange(columns.size)] = 1
        return op.matmat(units)

    @property
    def real(self) -> LinearOperator:
        """The operator whose matrix is the real part; the operator itself of real dtypes."""
        op = self._op
        return (op + op.conj()) / 2 if op.dtype.kind == "c" else op

    @property
    def imag(self) -> LinearOperator:
        """The operator whose matrix is the imaginary part, in the operator's dtype."""
        op = self._op
        return (op - op.conj()) / 2j if op.dtype.kind == "c" else op * 0

    def trace(self) -> Any:
        """The sum of the matrix' diagonal, of which it is made: see `trace_est` for large ones.

        Raises:
            ShapeError: the operator is not square.

        Example:
            >>> X = linop.TensorSpace((4,), linop.Partition(2))
            >>> float(linop.stencil(X, {0: 2.0, 1: 1.0}).trace())
            8.0
        """
        self._square("trace")
        return self._op.to_matrix().trace()

    def trace_est(self, neval: int | None = None, seed: int | None = 0) -> Any:
        """An unbiased estimate of the trace: the mean of x^H A x over random vectors x of signs
        (Hutchinson, 1990); its variance is 2/neval times the sum of squares off the diagonal.

        Args:
            neval: number of vectors; a tenth of the operator's size by default.
            seed: of NumPy's generator.

        Raises:
            ShapeError: the operator is not square. ArgumentError: `neval` is below 1.
        """
        n = self._square("trace_est")
        neval = max(1, n // 10) if neval is None else integer(neval, "neval")
        if neval < 1:
            raise ArgumentError(f"trace_est: neval from 1 expected, given {neval}")
        dtype = self._op.domain.dtype
        if dtype.kind == "u":
            raise DTypeError(f"trace_est: {dtype} has no sign; trace() is exact")
        signs = np.random.default_rng(seed).choice(np.array([-1, 1], dtype), (n, neval))
        wide = np.result_type(self._op.dtype, np.float64)
        return np.vdot(signs.astype(wide), self.matmat(signs).astype(wide)) / neval

    def eigs(
        self,
        neigs: int | None = None,
        symmetric: bool = False,
        niter: int | None = None,
        **options: Any,
    ) -> Array:
        """Eigenvalues, the largest in modulus first; PyLops' arguments.

        Args:
            neigs: how many; by default all, which a dense matrix gives. Fewer are found by ARPACK
                (`scipy.sparse.linalg.eigs`).
            symmetric: the operator is Hermitian, so that eigenvalues are real
                (`scipy.sparse.linalg.eigsh`).
            niter: iterations of ARPACK, at most.
            options: of SciPy's function.

        Raises:
            ShapeError: the operator is not square. ArgumentError: `neigs` is below 1, or there are
                options for all eigenvalues but one, which ARPACK does not find.

        Example:
            >>> A = linop.local_operators.diagonal(np.array([1.0, 4.0, 2.0]))
            >>> A.eigs(2, symmetric=True).round(6).tolist()
            [4.0, 2.0]
        """
        n = self._square("eigs")
        if neigs is not None and (neigs := integer(neigs, "neigs")) < 1:
            raise ArgumentError(f"eigs: neigs from 1 expected, given {neigs}")
        if options and (neigs is None or neigs >= n - 1):
            raise ArgumentError(
                f"eigs: {', '.join(options)}: options are ARPACK's, which finds fewer than {n - 1} "
                f"eigenvalues of an operator of shape {self._op.shape}; given neigs={neigs}"
            )
        if neigs is None or neigs >= n - 1 or (n <= DENSE and not options):
            dense = self.todense().astype(np.result_type(self._op.dtype, np.float32), copy=False)
            found = np.linalg.eigvalsh(dense) if symmetric else np.linalg.eigvals(dense)
        else:
            solver = scipy.sparse.linalg.eigsh if symmetric else scipy.sparse.linalg.eigs
            start = {"v0": np.random.default_rng(0).standard_normal(n)} | options
            found = solver(
                self._op.to_scipy(), k=neigs, maxiter=niter, return_eigenvectors=False, **start
            )
        order = np.argsort(-np.abs(found), kind="stable")
        return np.asarray(found[order][:neigs])

    def cond(self, **options: Any) -> float:
        """The condition number in the 2-norm: the ratio of the largest singular value to the
        smallest; infinite if that is zero.

        Args:
            options: of `scipy.sparse.linalg.lobpcg`, which finds the ends of the spectrum of A^H A,
                or A A^H, for operators of more than 1,000 rows and columns. Condition numbers
                beyond the inverse root of the machine epsilon are infinite there.

        Raises:
            ArgumentError: the operator has no rows or no columns. UndecidableError: it does not
                converge in its iterations; ``maxiter=`` gives it more.

        Example:
            >>> A = linop.local_operators.diagonal(np.array([1.0, 4.0, 2.0]))
            >>> round(A.cond(), 6)
            4.0
        """
        if not min(self._op.shape):
            raise ArgumentError(f"cond: a {self._op.shape} operator has no singular values")
        if min(self._op.shape) <= DENSE:
            dense = self.todense().astype(np.result_type(self._op.dtype, np.float32), copy=False)
            values = np.linalg.svd(dense, compute_uv=False)
            large, small = float(values[0]), float(values[-1])
            least = large * max(self._op.shape) * float(np.finfo(values.dtype).eps)
        else:
            eps = float(np.finfo(np.result_type(self._op.dtype, np.float32)).eps)
            most = self._end_of_gram(True, 0.0, options)
            noise = most * max(self._op.shape) * eps
            small = max(self._end_of_gram(False, noise, options), 0.0) ** 0.5
            large, least = most**0.5, noise**0.5
        return large / small if small > least else float("inf")

    def _end_of_gram(self, largest: bool, noise: float, options: dict[str, Any]) -> float:
        """The largest or smallest eigenvalue of A^H A, or of A A^H if that is smaller.

        Args:
            noise: an eigenvalue no larger is zero to rounding.
        """
        op = self._op
        back = op.euclidean_adjoint
        gram = (back @ op if op.shape[0] >= op.shape[1] else op @ back).to_scipy()
        start = np.random.default_rng(0).standard_normal((gram.shape[0], 4))
        chosen = {"maxiter": 500, "tol": 1e-10} | options
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it has not converged: as is seen below
            found, vectors = scipy.sparse.linalg.lobpcg(
                gram, start.astype(gram.dtype), largest=largest, **chosen
            )
        k = int(np.argmax(found) if largest else np.argmin(found))
        rest = np.linalg.norm(gram @ vectors[:, k] - found[k] * vectors[:, k])
        if not rest <= max(0.01 * abs(found[k]), noise):  # the error is of its square
            raise UndecidableError(
                f"cond: an end of the spectrum of A^H A, {found[k]:.3g}, is known to {rest:.1g} "
                f"after {chosen['maxiter']} iterations; cond(maxiter=…) takes more"
            )
        return float(found[k])

    def _square(self, what: str) -> int:
        m, n = self._op.shape
        if m != n:
            raise ShapeError(
                f"{what}: a square operator expected, given one of shape {self._op.shape}"
            )
        return n


def _rows_and_columns(index: Any) -> tuple[Any, Any]:
    """The indices of rows and of columns; an ellipsis stands for those that are not given.

    Raises:
        IndexError: there are more than two.
    """
    given = list(index) if isinstance(index, tuple) else [index]
    hole = next((k for k, one in enumerate(given) if one is Ellipsis), None)
    missing = [slice(None)] * max(0, 2 + (hole is not None) - len(given))
    at = len(given) if hole is None else hole
    full = [*given[:at], *missing, *given[at + (hole is not None) :]]
    if len(full) != 2:
        raise IndexError(f"an operator takes an index or two, of rows and columns; given {index!r}")
    return full[0], full[1]


def multiple_of_identity(matrix: Array, op: LinearOperator) -> Any:
    """The number c of which an array is c times the identity matrix, as SciPy's functions of
    matrices subtract it.

    Raises:
        ShapeError: the array has another shape. ArgumentError: it is no such multiple.
    """
    if matrix.shape != op.shape:
        raise ShapeError(f"operator + matrix: {matrix.shape} given, {op.shape} expected")
    c = matrix[0, 0] if matrix.size else 0
    if not (op.shape[0] == op.shape[1] and (matrix == c * np.eye(len(matrix))).all()):
        raise ArgumentError(
            "operator + matrix: of arrays, only multiples of the identity are added; "
            "linop.local_operators.matrix makes an operator of a worker's matrix"
        )
    return c


def _preference(space: Space) -> tuple[Any, ...]:
    """Sorting key of equal spaces: tensor spaces first, those on workers in ascending order."""
    regions = [(region.workers, region.name) for region in space.regions]
    return not any(space.wholes), regions, repr(space.wholes)


def natural_shape(space: Space) -> tuple[int, ...] | None:
    """The shape that users' arrays of a space have; None if its regions make no array."""
    if len(space) == 1:
        return space.regions[0].shape
    shape: tuple[int, ...] | None = getattr(space, "global_shape", None)
    return shape if shape is not None and space.whole and space.whole.shape == shape else None


def _flat(op: LinearOperator, x: npt.ArrayLike, what: str) -> Array:
    """An operator's product with a flat vector.

    Raises:
        ShapeError: another shape.
    """
    given = array_of(x, what)
    n = op.domain.size
    if given.shape not in ((n,), (n, 1)):
        raise ShapeError(f"{what}: a flat array of shape ({n},) expected, given {given.shape}")
    y = flat_result(op, given)
    return y if given.ndim == 1 else y.reshape(-1, 1)


def flat_result(op: LinearOperator, x: Array, order: Order = "global") -> Array:
    """An operator's product with a flat vector of `Space.flatten`'s order."""
    domain, codomain = op.flat_ends if order == "global" else (op.domain, op.codomain)
    return codomain.flatten(op(domain.unflatten(x, order)), order)


def _columns(op: LinearOperator, X: npt.ArrayLike, what: str) -> Array:
    """An operator's product with each column of a matrix.

    Raises:
        ShapeError: it is no matrix of as many rows as the domain has elements.
    """
    given = array_of(X, what)
    n = op.domain.size
    if given.ndim != 2 or len(given) != n:
        raise ShapeError(f"{what}: a matrix of shape ({n}, k) expected, given {given.shape}")
    found = np.empty((op.codomain.size, given.shape[1]), op.codomain.dtype)
    for k, column in enumerate(given.T):
        found[:, k] = _flat(op, column, what)
    return found
