"""Exact rational arithmetic for the coefficients of operators.

Every number that a user can give is rational: a float is a whole number over a power of two, and a
quotient is stored as a fraction. So sums and products of coefficients are exact, and two operators
are equal exactly if their coefficients are. A coefficient is rounded once, to the dtype, when an
array is multiplied by it.

A scalar or matrix entry that the dtype cannot represent is refused when a user gives it.
Intermediate sums and products may leave the dtype's range, since a later factor may bring them
back. A coefficient of the whole operator may not: `compile`, on every worker, and `to_matrix` raise
DTypeError. The reference interpreter refuses each factor that it multiplies by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from linop.errors import DTypeError
from linop.spaces.float_formats import cast, native, overflows_at

Rational = int | Fraction
_SHORT = 20
"""Longest fraction or whole number, in characters, that prints in full."""


@dataclass(frozen=True)
class Gaussian:
    """A complex number with rational parts and a non-zero imaginary one; built by `gaussian`."""

    real: Rational
    imag: Rational

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, int | Fraction | Gaussian):
            return NotImplemented
        return gaussian(self.real + other.real, self.imag + other.imag)

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, int | Fraction | Gaussian):
            return NotImplemented
        return gaussian(
            self.real * other.real - self.imag * other.imag,
            self.real * other.imag + self.imag * other.real,
        )

    __radd__, __rmul__ = __add__, __mul__

    def conjugate(self) -> Exact:
        return Gaussian(self.real, -self.imag)

    def __complex__(self) -> complex:
        return complex(float(self.real), float(self.imag))


Exact = int | Fraction | Gaussian


def gaussian(real: Rational, imag: Rational) -> Exact:
    """``real + imag·i``: a `Gaussian`, or the real part alone if `imag` is zero."""
    return Gaussian(real, imag) if imag else real


def exact(value: Any) -> Exact:
    """The exact value of a finite Python, NumPy or exact number."""
    if type(value) is int or isinstance(value, Fraction | Gaussian):
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, complex | np.complexfloating):
        return gaussian(_rational(value.real), _rational(value.imag))
    return _rational(value)


def _rational(value: Any) -> Rational:
    """The exact value of a finite float; other packages' floats have at most 64 bits."""
    known = value if isinstance(value, float | np.floating) else float(value)
    numerator, denominator = known.as_integer_ratio()
    return numerator if denominator == 1 else Fraction(numerator, denominator)


def inverse(value: Exact) -> Exact:
    """1 / value, exactly; `value` is not zero."""
    if not isinstance(value, Gaussian):
        return 1 / Fraction(value)
    return value.conjugate() * (1 / Fraction(value.real**2 + value.imag**2))


def wrapped(value: Exact, dtype: np.dtype[Any]) -> Exact:
    """The residue of a whole number modulo 2^bits, in the range of an integer dtype; for other
    dtypes the number itself."""
    if dtype.kind not in "iu" or isinstance(value, Gaussian):
        return value
    bits = 8 * dtype.itemsize
    low = -(1 << bits - 1) if dtype.kind == "i" else 0
    return (value - low) % (1 << bits) + low


def rounded(value: Exact, dtype: np.dtype[Any]) -> Any:
    """Round to the nearest number of a dtype (for integers: modulo 2^bits); a NumPy scalar.

    Raises:
        DTypeError: complex for a real dtype, a fraction for an integer one, or out of range of a
            floating one.
    """
    if dtype.kind == "c":
        pair = np.empty((), dtype)
        pair.real = _in_range(value.real, pair.real.dtype, dtype)
        pair.imag = _in_range(value.imag, pair.real.dtype, dtype)
        return pair[()]
    if isinstance(value, Gaussian):
        raise DTypeError(f"complex scalar {shown(value)} on a space of dtype {dtype}")
    if dtype.kind in "iu":
        if value.denominator != 1:
            raise DTypeError(f"fraction {shown(value)} on a space of dtype {dtype}")
        return dtype.type(int(wrapped(value, dtype)))  # type: ignore[arg-type]
    return _in_range(value, dtype, dtype)


def _in_range(value: Rational, part: np.dtype[Any], dtype: np.dtype[Any]) -> Any:
    with np.errstate(over="ignore"):
        number = _nearest(value, part)
    saturates = not native(part) and max(value, -value) >= overflows_at(part)
    if saturates or not np.isfinite(number):
        raise DTypeError(f"scalar {shown(value)} is out of range on a space of dtype {dtype}")
    return number


def _nearest(value: Rational, dtype: np.dtype[Any]) -> Any:
    """Round a rational once, half to even; infinite if out of range."""
    if dtype.itemsize > 8:
        return _nearest_long(value, dtype)
    try:
        near = value.numerator / value.denominator  # Python rounds integer quotients correctly
    except OverflowError:
        return dtype.type(math.inf if value > 0 else -math.inf)
    if dtype.itemsize < 8 and (error := value - Fraction(near)):
        # Round to odd first: rounding again to fewer bits is then equal to rounding once.
        even = not np.float64(near).view(np.int64) & 1
        near = math.nextafter(near, math.copysign(math.inf, error)) if even else near
    return cast(np.array(near), dtype)[()]


def _nearest_long(value: Rational, dtype: np.dtype[Any]) -> Any:
    """`_nearest` for long double: the significand as an integer, built from 53-bit pieces."""
    bits = np.finfo(dtype).nmant + 1
    shift = bits - value.numerator.bit_length() + value.denominator.bit_length()
    shift -= (value if value > 0 else -value) * Fraction(2) ** shift >= 2**bits
    whole = abs(round(value * Fraction(2) ** shift))
    pieces = [np.ldexp(dtype.type(float((whole >> k) % 2**53)), k) for k in (106, 53, 0)]
    size = np.ldexp(sum(pieces), -shift)
    return size if value > 0 else -size


def text(value: Exact) -> str:
    """Canonical text of a number, for digests: equal exactly for equal numbers."""
    parts = (value.real, value.imag)
    return ",".join(f"{part.numerator:x}/{part.denominator:x}" for part in parts)


def shown(value: Exact, latex: bool = False) -> str:
    """Readable text of a number: decimal if it is a float, a quotient if that is short, else the
    first digits. `latex`: quotients as LaTeX fractions."""
    if isinstance(value, Gaussian):
        size = shown(value.imag if value.imag > 0 else -value.imag, latex)
        size = f"({size})" if "/" in size else size
        if not value.real:
            return f"{'-' if value.imag < 0 else ''}{size}j"
        return f"({shown(value.real, latex)}{'-' if value.imag < 0 else '+'}{size}j)"
    quotient = f"{value.numerator}/{value.denominator}"
    if value.denominator == 1:
        plain, short = str(value.numerator), len(str(value.numerator)) <= _SHORT
    else:
        plain, short = quotient, len(quotient) <= _SHORT and not _is_float(value)
    if not short:
        number = Decimal(value.numerator) / Decimal(value.denominator)
        within = 0 < abs(float(number)) < math.inf
        return f"{float(number):g}" if within else f"{number:.6g}"
    if latex and value.denominator > 1:
        sign = "-" if value < 0 else ""
        return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
    return plain


def _is_float(value: Rational) -> bool:
    """True if a rational is exactly representable as a Python float."""
    bits, power = value.numerator.bit_length(), value.denominator
    return bits <= 53 and power & (power - 1) == 0 and power.bit_length() <= 1000
