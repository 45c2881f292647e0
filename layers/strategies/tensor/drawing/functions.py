"""torch's functions that draw random numbers, by layout.

Every element's number is a function of the draw's key and of its index in the whole tensor
(`linop.layers.dropout.random_bits`): so each worker makes its block of what one worker makes alone.
Other functions, as permutations, draw for whole tensors only, from a generator that starts at the
key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from linop.layers.dropout import BITS, random_bits
from linop.layers.parameters.generator import from_seed_on, seed_of
from linop.layers.parameters.initialise import GENERATED
from linop.spaces.decomposition import REPLICATED
from linop.strategies.tensor.drawing.streams import Draws
from linop.strategies.tensor.following import products, shapes
from linop.strategies.tensor.following.along import dims_of, refuse_along
from linop.strategies.tensor.following.cuts import Cut, Refused
from linop.strategies.tensor.following.function_call import FunctionCall
from linop.strategies.tensor.following.sizes import plain

_DROPOUTS = {
    "dropout": True,
    "dropout1d": True,
    "dropout2d": True,
    "dropout3d": True,
    "feature_dropout": True,
    "alpha_dropout": False,
    "feature_alpha_dropout": False,
}
"""Dropouts, and whether they draw if they are not told."""
RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu", "multi_head_attention_forward"))
_ATTENTIONS = "scaled_dot_product_attention", "attention_of_parts"
"""That of torch, and of `ContextParallel`, which draws for whole tensors."""
_ALWAYS = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli normal multinomial"
    " poisson binomial uniform_ normal_ random_ bernoulli_ cauchy_ exponential_ geometric_"
    " log_normal_ gumbel_softmax kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_"
    " trunc_normal_ orthogonal_ fractional_max_pool2d fractional_max_pool3d native_dropout"
    " sample_dirichlet _sample_dirichlet _standard_gamma".split()
)


def is_random(name: str) -> bool:
    """True for a function that may draw."""
    plain = name.rstrip("_")
    return (
        name in _ALWAYS
        or plain in _DROPOUTS
        or plain == "rrelu"
        or name in RECURRENT
        or name in _ATTENTIONS
    )


def draws(call: FunctionCall) -> bool:
    """True if a call draws, as its arguments say: in training, with a probability."""
    name = call.name.rstrip("_")
    if name in _DROPOUTS:
        return bool(_trains(call) and _probability(call))
    if call.name in _ALWAYS:
        return True
    if name == "rrelu":
        return bool(call.given(3, "training", default=False))
    if name in _ATTENTIONS:
        return bool(call.given(4, "dropout_p", default=0.0))
    return call.name in RECURRENT and any(
        isinstance(n, float) and n > 0 for n in (*call.args, *call.kwargs.values())
    )


def may_draw(call: FunctionCall) -> bool:
    """True if a call draws, or would with another probability."""
    return draws(call) or (call.name.rstrip("_") in _DROPOUTS and bool(_trains(call)))


def _trains(call: FunctionCall) -> Any:
    default = _DROPOUTS[call.name.rstrip("_")]
    return call.given(2, "training", "train", default=default)


def _probability(call: FunctionCall) -> float:
    return float(call.given(1, "p", default=0.5))


def layout_of_draw(call: FunctionCall) -> Any:
    """The layout of the result of a draw that is given something that is split.

    Raises:
        Refused: it is not drawn by layout.
    """
    name = call.name.rstrip("_")
    if call.kwargs.get("generator") is not None:
        raise Refused("from a generator of its own: this worker would draw its part's numbers")
    if name == "scaled_dot_product_attention":
        cut = products.attended(call)
    elif name == "gumbel_softmax":
        x, cut = call.cut_of(0, "logits")
        if cut.dim in dims_of(call.given(4, "dim", default=-1), x.ndim):
            refuse_along(cut, x.ndim)
    elif call.name in ("rand", "randn"):
        cut = shapes.filled(call)
    elif call.name in _BY_LAYOUT:
        cut = call.cut_of(0, "input", "self", "tensor")[1]
    else:
        raise Refused(
            "draws as many numbers as this worker's part has; dropout, bernoulli, rand_like, "
            "randn_like, uniform_, normal_, rrelu and gumbel_softmax draw by layout"
        )
    if cut.is_shared:
        raise Refused("of a block that workers share")
    return cut


def drawn(call: FunctionCall, layout: Any, source: Draws) -> Any:
    """The result of a function that draws.

    Args:
        layout: of the result.
        source: of keys.
    """
    if call.kwargs.get("generator") is not None:
        return call.result
    tensors = call.tensors
    shape = tuple(tensors[0].shape) if tensors else ()
    draw = source.take(call.name, shape, layout)
    if _is_by_layout(call):
        cut = draw.layout if isinstance(draw.layout, Cut) else None
        return _BY_LAYOUT[call.name](call, _Numbers(cut, draw.key))
    device = tensors[0].device if tensors else torch.device(_device(call))
    if call.name in GENERATED:
        generator = torch.Generator(device).manual_seed(draw.key)
        call.kwargs = {**call.kwargs, "generator": generator}
        return call.result
    with from_seed_on(draw.key, device):
        return call.result


def _is_by_layout(call: FunctionCall) -> bool:
    """True for draws of one number an element, of fractions."""
    if call.name in ("rand", "randn"):
        return bool((call.kwargs.get("dtype") or torch.get_default_dtype()).is_floating_point)
    return call.name in _BY_LAYOUT and all(
        x.is_floating_point() or x.dtype is torch.bool for x in call.tensors
    )


def _device(call: FunctionCall) -> Any:
    return call.kwargs.get("device") or torch.get_default_device()


def repeated(func: Any, args: Any, kwargs: dict[str, Any], source: Draws) -> Any:
    """A function that is called again, with the draws of the first time."""
    name = str(getattr(func, "__name__", ""))
    call = FunctionCall(name, func, args, kwargs, lambda x: REPLICATED, 1, 0)
    if is_random(name) and draws(call):
        return drawn(call, REPLICATED, source)
    return func(*args, **kwargs)


class _Numbers:
    """Numbers of this worker's block of a tensor.

    Args:
        cut: its layout; None if it is whole.
        key: of the draw.
    """

    def __init__(self, cut: Cut | None, key: int) -> None:
        self.cut, self._key = cut, key

    def bits(self, shape: Sequence[int], device: Any, dims: int | None = None, n: int = 0) -> Any:
        """Numbers of 53 bits.

        Args:
            shape: of the block.
            dims: number of leading dimensions along which they vary; all by default.
            n: of draws of several numbers an element, which of them.
        """
        cut = self.cut
        whole, where = list(shape), [slice(0, length) for length in shape]
        if cut is not None:
            begin = sum(cut.sizes[: cut.index])
            whole[cut.dim] = cut.whole
            where[cut.dim] = slice(begin, begin + cut.sizes[cut.index])
        key = seed_of(f"{self._key} {n}") if n else self._key
        seed = torch.tensor(key - 2**64 if key >= 2**63 else key, device=device)
        return random_bits(seed, whole, where, dims)

    def uniform(self, shape: Sequence[int], dtype: Any, device: Any, n: int = 0) -> Tensor:
        """Fractions from 0 to below 1, of as many digits as the dtype has."""
        digits = 1 - int(math.log2(torch.finfo(dtype).eps))
        bits: Tensor = self.bits(shape, device, n=n) >> (BITS - digits)
        return bits.to(dtype) * 2.0**-digits

    def normal(self, shape: Sequence[int], dtype: Any, device: Any) -> Tensor:
        """By Box and Muller's method, in float64."""
        u, v = (self.uniform(shape, torch.float64, device, n) for n in (0, 1))
        return ((-2 * torch.log1p(-u)).sqrt() * torch.cos(2 * math.pi * v)).to(dtype)

    def kept(self, x: Tensor, p: float, dims: int | None = None) -> Tensor:
        """True with probability 1 - p."""
        kept: Tensor = self.bits(x.shape, x.device, dims) >= int(p * 2**BITS)
        return kept


