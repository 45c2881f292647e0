"""Python expressions that rebuild operators, spaces and regions: the text of a failing example.

The expressions need ``import linop`` and ``import numpy`` (and `scipy` or `functools` for objects
of theirs). An operator built by a public function prints as that call; sums, products, multiples
and adjoints print in the notation of the algebra, and other products as their factors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, singledispatch
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import scipy

import linop
from linop.graph import flattened, postorder, uses
from linop.normal_form.primitives import Action, Add, Allocate, Clear, Deallocate
from linop.operators.algebra import DirectSum, Named
from linop.operators.experts import Routing
from linop.operators.expressions import Composition, Identity, Primitives, Scaled, Sum, Zero
from linop.operators.operator import LinearOperator
from linop.operators.real_linear import RealLinear
from linop.operators.riesz import OfOperator
from linop.provenance import Origin, objects_in
from linop.spaces.decomposition import Bounds, Role
from linop.spaces.direct_sums import DirectSumSpace
from linop.spaces.exact import Exact, Gaussian, Rational, exact
from linop.spaces.partition import Partition
from linop.spaces.region import Region, Subset
from linop.spaces.space import Space
from linop.spaces.tensor import TensorSpace
from linop.spaces.vector import Vector
from linop.spaces.weighted import Diagonal


@singledispatch
def code(what: Any) -> str:
    """The expression that rebuilds an operator, space, region, vector, ….

    Functions given to local operators print by name, even if the name cannot be imported.

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition((2,)))
        >>> text = linop.testing.code(2 * linop.identity(X))
        >>> print(text)
        2 * linop.identity(linop.TensorSpace((4,), linop.Partition((2,))))
        >>> eval(text).domain == X
        True
    """
    # Not registered, since SciPy's submodules are imported on first use.
    if scipy.sparse.issparse(what):
        return f"scipy.sparse.csr_array({code(what.toarray())})"
    if isinstance(what, scipy.sparse.linalg.LinearOperator) and hasattr(what, "A"):
        return f"scipy.sparse.linalg.aslinearoperator({code(what.A)})"
    return repr(what)


# Spaces, regions, vectors


@code.register
def _region(region: Region) -> str:
    held = region.workers
    worker = "" if held == (0,) else f", {held[0] if len(held) == 1 else held}"
    return f"linop.Region({region.name!r}, {region.shape}{worker}{_memory(region)})"


@code.register
def _subset(part: Subset) -> str:
    if part.whole:
        return code(part.region)
    return f"{code(part.region)}[{', '.join(f'{s.start}:{s.stop}' for s in part.slices)}]"


@code.register
def _space(space: Space) -> str:
    return f"linop.Space([{_list(space.regions)}]{_dtype(space)}{_inner(space)})"


@code.register
def _direct_sum_space(space: DirectSumSpace) -> str:
    return code(Space(space.regions, space.dtype, inner=space.inner_product))


def _inner(space: Space) -> str:
    inner = space.inner_product
    return "" if inner is None else f", inner={code(inner)}"


@code.register
def _diagonal(inner: Diagonal) -> str:
    return code(inner.given if inner.by_region else inner.given[""])


@code.register
def _of_operator(inner: OfOperator) -> str:
    known = "" if inner.inverse is None else f", {code(inner.inverse)}"
    return f"linop.inner_product({code(inner.G)}{known})"


@code.register
def _partition(partition: Partition) -> str:
    return f"linop.{partition!r}"


@code.register
def _role(role: Role) -> str:
    return f"linop.{role.name}"


@code.register
def _tensor_space(X: TensorSpace) -> str:
    text = f"linop.TensorSpace({X.global_shape}, {code(X.partition)}{_dtype(X)}"
    if X.axes != tuple(range(X.partition.ndim)):
        text += f", axes={code(X.axes)}"
    if X.name != "x":
        text += f", name={X.name!r}"
    text += _memory(X)
    uneven = {d: cut for d, cut in enumerate(X.bounds) if cut != _balanced(X, d)}
    return f"{text}{f', bounds={uneven}' if uneven else ''}{_inner(X)})"


@code.register
def _routing(routing: Routing) -> str:
    most = "" if routing.capacity is None else f", capacity={routing.capacity}"
    return f"linop.Routing({code(routing.indices)}, {routing.experts}{most})"


@code.register
def _vector(vector: Vector) -> str:
    return f"{code(vector.space)}.vector({code(vector.arrays)})"


def _memory(where: Region | TensorSpace) -> str:
    return "" if where.memory == "default" else f", memory={where.memory!r}"


def _dtype(space: Space) -> str:
    return "" if space.dtype == np.float64 else f", dtype={space.dtype.name!r}"


def _balanced(X: TensorSpace, dim: int) -> Bounds:
    parts = X.partition.shape[X.axes.index(dim)] if dim in X.axes else 1
    return TensorSpace(X.global_shape[dim], Partition(parts)).bounds[0]


# Operators


@code.register
def _operator(op: LinearOperator) -> str:
    """An operator in one expression; a longer one names what occurs several times, and what is
    deep, in a tuple: ``(t1 := …, t2 := t1 @ t1, t2 + t1)[-1]``."""
    names = _NAMES.get()
    if names is not None:
        return names.get(id(op)) or _unnamed(op)
    with _naming() as named:
        lines = _definitions(op, named)
        return f"({', '.join([*lines, _unnamed(op)])})[-1]" if lines else _unnamed(op)


_NAMES: ContextVar[dict[int, str] | None] = ContextVar("_NAMES", default=None)
"""The names of the nodes of the expression that is being printed, by id."""
_FEW, _LOW = 64, 10
"""Occurrences of operators, and nesting, of an expression that prints without names."""


@contextmanager
def _naming() -> Iterator[dict[int, str]]:
    named: dict[int, str] = {}
    token = _NAMES.set(named)
    try:
        yield named
    finally:
        _NAMES.reset(token)


def _definitions(root: LinearOperator, named: dict[int, str]) -> list[str]:
    """Name nodes, and return the definitions of the names, in order."""
    nodes = postorder(root, _printed)
    used = uses(nodes, _printed)
    size: dict[int, int] = {}
    height: dict[int, int] = {}
    lines: list[str] = []
    for node in nodes:
        parts = [id(part) for part in _printed(node)]
        size[id(node)] = min(_FEW + 1, sum(size[part] for part in parts)) or 1
        height[id(node)] = 1 + max((height[p] for p in parts if p not in named), default=0)
    short = size[id(root)] <= _FEW
    for node in nodes[:-1]:
        parts = [id(part) for part in _printed(node)]
        height[id(node)] = 1 + max((height[p] for p in parts if p not in named), default=0)
        # What is computed once, as written, is to be computed once, as read.
        several = used[id(node)] > 1 and ((parts and not short) or not node.stages.pure)
        if several or height[id(node)] > _LOW:
            text, name = _unnamed(node), f"t{len(lines) + 1}"
            lines.append(f"{name} := {text}")
            named[id(node)] = name
    return lines


def _printed(op: LinearOperator) -> list[LinearOperator]:
    """The operators that the expression of one mentions."""
    if op.origin is not None:
        found = objects_in([op.origin.arguments, op.origin.options])
        return [one for one in found if isinstance(one, LinearOperator)]
    if (other := _adjoint_of(op)) is not None:
        return [other]
    if isinstance(op, RealLinear):
        return [op.form]
    return [op.body] if isinstance(op, Named) else list(op._operands())


def _unnamed(op: LinearOperator) -> str:
    if op.origin is not None:
        return code(op.origin)
    other = _adjoint_of(op)
    if other is None:
        return _composed(op)
    return f"{code(other)}.{'H' if other is op._h else 'euclidean_adjoint'}"


def _adjoint_of(op: LinearOperator) -> LinearOperator | None:
    """The operator that was built by a public function, and whose adjoint, or Euclidean adjoint,
    this one is; None if there is none."""
    known = (op._h, op._euclidean)
    return next((one for one in known if one is not None and one.origin is not None), None)


@code.register
def _origin(origin: Origin) -> str:
    function, arguments, options = origin
    given = [code(argument) for argument in arguments]
    given += [f"{name}={code(value)}" for name, value in options.items()]
    if function in (LinearOperator.conj, LinearOperator.over_reals):
        return f"{_bracketed(arguments[0])}.{function.__name__}()"
    return f"{_public(function)}({', '.join(given)})"


def _public(function: Callable[..., Any]) -> str:
    """The path of a public function that builds an operator."""
    name, module = function.__name__, function.__module__.split(".")[1]
    if vars(linop).get(name) is function:
        return f"linop.{name}"
    own = getattr(getattr(linop, module, None), name, None) is function
    # Else the public function of that name calls this one.
    return f"linop.{module}.{name}" if own else f"linop.{name}"


@singledispatch
def _composed(op: LinearOperator) -> str:
    """The expression of an operator that was not built by a public function."""
    return repr(op)


@_composed.register
def _composition(op: Composition) -> str:
    return " @ ".join(map(_bracketed, _joined(op, Composition)))


@_composed.register
def _sum(op: Sum) -> str:
    return " + ".join(map(code, _joined(op, Sum)))


def _joined(op: Composition | Sum, kind: type[Composition] | type[Sum]) -> Sequence[LinearOperator]:
    """The factors or terms of an operator; those of nested ones without a name among them."""

    def inner(part: LinearOperator) -> Sequence[LinearOperator] | None:
        made = part.origin is not None or _adjoint_of(part) is not None
        nested = isinstance(part, kind) and not made and id(part) not in (_NAMES.get() or ())
        return part.parts if nested else None  # type: ignore[attr-defined]

    return flattened(op.parts, inner)


@_composed.register
def _scaled(op: Scaled) -> str:
    return f"{_exactly(op.scalar)} * {_bracketed(op.operand)}"


def _exactly(number: Exact) -> str:
    """A number as an expression with exactly its value."""
    if isinstance(number, Gaussian):
        near: complex = complex(number)
        parts = f"{_quotient(number.real)}, {_quotient(number.imag)}"
        return repr(near) if exact(near) == number else f"linop.spaces.exact.Gaussian({parts})"
    if number.denominator == 1:
        return str(number)
    near = number.numerator / number.denominator
    return repr(near) if exact(near) == number else _quotient(number)


def _quotient(number: Rational) -> str:
    plain = number.denominator == 1
    return f"{number}" if plain else f"linop.spaces.exact.{number!r}"


@_composed.register
def _direct_sum(op: DirectSum) -> str:
    return f"linop.direct_sum({_list(op.blocks)})"


@_composed.register
def _named(op: Named) -> str:
    return code(op.body)


@_composed.register
def _real_linear(op: RealLinear) -> str:
    return f"linop.operators.real_linear.RealLinear({_list([op.form, op.domain, op.codomain])})"


@_composed.register
def _identity(op: Identity) -> str:
    if op.domain is op.codomain or op.domain.regions == op.codomain.regions:
        return f"linop.identity({code(op.domain)})"
    return f"linop.operators.expressions.Identity({code(op.domain)}, {code(op.codomain)})"


@_composed.register
def _zero(op: Zero) -> str:
    return f"linop.zero({code(op.domain)}, {code(op.codomain)})"


@_composed.register
def _primitives(op: Primitives) -> str:
    space = code(op.domain)
    return " @ ".join(
        f"linop.{_PRIMITIVES[type(action)]}({space}, {_list(action.parts)})"
        for action in reversed(op.actions)
    )


_PRIMITIVES: dict[type[Action], str] = {
    Allocate: "allocate",
    Deallocate: "deallocate",
    Clear: "clear",
    Add: "add",
}


def _bracketed(op: LinearOperator) -> str:
    """The expression of an operator as a factor of a product, in parentheses if needed."""
    text = code(op)
    if id(op) in (_NAMES.get() or ()):
        return text
    calls = op.origin is not None or _adjoint_of(op) is not None
    several = isinstance(op, Composition | Sum | Scaled)
    several = several or (isinstance(op, Primitives) and len(op.actions) > 1)
    return text if calls or not several else f"({text})"


# Arguments


@code.register
def _array(array: np.ndarray) -> str:
    if not array.size:  # an empty list has no shape
        return f"numpy.zeros({array.shape}, {array.dtype.name!r})"
    name = array.dtype.name
    if array.dtype.char not in "gG":
        return f"numpy.array({array.tolist()}, dtype={name!r})"
    # Python has no numbers of this length; NumPy reads them from text, if real, and in an array.
    flat = array.ravel()
    parts = flat.view(flat.real.dtype)
    text = f"numpy.array({parts.astype(str).tolist()}, dtype={parts.dtype.name!r})"
    view = "" if parts.dtype == flat.dtype else f".view({name!r})"
    return f"{text}{view}.reshape({array.shape})"


@code.register
def _number(number: np.generic) -> str:
    if number.dtype.char in "gG":
        return f"{code(np.asarray(number))}[()]"
    return f"numpy.{number.dtype.name}({number.item()!r})"


@code.register
def _dtype_itself(dtype: np.dtype) -> str:
    return repr(dtype.name)


@code.register(tuple)
def _tuple(items: tuple[Any, ...]) -> str:
    return f"({_list(items)}{',' if len(items) == 1 else ''})"


@code.register(list)
def _items(items: list[Any]) -> str:
    return f"[{_list(items)}]"


@code.register(dict)
def _dict(items: dict[Any, Any]) -> str:
    return "{" + ", ".join(f"{code(k)}: {code(v)}" for k, v in items.items()) + "}"


@code.register(FunctionType)
@code.register(BuiltinFunctionType)
@code.register(type)
def _function(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


@code.register(partial)
def _partial(function: partial[Any]) -> str:
    options = [f"{name}={code(value)}" for name, value in function.keywords.items()]
    given = [code(function.func), *map(code, function.args), *options]
    return f"functools.partial({', '.join(given)})"


def _list(items: Iterable[Any]) -> str:
    return ", ".join(map(code, items))
