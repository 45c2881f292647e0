"""NumPy's arithmetic, ufuncs and some of its functions, for vectors.

Every element is computed where it is held, without communication; sums, norms and products are
the vector's own, over all workers. `linop.spaces.vector` says what a vector is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np

from linop.errors import ArgumentError
from linop.spaces.comparison import Comparison
from linop.spaces.exact import Exact
from linop.spaces.scalars import Scalar, factor_of, is_scalar, reciprocal

if TYPE_CHECKING:
    from linop.spaces.vector import Vector


class ArrayProtocol:
    """Arithmetic of vectors with vectors of the same space, element by element, and with numbers.

    Multiples, sums, differences and quotients with numbers stay in the space's dtype, which has to
    hold the number. Ufuncs, powers, and products and quotients of vectors have NumPy's dtype; where
    it is another, the result is in the space of the same regions and that dtype.
    """

    __slots__ = ()
    __iter__ = None
    """None: a vector has regions, not a first element."""

    @property
    def _vector(self) -> Vector:
        return cast("Vector", self)

    def _number(self, what: str, number: Any, f: Callable[..., Any]) -> Vector:
        """f of each array and a number, in the space's dtype."""
        v = self._vector
        factor = factor_of(number, v.space.dtype)
        return v._map(what, lambda a: f(a, factor))

    def __add__(self, other: Vector | Scalar) -> Vector:
        if is_scalar(other):
            return self._number("add a number", other, np.add)
        return self._vector._map("add", np.add, other) if _is_vector(other) else NotImplemented

    __radd__ = __add__

    def __sub__(self, other: Vector | Scalar) -> Vector:
        if is_scalar(other):
            return self._number("subtract a number", other, np.subtract)
        v = self._vector
        return v._map("subtract", np.subtract, other) if _is_vector(other) else NotImplemented

    def __rsub__(self, other: Scalar) -> Vector:
        return -self + other if is_scalar(other) else NotImplemented

    def __mul__(self, other: Scalar | Exact | Vector) -> Vector:
        if is_scalar(other):
            return self._number("scale", other, np.multiply)
        if not _is_vector(other):
            return NotImplemented
        product: Vector = applied(np.multiply, (self, other))
        return product

    __rmul__ = __mul__

    def __truediv__(self, other: Scalar | Exact | Vector) -> Vector:
        if _is_vector(other):
            quotient: Vector = applied(np.true_divide, (self, other))
            return quotient
        if not is_scalar(other):
            return NotImplemented
        inverse, dtype = reciprocal(other), self._vector.space.dtype
        if dtype.kind in "iu":
            return self._number("scale", inverse, np.multiply)
        factor_of(inverse, dtype)
        return self._number("divide", other, np.divide)

    def __rtruediv__(self, other: Scalar) -> Vector:
        return applied(np.true_divide, (other, self)) if is_scalar(other) else NotImplemented

    def __pow__(self, other: Scalar | Vector) -> Vector:
        if is_scalar(other):  # by the arrays' own operator, which squares where a ufunc has powers
            v = self._vector
            dtype = (np.empty(0, v.space.dtype) ** other).dtype
            return v._map("power", lambda a: a**other, dtype=dtype)
        if not _is_vector(other):
            return NotImplemented
        powers: Vector = applied(np.power, (self, other))
        return powers

    def __neg__(self) -> Vector:
        return self._vector._map("negate", np.negative)

    def __abs__(self) -> Vector:
        sizes: Vector = applied(np.absolute, (self,))
        return sizes

    def conj(self) -> Vector:
        """The complex conjugate of each element."""
        return self._vector._map("conjugate", np.conjugate)

    @property
    def real(self) -> Vector:
        """The real part of each element, in the space of real numbers."""
        return _part(self._vector, "real")

    @property
    def imag(self) -> Vector:
        """The imaginary part of each element, in the space of real numbers."""
        return _part(self._vector, "imag")

    def dot(self, other: Vector) -> Scalar:
        """The sum of the products of elements, without conjugation, as `numpy.dot`; `inner`
        conjugates this vector. Collective for vectors made by a backend."""
        return self.conj().inner(other)

    def __lt__(self, other: object) -> Any:
        return self._vector._compared(other, np.less)

    def __le__(self, other: object) -> Any:
        return self._vector._compared(other, np.less_equal)

    def __gt__(self, other: object) -> Any:
        return self._vector._compared(other, np.greater)

    def __ge__(self, other: object) -> Any:
        return self._vector._compared(other, np.greater_equal)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """A ufunc of vectors and numbers.

        Raises:
            ArgumentError: an array among the vectors, or an option of NumPy's such as ``out=``.
            SpaceError: the vectors are of different spaces.
        """
        if method != "__call__" or ufunc.signature is not None:  # not element by element
            return NotImplemented
        if options:
            raise ArgumentError(
                f"numpy.{ufunc.__name__} of vectors takes no {', '.join(options)}; its result is a "
                f"new vector"
            )
        if (arithmetic := _ARITHMETIC.get(ufunc)) and any(map(is_scalar, inputs)):
            return arithmetic(*inputs)  # the space's dtype holds the number
        return applied(ufunc, inputs)

    def __array_function__(self, function: Any, _: Any, given: Any, options: Any) -> Any:
        """NumPy's functions: of vectors, or of the arrays of their only regions."""
        if function in _FUNCTIONS:
            return _FUNCTIONS[function](*given, **options)
        return function(*map(_as_arrays, given), **{k: _as_arrays(o) for k, o in options.items()})


