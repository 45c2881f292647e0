"""Tensors that are those of an attention, or the error of all workers that says why not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from linop.backends.autograd.dtypes import torch_dtype
from linop.errors import DTypeError, PartitionError, ShapeError
from linop.spaces.tensor import TensorSpace

if TYPE_CHECKING:
    from linop.layers.attention.attention import Settings


def check(
    name: str,
    settings: Settings,
    Q: TensorSpace,
    K: TensorSpace,
    V: TensorSpace,
    M: TensorSpace | None,
) -> None:
    """Check that global tensors are those of an attention.

    Raises:
        ShapeError, DTypeError, PartitionError: they are not.
    """
    shapes = f"queries {Q.global_shape}, keys {K.global_shape}, values {V.global_shape}"
    dtypes = [torch_dtype(X.dtype) for X in (Q, K, V)]
    if len({*dtypes}) > 1 or not dtypes[0].is_floating_point:
        raise DTypeError(
            f"{name}: queries, keys and values of {', '.join(map(str, dtypes))}; one "
            f"floating-point dtype expected"
        )
    if not Q.ndim == K.ndim == V.ndim:
        raise ShapeError(f"{name}: {shapes}; equally many dimensions expected")
    d = Q.ndim
    if Q.global_shape[-1] != K.global_shape[-1] or K.global_shape[:-1] != V.global_shape[:-1]:
        raise ShapeError(f"{name}: {shapes}; (…, L, E), (…, S, E) and (…, S, features) expected")
    if K.bounds[:-1] != V.bounds[:-1]:
        raise PartitionError(f"{name}: keys and values are cut differently; equal blocks expected")
    batch = d - 3 if settings.enable_gqa else d - 2
    if Q.global_shape[: max(0, batch)] != K.global_shape[: max(0, batch)]:
        hint = "" if settings.enable_gqa else "; groups of heads need enable_gqa=True"
        raise ShapeError(f"{name}: {shapes}; one batch and one number of heads expected{hint}")
    if d > 2 and settings.enable_gqa:
        heads, groups = Q.global_shape[-3], K.global_shape[-3]
        if not groups or heads % groups:
            raise ShapeError(f"{name}: {shapes}; {heads} heads are no multiple of {groups} groups")
    own = max(0, d - 3)
    if Q.bounds[:own] != K.bounds[:own]:
        raise PartitionError(f"{name}: the batch of keys is cut differently from that of queries")
    if M is None and settings.window is not None and K.global_shape[-2] > settings.window:
        raise PartitionError(
            f"{name}: a sequence of {K.global_shape[-2]} tokens, of which attention takes "
            f"{settings.window} at a time (sliding_window, or attention_chunk_size), without a "
            f"mask that says so: attn_mask with the columns of all keys expected"
        )
    if M is not None:
        _check_mask(name, Q, K, M)


def _check_mask(name: str, Q: TensorSpace, K: TensorSpace, M: TensorSpace) -> None:
    wanted = (*Q.global_shape[:-1], K.global_shape[-2])
    fits = M.ndim == Q.ndim and all(
        m == n or (m == 1 and d < Q.ndim - 2)
        for d, (m, n) in enumerate(zip(M.global_shape, wanted, strict=True))
    )
    if not fits:
        raise ShapeError(
            f"{name}: attn_mask of shape {M.global_shape} altogether; one that broadcasts to "
            f"{wanted} expected: on each worker the rows of its queries, and the columns of all "
            f"keys, in their order in the sequence"
        )
    dtype = torch_dtype(M.dtype)
    if dtype not in (torch.uint8, torch_dtype(Q.dtype)):
        raise DTypeError(
            f"{name}: attn_mask of {dtype}; torch.bool, or that of the queries, "
            f"{torch_dtype(Q.dtype)}, expected"
        )