def _dropped(call: FunctionCall, numbers: _Numbers) -> Tensor:
    x, p, name = call.given(0, "input"), _probability(call), call.name.rstrip("_")
    kept = numbers.kept(x, p, _dims(name, x.ndim)).to(x.dtype)
    if "alpha" in name and p < 1:
        alpha = 1.7580993408473766  # of torch's: that of SELU times its scale
        a = 1 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
        return _put(call, x, x * (kept * a) + ((kept - 1) * (alpha * a) + alpha * a * p))
    return _put(call, x, x * (kept / (1 - p) if p < 1 else kept * 0))


def _dims(name: str, ndim: int) -> int | None:
    """Leading dimensions along which a mask varies."""
    if name in ("dropout", "alpha_dropout"):
        return None
    return 1 if (name, ndim) in (("dropout1d", 2), ("dropout3d", 4)) else 2


def _put(call: FunctionCall, x: Tensor, result: Tensor) -> Tensor:
    """The result, in place of the argument where that is wanted."""
    inplace = call.given(4 if "rrelu" in call.name else 3, "inplace", default=False)
    if call.name.endswith("_") or inplace:
        return x.copy_(result)
    return result


def _sloped(call: FunctionCall, numbers: _Numbers) -> Tensor:
    x = call.given(0, "input")
    low, high = call.given(1, "lower", default=1 / 8), call.given(2, "upper", default=1 / 3)
    slope = low + numbers.uniform(x.shape, x.dtype, x.device) * (high - low)
    return _put(call, x, torch.where(x > 0, x, x * slope))


