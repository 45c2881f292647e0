"""Modules of others under `linop.strategies.ContextParallel`: `MultiheadAttention` of torch, and
what looks at several tokens in another way, which is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, functional

from linop.errors import ArgumentError

_FORWARD = functional.multi_head_attention_forward
_SIGNATURE = inspect.signature(_FORWARD)
_BIASES = "bias_k", "bias_v", "static_k", "static_v"


def attended_heads(attention: Callable[..., Tensor], *given: Any, **named: Any) -> Any:
    """`torch.nn.functional.multi_head_attention_forward`, which `torch.nn.MultiheadAttention` and
    torch's transformer layers call, with another function in the place of
    `scaled_dot_product_attention`.

    Args:
        attention: that function, of (queries, keys, values, mask, dropout_p, is_causal).
        given, named: arguments. Masks have the rows of this worker's queries, and the columns of
            all keys; with ``is_causal`` the mask is that of the whole sequence.

    Raises:
        ArgumentError: weights are wanted, or keys are added to those of the sequence.
    """
    bound = _SIGNATURE.bind(*given, **named)
    bound.apply_defaults()
    values = bound.arguments
    if values["need_weights"]:
        raise ArgumentError(
            "ContextParallel: MultiheadAttention with need_weights=True, torch's default, gives "
            "the matrix of weights, which no worker has: call it with need_weights=False"
        )
    if values["add_zero_attn"] or any(values[name] is not None for name in _BIASES):
        raise ArgumentError(
            "ContextParallel: MultiheadAttention with add_bias_kv or add_zero_attn, which every "
            "worker would add to its part of the keys; one without expected"
        )
    heads, batched = values["num_heads"], values["query"].ndim == 3
    causal, padding = values["is_causal"], values["key_padding_mask"]
    mask = None if causal else _bias(values["attn_mask"], values["query"].dtype)
    if mask is not None and mask.ndim == 3 and batched:
        mask = mask.unflatten(0, (-1, heads))
    if padding is not None:
        more = _bias(padding, values["query"].dtype)
        more = more[:, None, None] if more.ndim == 2 else more
        mask = more if mask is None else mask + more

    def attend(q: Tensor, k: Tensor, v: Tensor, _: Any, dropout_p: float, *unused: Any) -> Tensor:
        return attention(q, k, v, mask, dropout_p, causal)

    values.update(attn_mask=None, key_padding_mask=None, is_causal=False)
    inner = {
        **_FORWARD.__globals__,
        "has_torch_function": lambda _: False,  # of which this is called
        "scaled_dot_product_attention": attend,
    }
    run = FunctionType(_FORWARD.__code__, inner, _FORWARD.__name__, _FORWARD.__defaults__)
    return run(*bound.args, **bound.kwargs)


def _bias(mask: Any, dtype: torch.dtype) -> Any:
    """The term of scores for a mask of `MultiheadAttention`, in which True leaves out."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)


def check_tokens(net: Module) -> None:
    """Check that nothing but torch's attention looks at several tokens, as far as modules say so.

    Raises:
        ArgumentError: something does.
    """
    for name, one in net.named_modules():
        where = f"ContextParallel.parallelize: {name or 'the net'} ({type(one).__name__})"
        config = vars(one).get("config")
        kind = getattr(config, "_attn_implementation", "sdpa")
        if isinstance(kind, str) and kind != "sdpa":
            raise ArgumentError(
                f"{where} computes attention by {kind!r}, of this worker's tokens alone; torch's "
                f"scaled_dot_product_attention expected: attn_implementation='sdpa', of the "
                f"models of transformers that have it"
            )
        wide = isinstance(one, torch.nn.Conv1d) and one.kernel_size != (1,)
        if wide or isinstance(one, torch.nn.RNNBase):
            raise ArgumentError(
                f"{where} looks at several tokens, and would see those of this worker alone; call "
                f"parallelize for the parts of the net that have attention, and work on tokens one "
                f"by one besides"
            )


def window_of(module: Module) -> int | None:
    """The number of tokens that attention in a module of transformers is limited to, which has no
    mask where a worker's tokens are fewer; None: it does not say."""
    own, config = vars(module), vars(module).get("config")
    for name in ("sliding_window", "attention_chunk_size"):
        found = own.get(name)
        if name not in own and not getattr(config, "layer_types", None):
            found = getattr(config, name, None)
        if isinstance(found, int) and not isinstance(found, bool) and found > 0:
            return found
    return None
