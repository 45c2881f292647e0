"""An `autograd.Function` of a program, run alone with the arguments that it had: is its backward
the adjoint of its derivative?

A function that is linear is probed with dyadic numbers, whose sums are exact. Of others,
derivatives in some directions are taken by differences of several widths, in float64: where these
do not agree with each other, such as beside a kink of the function, nothing is decided.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from linop.testing.parallel.recording.collectives import NAMESPACES
from linop.testing.parallel.recording.modes import Changes
from linop.testing.parallel.recording.records import Probed
from linop.testing.parallel.recording.tensors import WRAPPERS, tensors_in

SECONDS = 10.0
"""The longest time for one function."""
_SEED = 7
_POINTS = 3
_WIDTHS = (1e-3, 1e-4, 1e-5, 1e-6)
_CLEAR = 1e-6
"""The smallest relative difference that is no error of a derivative by differences; what is less
than a hundredth of it is one."""
_SMALL = 2**14
"""Elements of arguments and results up to which the whole Jacobian is compared first."""


class _UnclearError(Exception):
    """The function cannot be looked at alone."""


class _Alone(TorchDispatchMode):
    """Refuses collectives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in NAMESPACES:
            raise _UnclearError("it communicates")
        return func(*args, **(kwargs or {}))


@dataclass
class Kept:
    """A call that is to be looked at.

    Attributes:
        kind: the class.
        args: those of ``apply``, tensors copied.
        about: the title, module, line and occurrence.
        cotangents: gradients of results that came in the step; None where none came.
    """

    kind: Any
    args: tuple[Any, ...]
    about: tuple[str, str, str, int]
    cotangents: list[torch.Tensor | None]

    @classmethod
    def of(cls, kind: Any, args: Any, about: tuple[str, str, str, int]) -> Kept:
        return cls(kind, tuple(_copied(one) for one in args), about, [])


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {key: _copied(one) for key, one in value.items()}
    return value


def probed(kept: Kept) -> Probed:
    """Result about the function of a call."""
    about = *kept.about, _where(kept.kind)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            with _in_float64(), Changes([]), _Alone():
                right, exact, text = _Function(kept).judged()
        except _UnclearError as error:
            return Probed(*about, None, False, str(error))
        except Exception as error:
            return Probed(*about, None, False, f"it fails alone ({type(error).__name__}: {error})")
    return Probed(*about, right, exact, text)