def _like(call: FunctionCall, numbers: _Numbers) -> Tensor:
    x, name = call.given(0, "input"), call.name
    dtype = call.kwargs.get("dtype") or x.dtype
    device = call.kwargs.get("device") or x.device
    draw = numbers.normal if name == "randn_like" else numbers.uniform
    made = draw(x.shape, dtype, device)
    return made.requires_grad_() if call.kwargs.get("requires_grad") else made


def _made(call: FunctionCall, numbers: _Numbers) -> Tensor:
    shape = tuple(map(plain, call.many(0, "size")))
    dtype = call.kwargs.get("dtype") or torch.get_default_dtype()
    draw = numbers.normal if call.name == "randn" else numbers.uniform
    return draw(shape, dtype, _device(call))


def _filled(call: FunctionCall, numbers: _Numbers) -> Tensor:
    x: Tensor = call.given(0, "self", "tensor")
    # Those of torch.nn.init name their tensor, and fill parameters, too.
    with torch.no_grad() if "tensor" in call.kwargs else nullcontext():
        return x.copy_(_fill(call, x, numbers))


def _fill(call: FunctionCall, x: Tensor, numbers: _Numbers) -> Any:
    if call.name == "normal_":
        mean, std = call.given(1, "mean", default=0.0), call.given(2, "std", default=1.0)
        return numbers.normal(x.shape, x.dtype, x.device) * std + mean
    u = numbers.uniform(x.shape, x.dtype, x.device)
    if call.name == "exponential_":
        return -torch.log1p(-u) / call.given(1, "lambd", default=1.0)
    low, high = call.given(1, "from", "a", default=0.0), call.given(2, "to", "b", default=1.0)
    return low + u * (high - low)


def _tossed(call: FunctionCall, numbers: _Numbers) -> Tensor:
    x: Tensor = call.given(0, "input", "self")
    in_place = call.name.endswith("_")
    p = call.given(1, "p", default=0.5 if in_place else None)
    tossed: Tensor = numbers.bits(x.shape, x.device).double() * 2.0**-BITS < (x if p is None else p)
    return x.copy_(tossed) if in_place else tossed.to(x.dtype)


def _gumbel(call: FunctionCall, numbers: _Numbers) -> Tensor:
    x: Tensor = call.given(0, "logits")
    tau = call.given(1, "tau", default=1)
    dim = call.given(4, "dim", default=-1)
    u = numbers.uniform(x.shape, torch.float64, x.device) + 2.0 ** -(BITS + 1)
    soft: Tensor = ((x - (-u.log()).log().to(x.dtype)) / tau).softmax(dim)
    if not call.given(2, "hard", default=False):
        return soft
    most = soft.max(dim, keepdim=True)[1]
    return torch.zeros_like(x).scatter_(dim, most, 1.0) - soft.detach() + soft


def _attended(call: FunctionCall, numbers: _Numbers) -> Tensor:
    """Attention as torch defines it, whose weights are dropped by layout."""
    q, k, v = (call.given(n, name) for n, name in enumerate(("query", "key", "value")))
    mask, p = call.given(3, "attn_mask"), call.given(4, "dropout_p")
    scale = call.kwargs.get("scale")
    if call.kwargs.get("enable_gqa"):
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if call.given(5, "is_causal", default=False):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1)
    kept = numbers.kept(weights, p).to(weights.dtype)
    attended: Tensor = (weights * (kept / (1 - p) if p < 1 else kept * 0)) @ v
    return attended


_BY_LAYOUT: dict[str, Callable[[FunctionCall, _Numbers], Tensor]] = {
    **{f"{name}{end}": _dropped for name in _DROPOUTS for end in ("", "_")},
    **dict.fromkeys(("rrelu", "rrelu_"), _sloped),
    **dict.fromkeys(("rand_like", "randn_like"), _like),
    **dict.fromkeys(("rand", "randn"), _made),
    **dict.fromkeys(("uniform_", "normal_", "exponential_"), _filled),
    **dict.fromkeys(("bernoulli", "bernoulli_"), _tossed),
    "gumbel_softmax": _gumbel,
    "scaled_dot_product_attention": _attended,
}
"""Functions of tensors that are split."""
