"""Functions element by element, in broadcasts: the result is cut as the arguments are."""

from __future__ import annotations

from typing import Any

import torch

from linop.strategies.tensor.following.cuts import Cut, Refused
from linop.strategies.tensor.following.function_call import FunctionCall

_OTHERS = frozenset(
    "bfloat16 bool byte char clone contiguous conj cos cpu cuda detach div double float half int"
    " long short to type type_as requires_grad_ retain_grad positive neg not_equal greater less"
    " greater_equal less_equal subtract multiply divide floor_divide negative absolute arccos"
    " arcsin arctan arctanh arccosh arcsinh arctan2 fix sigmoid logsigmoid hardswish softsign"
    " tanhshrink nan_to_num rsub expand_as broadcast_tensors zeros_like ones_like full_like"
    " empty_like copy fill zero data real imag view_as_real_ is_nonzero_ isreal isclose lerp"
    " special_expit special_erf special_exp2 special_expm1 special_log1p special_softplus"
    " special_sinc special_round special_logit special_erfinv native_dropout_backward"
    " logical_and logical_or logical_not logical_xor square __radd__ __rmul__ __rsub__"
    " __rtruediv__ __rdiv__ __rpow__ __rfloordiv__ __rmod__ __rand__ __ror__ __rxor__ __and__"
    " __or__ __invert__ __xor__ __add__ __mul__ __sub__ __truediv__ __pow__ __neg__ __floordiv__"
    " __mod__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __abs__ celu threshold hardtanh"
    " resolve_conj resolve_neg".split()
)
_NOT = frozenset({"max", "min", "where", "equal"})
"""Tagged as such by torch, but with other signatures too (`linop...following.rules`)."""


def names() -> frozenset[str]:
    """Names of torch's functions that are computed element by element: those that it tags so, and
    composites of them."""
    tagged = set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        base = rest.partition(".")[0]
        if namespace == "aten" and base not in tagged and base not in _NOT:
            packet = getattr(torch.ops.aten, base, None)
            if packet is not None and any(
                torch.Tag.pointwise in getattr(packet, kind).tags for kind in packet.overloads()
            ):
                tagged.add(base)
    return frozenset(tagged | {name.rstrip("_") for name in tagged if "__" not in name}) | _OTHERS


def elementwise(call: FunctionCall) -> Cut:
    """The layout of a broadcast of the arguments."""
    if call.name.endswith("_") and not call.name.endswith("__"):
        _check_in_place(call)
    return broadcast(call, call.tensors)


def broadcast(call: FunctionCall, tensors: list[Any], ndim: int = 0) -> Cut:
    """The layout of a broadcast of tensors, of which one at least is cut.

    Args:
        ndim: of the result, at least.
    """
    ndim = max([ndim, *(x.ndim for x in tensors)])
    cuts = [(x, cut) for x in tensors if isinstance(cut := call.layout_of(x), Cut)]
    one, cut = cuts[0]
    behind = cut.dim - one.ndim
    for other, theirs in cuts[1:]:
        if theirs.dim - other.ndim != behind:
            raise Refused(
                f"of tensors that are split along dimension {behind} and split along dimension "
                f"{theirs.dim - other.ndim}; one layout expected"
            )
        if (theirs.sizes, theirs.whole) != (cut.sizes, cut.whole):
            raise Refused(
                f"of tensors that are split along dimension {behind} into blocks of {cut.sizes} "
                f"and of {theirs.sizes}; the same blocks expected"
            )
    for other in tensors:
        if call.layout_of(other) is None:
            raise Refused("beside a tensor that is different on each worker")
        if not isinstance(call.layout_of(other), Cut) and not call.fits(other, behind, cut):
            raise Refused(
                f"beside a whole tensor of {other.shape[behind]} elements along dimension "
                f"{behind}, which is split: it would need this worker's part of that"
            )
    return cut.at(ndim + behind)


def _check_in_place(call: FunctionCall) -> None:
    target = call.given(0, "input", "self")
    if isinstance(target, torch.Tensor) and not isinstance(call.layout_of(target), Cut):
        raise Refused("in place of a whole tensor")