@contextmanager
def _in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _where(kind: Any) -> str:
    """The file and line of a class's backward."""
    code = getattr(inspect.unwrap(kind.backward), "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else ""


class _Function:
    """A function of the floating-point arguments that require gradients, flat, in float64."""

    def __init__(self, kept: Kept) -> None:
        self._kind = kept.kind
        self._end = time.monotonic() + SECONDS
        given = list(tensors_in(kept.args))
        if any(isinstance(one, WRAPPERS) for one in given):
            raise _UnclearError("its arguments are no plain tensors")
        if any(one.is_complex() for one in given):
            raise _UnclearError("its arguments are complex")
        self._args = tuple(_wide(one) for one in kept.args)
        self._at = [
            k
            for k, one in enumerate(self._args)
            if isinstance(one, torch.Tensor) and one.requires_grad
        ]
        if not self._at:
            raise _UnclearError("none of its arguments requires a gradient")
        self._shapes = [self._args[k].shape for k in self._at]
        self.point = self._joined([self._args[k] for k in self._at])
        self._outs: list[int] = []
        if not bool(torch.isfinite(self.point).all()):
            raise _UnclearError("its arguments are not finite")
        first = self._called(self.point, prepare=True)
        self._out_shapes = [one.shape for one in first]
        self.value = self._joined(first).detach()
        if not torch.equal(self.value, self(self.point)):
            raise _UnclearError("it gives other results each time")
        came = [one for k, one in enumerate(kept.cotangents) if k in self._outs]
        known = [
            torch.zeros(shape, dtype=torch.float64) if one is None else one.double().reshape(shape)
            for one, shape in zip(came, self._out_shapes, strict=True)
        ] if len(came) == len(self._outs) else []  # fmt: skip
        self._cotangents = [self._joined(known)] if any(one.any() for one in known) else []

    # Calls

    def _joined(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([one.reshape(-1).double() for one in tensors]).detach()

    def _called(self, x: torch.Tensor, prepare: bool = False) -> list[torch.Tensor]:
        """The results at a point, as tensors that are differentiated."""
        if time.monotonic() > self._end:
            raise _UnclearError("it takes too long")
        args = list(self._args)
        parts = x.split([shape.numel() for shape in self._shapes])
        self.leaves = []
        for k, part, shape in zip(self._at, parts, self._shapes, strict=True):
            leaf = part.reshape(shape).clone().requires_grad_()
            self.leaves.append(leaf)
            args[k] = leaf * 1  # which it may change in place
        args = [
            one.clone() if isinstance(one, torch.Tensor) and k not in self._at else one
            for k, one in enumerate(args)
        ]
        torch.manual_seed(_SEED)
        with torch.enable_grad():
            result = self._kind.apply(*args)
        made = list(tensors_in(result))
        if prepare:
            self._outs = [k for k, one in enumerate(made)
                          if one.requires_grad and one.is_floating_point()]  # fmt: skip
            if not self._outs:
                raise _UnclearError("none of its results has a gradient")
        return [made[k] for k in self._outs]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._joined(self._called(x))

    def backward(self, x: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        """Gradients that the backward gives at a point."""
        made = self._called(x)
        parts = cotangent.split([shape.numel() for shape in self._out_shapes])
        grads = [part.reshape(one.shape) for part, one in zip(parts, made, strict=True)]
        found = torch.autograd.grad(made, self.leaves, grads, allow_unused=True)
        return self._joined([
            torch.zeros_like(leaf) if one is None else one
            for one, leaf in zip(found, self.leaves, strict=True)
        ])  # fmt: skip

    # Verdicts

    def judged(self) -> tuple[bool | None, bool, str]:
        """True if the backward is the adjoint of the derivative, False if it is not, None if that
        is not clear; True if that is exact; and a counterexample, or a reason."""
        draw = torch.Generator().manual_seed(_SEED)
        try:
            is_affine = self._is_affine(draw)
        except (ArithmeticError, AssertionError, RuntimeError, ValueError):
            is_affine = False  # it does not take these numbers
        if is_affine:
            text = self._exactly(draw)
            return not text, True, text
        return self._by_differences(draw)

    def _dyadic(self, n: int, draw: torch.Generator) -> torch.Tensor:
        return torch.randint(-32, 33, (n,), generator=draw).double() / 8

    def _is_affine(self, draw: torch.Generator) -> bool:
        """True if it is linear up to a constant, exactly on dyadic numbers, and nearly at the
        arguments that it had."""
        n = len(self.point)
        zero = self(torch.zeros(n, dtype=torch.float64))
        for _ in range(3):
            x, y = self._dyadic(n, draw), self._dyadic(n, draw)
            at = [self(one) - zero for one in (x, y, x + y, 4 * x)]
            if not all(bool(torch.isfinite(one).all()) for one in at):
                return False
            if not torch.equal(at[2], at[0] + at[1]) or not torch.equal(at[3], 4 * at[0]):
                return False
            both = self(self.point + x) - self.value
            if not torch.allclose(both, at[0], rtol=1e-9, atol=1e-9 * float(at[0].abs().max())):
                return False
        return True

    def _exactly(self, draw: torch.Generator) -> str:
        """The entry of the backward of a linear function that is wrong, in words; empty if none
        is found."""
        n, m = len(self.point), len(self.value)
        zero = self(torch.zeros(n, dtype=torch.float64))
        for _ in range(3):
            x, g = self._dyadic(n, draw), self._dyadic(m, draw)

            def columns(v: torch.Tensor, g: torch.Tensor = g) -> bool:
                return _differ(g * (self(v) - zero), self.backward(self.point, g) * v)

            if not columns(x):
                continue
            j = _narrowed(x, columns)
            unit = torch.zeros_like(x)
            unit[j] = 1
            column = self(unit) - zero

            def rows(w: torch.Tensor, j: int = j, column: torch.Tensor = column) -> bool:
                return _differ(self.backward(self.point, w)[j], w * column)

            k = _narrowed(g, rows)
            one = torch.zeros_like(g)
            one[k] = 1
            has = float(self.backward(self.point, one)[j])
            return (
                f"{self._named(j)} gets {has:g} times the gradient of {self._resulting(k)}, and "
                f"by the adjoint {float(column[k]):g} times: the function is linear, and that is "
                f"exact"
            )
        return ""

    def _by_differences(self, draw: torch.Generator) -> tuple[bool | None, bool, str]:
        scale = float(self.point.abs().median()) or 1.0
        clear: list[bool] = []
        text = ""
        if self._passes_gradcheck():
            return True, False, "by torch.autograd.gradcheck"
        for number in range(_POINTS):
            x = self.point
            if number:  # beside points at which it may have no derivative
                x = x + 1e-2 * scale * torch.randn(len(x), generator=draw, dtype=torch.float64)
            found = [self._compared(x, g, v) for g in self._weights(draw)
                     for v in self._directions(draw, scale)]  # fmt: skip
            wrong = [one for one in found if one is not None and one]
            known = [one for one in found if one is not None]
            if wrong and not text:
                text = self._counterexample(x, draw, scale)
            if len(known) * 2 >= len(found):
                clear.append(bool(wrong))
        if sum(clear) >= 2:
            return (False, False, text) if text else (None, False, "it is wrong in sums alone")
        if clear and not any(clear):
            return True, False, "by differences"
        return None, False, "derivatives by differences do not agree with each other"

    def _passes_gradcheck(self) -> bool:
        if len(self.point) * len(self.value) > _SMALL:
            return False
        try:
            return bool(
                gradcheck(
                    self._as_one,
                    (self.point.clone().requires_grad_(),),
                    eps=1e-6,
                    atol=1e-7 * max(1.0, float(self.value.abs().max())),
                    rtol=1e-5,
                    raise_exception=False,
                    check_undefined_grad=False,
                    check_batched_grad=False,
                )
            )
        except (RuntimeError, ValueError):
            return False

    def _as_one(self, x: torch.Tensor) -> torch.Tensor:
        """The results as one tensor that is differentiated with respect to another one."""
        parts = x.split([shape.numel() for shape in self._shapes])
        args = list(self._args)
        for k, part, shape in zip(self._at, parts, self._shapes, strict=True):
            args[k] = part.reshape(shape) * 1
        torch.manual_seed(_SEED)
        made = list(tensors_in(self._kind.apply(*args)))
        return torch.cat([made[k].reshape(-1) for k in self._outs])

    def _weights(self, draw: torch.Generator) -> list[torch.Tensor]:
        drawn = torch.randn(len(self.value), generator=draw, dtype=torch.float64)
        return [*self._cotangents, drawn]

    def _directions(self, draw: torch.Generator, scale: float) -> list[torch.Tensor]:
        n = len(self.point)
        signs = [torch.randint(0, 2, (n,), generator=draw).double() * 2 - 1 for _ in range(4)]
        for one in signs[2:]:  # some of the elements, which are beside kinks more rarely
            kept = torch.zeros(n, dtype=torch.float64)
            kept[torch.randperm(n, generator=draw)[:16]] = 1
            one *= kept
        return [scale * one for one in signs]

    def _derivative(
        self, x: torch.Tensor, g: torch.Tensor, v: torch.Tensor
    ) -> tuple[float, float] | None:
        """The derivative of the results, weighted by g, along v, and a bound of its error; None if
        it has none."""
        middle = float(g @ self(x))
        if middle != middle:
            return None
        rows = []
        for h in _WIDTHS:
            ends = [float(g @ self(x + sign * h * v)) for sign in (1, -1)]
            rounding = 2.0**-50 * (abs(middle) + float(g.abs() @ self.value.abs())) / h
            sides = (ends[0] - middle) / h, (middle - ends[1]) / h
            rows.append(((sides[0] + sides[1]) / 2, abs(sides[0] - sides[1]), rounding))
        best = min(range(1, len(rows)), key=lambda k: abs(rows[k][0] - rows[k - 1][0]))
        error = abs(rows[best][0] - rows[best - 1][0]) + rows[best][2]
        # Beside a kink, both sides differ as much as ever when they come nearer.
        least = 10 * rows[-1][2] + 1e-7 * (abs(rows[best][0]) + abs(middle))
        kink = rows[-1][1] > max(0.3 * rows[1][1], least)
        return None if kink else (rows[best][0], error)

    def _compared(self, x: torch.Tensor, g: torch.Tensor, v: torch.Tensor) -> bool | None:
        """True if the backward is wrong along a direction; None if that is not clear."""
        found = self._derivative(x, g, v)
        if found is None:
            return None
        theirs, error = found
        mine = self.backward(x, g) * v
        size = float(mine.abs().sum()) + abs(theirs)
        gap = abs(float(mine.sum()) - theirs)
        if not gap < float("inf"):
            return None
        if gap <= _CLEAR / 100 * size + error:
            return False
        return True if gap > _CLEAR * size + 100 * error else None

    def _counterexample(self, x: torch.Tensor, draw: torch.Generator, scale: float) -> str:
        """An element of the arguments whose derivative is wrong, in words; empty if there is none
        for which that is clear."""
        for g in self._weights(draw):
            for v in self._directions(draw, scale):
                if not self._compared(x, g, v):
                    continue

                def wrong(w: torch.Tensor, g: torch.Tensor = g) -> bool:
                    return bool(self._compared(x, g, w))

                j = _narrowed(v, wrong)
                unit = torch.zeros_like(v)
                unit[j] = scale
                found = self._derivative(x, g, unit)
                if found is None or not self._compared(x, g, unit):
                    continue
                has, right = float(self.backward(x, g)[j]), found[0] / scale
                came = any(torch.equal(g, one) for one in self._cotangents)
                which = "the gradient that came" if came else "some gradient of its results"
                return (
                    f"for {which}, {self._named(j)}, where it is {float(x[j]):.6g}, gets "
                    f"{has:.6g}, and by the derivative of the forward (differences in float64, "
                    f"error at most {max(found[1] / scale, 1e-15):.0e}) {right:.6g}"
                )
        return ""

    def _named(self, j: int) -> str:
        """An element of the arguments."""
        for k, shape in zip(self._at, self._shapes, strict=True):
            if j < shape.numel():
                return f"element {j} of argument {k}"
            j -= shape.numel()
        raise IndexError(j)

    def _resulting(self, k: int) -> str:
        """An element of the results."""
        for number, shape in zip(self._outs, self._out_shapes, strict=True):
            if k < shape.numel():
                of = f"result {number}" if len(self._outs) > 1 else "the result"
                return f"element {k} of {of}"
            k -= shape.numel()
        raise IndexError(k)


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if the sums of two tensors differ by more than the rounding of factors in them."""
    return float((a.sum() - b.sum()).abs()) > 1e-9 * float(a.abs().sum() + b.abs().sum())


def _narrowed(v: torch.Tensor, is_wrong: Callable[[torch.Tensor], bool]) -> int:
    """The position of one element of a vector for which a test fails that fails for the vector, if
    sums of vectors fail only with one of them; else of an element beside it."""
    left = torch.nonzero(v).reshape(-1)
    while len(left) > 1:
        half = torch.zeros_like(v)
        first = left[: len(left) // 2]
        half[first] = v[first]
        left = first if is_wrong(half) else left[len(left) // 2 :]
    return int(left[0])


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return value
