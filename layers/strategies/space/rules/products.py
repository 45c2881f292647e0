"""Products of tensors, by the labels of an einsum: a grid axis cuts one label; operands that have
it are cut there, each worker has copies of the others, and where the label is summed over, so are
the workers' products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linop.strategies.space.call import Call, Gathered
from linop.strategies.space.cut_tensor import CutTensor
from linop.strategies.space.layout import COPIES, REPLICATED, Axis, Bounds


def contracted(
    call: Call,
    operands: Sequence[Any],
    labels: Sequence[str],
    result: str,
    compute: Any,
    whole: str = "",
) -> Any:
    """A product of tensors.

    Args:
        operands: tensors; None is given on.
        labels: of each operand's dimensions.
        result: those of the result; labels that only operands have are summed over.
        compute: function of this worker's operands.
        whole: labels that are not cut.
    """
    extents: dict[str, int] = {}
    for x, names in zip(operands, labels, strict=True):
        if x is None:
            continue
        if x.ndim != len(names) or len({*names}) != len(names):
            raise Gathered
        for name, n in zip(names, x.shape, strict=True):
            if extents.get(name, 1) == 1:
                extents[name] = n
            elif n not in (1, extents[name]):
                raise Gathered  # torch's error
    axes: list[str | None] = []
    cuts: dict[str, Bounds] = {}
    for k in range(len(call.grid.extents)):
        found = None
        for x, names in zip(operands, labels, strict=True):
            d = x.blocks.axes[k] if isinstance(x, CutTensor) else None
            if not isinstance(d, int):
                continue
            name = names[d]
            if name not in whole and name not in cuts and x.shape[d] == extents[name] > 1:
                found, cuts[name] = name, x.blocks.bounds[d]
                break
        axes.append(found)
    blocks: list[Tensor | None] = []
    for x, names in zip(operands, labels, strict=True):
        if x is None:
            blocks.append(None)
            continue
        own: list[Axis] = []
        bounds = {}
        for label in axes:
            name = label or ""
            if label is None:
                own.append(REPLICATED)
            elif name in names and x.shape[names.index(name)] == extents[name]:
                own.append(names.index(name))
                bounds[names.index(name)] = cuts[name]
            else:
                own.append(COPIES)
        blocks.append(call.to(x, call.grid.whole(x.shape).changed(axes=own, bounds=bounds)))
    shape = [extents[name] for name in result]
    made = [REPLICATED if n is None else result.index(n) if n in result else COPIES for n in axes]
    bounds = {result.index(n): c for n, c in cuts.items() if n in result}
    layout = call.grid.whole(shape).changed(axes=made, bounds=bounds)
    block = compute(*blocks)
    return call.wrap(*call.total(block, layout))


def einsum(call: Call, equation: Any, *operands: Any) -> Any:
    """einsum."""
    if not isinstance(equation, str):
        raise Gathered
    given = (
        list(operands[0])
        if len(operands) == 1 and isinstance(operands[0], list | tuple)
        else list(operands)
    )
    text = equation.replace(" ", "")
    if "." in text or not all(isinstance(x, Tensor) for x in given):
        raise Gathered
    left, arrow, right = text.partition("->")
    labels = left.split(",")
    if len(labels) != len(given):
        raise Gathered
    if not arrow:
        every = left.replace(",", "")
        right = "".join(sorted(c for c in {*every} if every.count(c) == 1))

    def compute(*blocks: Tensor) -> Tensor:
        return torch.einsum(f"{left}->{right}", *blocks)

    return contracted(call, given, labels, right, compute)


_BATCH = "ABCDEFGHIJ"


def matmul(call: Call, input: Any, other: Any) -> Any:
    """matmul, mm, bmm, @."""
    a, b = (other, input) if call.name == "__rmatmul__" else (input, other)
    if a.ndim < 2 or b.ndim < 2:
        raise Gathered
    n = max(a.ndim, b.ndim) - 2
    batch = _BATCH[:n]
    left = batch[n - (a.ndim - 2) :] + "mk"
    right = batch[n - (b.ndim - 2) :] + "kn"
    return contracted(call, [a, b], [left, right], batch + "mn", torch.matmul)


def baddbmm(call: Call, input: Any, batch1: Any, batch2: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    """baddbmm, addmm."""
    return input * beta + torch.matmul(batch1, batch2) * alpha


def linear(call: Call, input: Any, weight: Any, bias: Any = None) -> Any:
    """linear: over the last dimension."""
    if isinstance(weight, CutTensor) or isinstance(bias, CutTensor):
        raise Gathered
    x = call.cut(input)
    batch = _BATCH[: x.ndim - 1]
    if x.ndim - 1 in x.blocks.cut or weight.ndim != 2:
        y = contracted(
            call, [x, weight], [batch + "k", "nk"], batch + "n", torch.nn.functional.linear
        )
        return y if bias is None else y + bias
    names = [batch + "k", "nk", "n"]
    return contracted(call, [x, weight, bias], names, batch + "n", torch.nn.functional.linear)


_PRODUCTS, _DIFFERENCES = 1, 2
"""torch's numbers of ways to compute distances."""


def cdist(call: Call, x1: Any, x2: Any, p: float = 2.0, mode: Any = None) -> Any:
    """cdist: the points of one argument stay where they are, those of the other come to them. By
    products or by differences, as torch chooses of the whole tensors."""
    if x1.ndim < 2 or x2.ndim < 2:
        raise Gathered  # torch's error
    if mode is None:
        mode = _PRODUCTS if max(x1.shape[-2], x2.shape[-2]) > 25 else _DIFFERENCES
    n = max(x1.ndim, x2.ndim) - 2
    batch = _BATCH[:n]
    labels = [batch[n - (x.ndim - 2) :] + last for x, last in ((x1, "pm"), (x2, "rm"))]

    def compute(a: Tensor, b: Tensor) -> Any:
        if 0 in a.shape or 0 in b.shape:
            lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
            return a.new_zeros((*lead, a.shape[-2], b.shape[-2])) + (a.sum() + b.sum()) * 0
        return call.function(a, b, p, mode)

    return contracted(call, [x1, x2], labels, batch + "pr", compute, "m")


def attention(
    call: Call,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Any:
    """scaled_dot_product_attention: queries stay where they are, all keys and values come to
    them."""
    if dropout_p or enable_gqa or min(query.ndim, key.ndim, value.ndim) < 2:
        raise Gathered
    n = max(query.ndim, key.ndim, value.ndim) - 2
    batch = _BATCH[:n]

    def names(x: Any, last: str) -> str:
        return batch[n - (x.ndim - 2) :] + last

    operands = [query, key, value]
    labels = [names(query, "le"), names(key, "se"), names(value, "sv")]
    if attn_mask is not None:
        if attn_mask.ndim < 2:
            raise Gathered
        operands.append(attn_mask)
        labels.append(names(attn_mask, "ls"))

    def compute(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        if 0 in q.shape:
            tied = q.sum() + k.sum() + v.sum()
            return q.new_zeros((*q.shape[:-1], v.shape[-1])) + tied * 0
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, 0.0, is_causal, scale=scale
        )

    whole = "sev" + ("l" if is_causal else "")
    return contracted(call, operands, labels, batch + "lv", compute, whole)