def applied(ufunc: np.ufunc, inputs: tuple[Any, ...]) -> Any:
    """A ufunc of vectors of one space, and numbers: a vector, several, or a `Comparison`.

    Raises:
        ArgumentError: an array among the inputs. SpaceError: vectors of different spaces.
    """
    for one in inputs:
        if not (is_scalar(one) or _is_vector(one) or np.ndim(one) == 0):
            raise ArgumentError(
                f"numpy.{ufunc.__name__}: vectors and numbers expected, given "
                f"{type(one).__name__}; X.vector(array) or X.scatter(array) of the space X makes "
                f"a vector"
            )
    first, *others = (one for one in inputs if _is_vector(one))

    def call(*arrays: Any) -> Any:
        left = iter(arrays)
        return ufunc(*(next(left) if _is_vector(one) else one for one in inputs))

    # NumPy's rules of dtypes, also on a worker that holds no region.
    nothing = call(*(np.empty(0, v.space.dtype) for v in (first, *others)))
    name = ufunc.__name__
    if ufunc.nout > 1:
        return tuple(
            first._map(name, lambda *a, k=k: call(*a)[k], *others, dtype=one.dtype)
            for k, one in enumerate(nothing)
        )
    if nothing.dtype == bool:
        return Comparison(first.space, first._paired(name, call, *others))
    return first._map(name, call, *others, dtype=nothing.dtype)


def _part(v: Vector, which: str) -> Vector:
    dtype = np.zeros(0, v.space.dtype).real.dtype
    return v._map(which, lambda a: getattr(a, which).astype(dtype), dtype=dtype)


def _is_vector(given: object) -> TypeGuard[Vector]:
    return isinstance(given, ArrayProtocol)


def _as_arrays(given: Any) -> Any:
    """Vectors among a NumPy function's arguments as the arrays of their only regions."""
    if _is_vector(given):
        return np.asarray(given)
    if type(given) in (list, tuple):
        return type(given)(map(_as_arrays, given))
    return given


def _norm(v: Vector, ord: Any = None, axis: None = None, keepdims: bool = False) -> float:
    if axis is not None or keepdims or ord not in (None, 2):
        raise ArgumentError(
            "numpy.linalg.norm of a vector is its 2-norm over all workers; other norms are of "
            "arrays, which X.gather(v) of a TensorSpace X and v[name] give"
        )
    return v.norm()


def _both(what: str, v: Any, w: Any) -> tuple[Vector, Vector]:
    """Two arguments that are vectors.

    Raises:
        ArgumentError: one is none.
    """
    if _is_vector(v) and _is_vector(w):
        return v, w
    other = v if _is_vector(w) else w
    raise ArgumentError(
        f"numpy.{what}: two vectors of a space expected, given {type(other).__name__}; "
        f"X.vector(array) or X.scatter(array) of the space X makes one"
    )


def _reversed(name: str) -> Callable[[Any, Any], Any]:
    """The method of a vector for a number on its left or its right."""

    def call(a: Any, b: Any) -> Any:
        left = _is_vector(a)
        return getattr(a if left else b, f"__{name}__" if left else f"__r{name}__")(
            b if left else a
        )

    return call


_ARITHMETIC: dict[np.ufunc, Callable[..., Any]] = {
    np.add: _reversed("add"),
    np.subtract: _reversed("sub"),
    np.multiply: _reversed("mul"),
    np.true_divide: _reversed("truediv"),
}
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.linalg.norm: _norm,
    np.vdot: lambda v, w: _both("vdot", v, w)[0].inner(w),
    np.dot: lambda v, w: _both("dot", v, w)[0].dot(w),
    np.copy: lambda v, order="K", subok=False: v.copy(),
}
"""NumPy's functions of vectors; others are of arrays."""
