"""Shards, the parameters of sharded modules outside of their forwards: this worker's rows. They
refuse to be computed with, where the result would look like one of whole parameters.

Allowed is what gives no other numbers than rows of a worker: to read (shapes, gradients, values),
to change in place (as optimizers do), and to compute element by element with scalars and with
tensors of the same shape, which in one process nobody could give. What has rows alone stays
guarded. Everything else is refused: an allow-list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linop.errors import ArgumentError, ShapeError
from linop.layers.parameters.blocks import plain

_VIEWS = ("T", "mT", "H", "mH", "real", "imag")
"""Attributes that are views of a tensor."""
_READING = frozenset(
    "__array__ __deepcopy__ __dlpack__ __dlpack_device__ __format__ __len__ __reduce_ex__ __repr__ "
    "__setstate__ _has_compatible_shallow_copy_type _is_view allclose backward "
    "bytes dense_dim data_ptr dim dim_order element_size "
    "empty_like equal full_like get_device grad has_names is_complex is_conj is_contiguous "
    "is_floating_point is_inference is_neg is_pinned is_same_size is_set_to is_shared is_signed "
    "item ndimension nelement new_empty new_empty_strided new_full new_ones new_tensor new_zeros "
    "numel numpy ones_like rand_like randn_like register_hook register_post_accumulate_grad_hook "
    "result_type retain_grad share_memory_ size storage storage_offset storage_type stride tolist "
    "type_as untyped_storage zeros_like".split()
)
"""Functions whose results have no rows, or are for people."""
_GROUPS = "_foreach_", "_fused_", "is_"
"""Beginnings of the names of functions of lists of tensors, and of questions."""
_REDUCING = frozenset(("_foreach_norm", "_foreach_max"))
"""Functions of lists that make a number of each tensor."""
_COPYING = frozenset(
    "bfloat16 clone contiguous cpu cuda detach double expand_as float half pin_memory positive "
    "requires_grad_ resolve_conj resolve_neg to type view_as view_as_complex view_as_real".split()
)
"""Functions whose results are the same rows."""
_ELEMENTWISE = frozenset(
    "abs absolute add addcdiv addcmul and clamp clamp_max clamp_min clip conj conj_physical "
    "copysign copy div divide eq erf exp exp2 expm1 float_power floor floordiv fmod ge gt hypot "
    "invert isclose isfinite isinf isnan le lerp log log10 log1p log2 logical_and logical_not "
    "logical_or "
    "lt maximum minimum mod mul multiply nan_to_num ne neg negative or pos "
    "pow radd rdiv reciprocal relu remainder rfloordiv rmul round rpow rsqrt rsub rtruediv sigmoid "
    "sign sgn softplus sqrt square sub subtract tanh true_divide truediv trunc where xor "
    "zero".split()
)
"""Functions of each element alone."""
_GRAD: Any = torch.Tensor.grad
_plainly = torch._C.DisableTorchFunctionSubclass
_NUMBERS = (int, float, complex, str, bytes, type(None))
"""Kinds of arguments that have no tensors."""


class _Guarded:
    """Mixin of tensors that have rows of a sharded parameter."""

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Any,
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """See torch's "Extending torch"."""
        del types
        given = {} if options is None else options
        with _plainly():  # what is asked here, too, is about memory
            known = _alone(function)
            stays = known.keeps_rows
            if stays is None:
                stays = _checked(known, arguments, given)
            result = function(*arguments, **given)
        if stays and isinstance(result, torch.Tensor) and not isinstance(result, _Guarded):
            return result.as_subclass(Rows)
        return result

    @property
    def grad(self) -> Tensor | None:
        """The gradient, of these rows. Optimizers ask for it several times a step: this takes a
        seventh of the time of torch's way to `__torch_function__`."""
        with _plainly():
            return _GRAD.__get__(self)  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        with _plainly():
            _GRAD.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        with _plainly():
            _GRAD.__delete__(self)


class Shard(_Guarded, torch.nn.Parameter):
    """A parameter of which this worker has some rows."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        del protocol
        raise ArgumentError(
            f"fully_shard: parameter {getattr(self, '_linop_name', '')!r} is sharded, and cannot "
            f"be pickled: a file of this worker's rows would look like the model's; pickle "
            f"linop.strategies.full_module(net), which all workers call, or save by "
            f"linop.layers.save(net, path, optimizer)"
        )


class Rows(_Guarded, torch.Tensor):
    """A tensor without other numbers than those of a `Shard`, such as its ``data``."""

    def __deepcopy__(self, memo: object) -> Rows:
        copied: Rows = plain(self).clone().as_subclass(Rows)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)


def _checked(known: _Known, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """True if a tensor that a function gives has rows alone; of one whose arguments decide.

    Raises:
        ShapeError: it is not to be called with rows.
    """
    if known.attribute:
        _refuse(known.attribute, arguments)
    if not (known.in_place or known.bare in _ELEMENTWISE):
        _refuse(known.name, arguments)
    tensors = _tensors((*arguments, *options.values()))
    like = next(one for one in tensors if isinstance(one, _Guarded))
    shape, alone = like.shape, not known.in_place
    for one in tensors:
        fits = one.shape == shape
        if not fits and (one.ndim or one is like):
            _refuse(known.name, arguments)
        alone = alone and not (fits and not isinstance(one, _Guarded))
    return alone


class _Known(NamedTuple):
    """A function of torch, as far as it says itself whether rows are its to compute with.

    Attributes:
        name, bare: with underscores, and without.
        attribute: that which it gives, if that is a view; empty for others.
        keeps_rows: True, False: it is allowed, and gives rows alone or none; None: its arguments
            decide.
        in_place: it changes its first argument.
    """

    name: str
    bare: str
    attribute: str = ""
    keeps_rows: bool | None = None
    in_place: bool = False


@lru_cache(1024)
def _alone(function: Any) -> _Known:
    name = getattr(function, "__name__", str(function))
    bare = name.strip("_")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(function, "__self__", None), "__name__", "")
        view = attribute if attribute in _VIEWS else ""
        keeps = None if view else name == "__get__" and attribute == "data"
        return _Known(name, bare, view, keeps)
    if name in _READING or (name.startswith(_GROUPS) and name not in _REDUCING):
        return _Known(name, bare, keeps_rows=False)
    if name in _COPYING:
        return _Known(name, bare, keeps_rows=True)
    in_place = name.endswith("_") and not name.endswith("__")
    if name.startswith("__i") and bare[1:] in _ELEMENTWISE:
        in_place = True
    return _Known(name, bare, in_place=in_place)


def _tensors(given: Iterable[Any]) -> list[Tensor]:
    """Tensors among arguments, and in their lists and mappings."""
    found: list[Tensor] = []
    for one in given:
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, Iterable) and not isinstance(one, _NUMBERS):
            found += _tensors(one.values() if isinstance(one, Mapping) else one)
    return found


def _refuse(name: str, arguments: Sequence[Any]) -> None:
    rows = next((one for one in _tensors(arguments) if isinstance(one, _Guarded)), None)
    known = getattr(rows, "_linop_name", "")
    which = f"parameter {known!r}" if known else "a parameter"
    shape = "" if rows is None else f" of shape {tuple(plain(rows).shape)}"
    # No ArgumentError: of a TypeError torch makes "unsupported operand types".
    raise ShapeError(
        f"fully_shard: torch's {name} is given {which} outside of its module's forward, where it "
        f"has this worker's rows alone{shape}; compute inside of forward, or have whole "
        f"parameters: with linop.strategies.unsharded(module): …, on every worker; values alone "
        f"are in linop.strategies.full_state_dict(module)"
    )
