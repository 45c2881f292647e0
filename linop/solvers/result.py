"""The result of an iterative method: a tuple as SciPy returns it, with named fields.

Fields have the names of `scipy.optimize.OptimizeResult`; programs written for the tuple of SciPy's
or PyLops' function of the same name run unchanged.
"""

from __future__ import annotations

from typing import Any

CONVERGED, LIMIT, STOPPED, BREAKDOWN, ACCURACY = range(5)
"""Values of `Result.status`, the same for all methods."""


class Result(tuple[Any, ...]):
    """The end of an iterative method. Unpacks and indexes as the tuple of SciPy's function.

    Attributes:
        x: the solution, a `Vector`; of eigenvalue methods the eigenvectors or singular vectors.
        success: True if the method's criterion is met.
        status: 0 converged, 1 limit of iterations reached, 2 stopped by the callback, 3 breakdown:
            the method cannot go on, for example since the operator is not positive definite;
            4 attainable accuracy reached: rounding keeps the residual above what is asked.
        message: the reason of the end as a sentence, with the numbers compared.
        nit: iterations done.
        residuals: norms of the residual, before the first iteration and after each.
        reductions: number of collective calls for inner products.

    Example:
        >>> A = linop.local_operators.matrix(np.diag([2.0, 4.0]))
        >>> found = linop.solvers.cg(A, np.array([2.0, 8.0]), maxiter=1)
        >>> found.success, found.status, found.nit, len(found.residuals)
        (False, 1, 1, 2)
        >>> x, info = found  # SciPy's tuple: info is the number of iterations
        >>> info
        1
    """

    x: Any
    success: bool
    status: int
    message: str
    nit: int
    residuals: list[float]
    reductions: int

    def __new__(cls, values: tuple[Any, ...], **fields: Any) -> Result:
        """The result that unpacks as `values`; `fields` are its attributes."""
        self = super().__new__(cls, values)
        self.__dict__.update(fields)
        return self

    def __reduce__(self) -> Any:
        return _remade, (tuple(self), self.__dict__)

    def __repr__(self) -> str:
        width = max(map(len, self.__dict__), default=0)
        rows = (f"{name:>{width}}: {_short(value)}" for name, value in self.__dict__.items())
        return "\n".join(rows)


def _remade(values: tuple[Any, ...], fields: dict[str, Any]) -> Result:
    return Result(values, **fields)


def _short(value: Any) -> str:
    """The text of a field: long lists by their ends."""
    if isinstance(value, list) and len(value) > 6:
        ends = [", ".join(f"{one!r}" for one in some) for some in (value[:3], value[-2:])]
        return f"[{ends[0]}, …, {ends[1]}] ({len(value)} numbers)"
    text = repr(value)
    return text if len(text) <= 200 else text[:199] + "…"
