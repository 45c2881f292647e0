"""Products of tensors: along what is summed none is cut."""

from __future__ import annotations

from typing import Any

import torch

from linop.strategies.tensor.following.cuts import Cut, Refused
from linop.strategies.tensor.following.elementwise import broadcast
from linop.strategies.tensor.following.function_call import FunctionCall

_SUM = (
    "a sum along dimension {dim}, which is split: each worker would have a term of it. A "
    "torch.nn.Linear with RowwiseParallel() adds them"
)


def multiplied(call: FunctionCall) -> Cut:
    """matmul, mm, bmm, mv."""
    a, b = (call.given(k, *names) for k, names in enumerate((("input", "self"), _SECOND)))
    if call.name in ("__rmatmul__",):
        a, b = b, a
    return _product(call, a, b)


_SECOND = ("other", "mat2", "vec")


def _product(call: FunctionCall, a: Any, b: Any) -> Cut:
    one, other = call.layout_of(a), call.layout_of(b)
    if isinstance(one, Cut) and one.dim == a.ndim - 1:
        raise Refused(_SUM.format(dim=-1))
    if isinstance(other, Cut) and other.dim == max(b.ndim - 2, 0):
        raise Refused(_SUM.format(dim=-2 if b.ndim > 1 else -1))
    rows = isinstance(one, Cut) and one.dim == a.ndim - 2
    columns = isinstance(other, Cut) and other.dim == b.ndim - 1
    ndim = call.first.ndim
    if (rows and columns) or ((rows or columns) and len(call.cuts) > 1):
        raise Refused("of two tensors that are split along different dimensions")
    if rows:
        assert isinstance(one, Cut)
        return one.at(ndim - (2 if b.ndim > 1 else 1))
    if columns:
        assert isinstance(other, Cut)
        return other.at(ndim - 1)
    return _batches(call, [x for x in (a, b) if x.ndim > 2], ndim)


def _batches(call: FunctionCall, tensors: list[Any], ndim: int) -> Cut:
    """The cut along dimensions of a batch, which broadcast."""
    return broadcast(call, tensors, ndim)


def added(call: FunctionCall) -> Cut:
    """addmm, baddbmm: a product, and what is added to it."""
    c, a, b = (call.given(k) for k in range(3))
    if b is None or a is None:
        raise Refused("with arguments by name")
    cut = _product(call, a, b)
    theirs = call.layout_of(c)
    behind = cut.dim - call.first.ndim
    if isinstance(theirs, Cut):
        if theirs.dim - c.ndim != behind or theirs.sizes != cut.sizes:
            raise Refused("of tensors that are split along different dimensions")
    elif not call.fits(c, behind, cut):
        raise Refused("beside a whole tensor, of which it would need this worker's part")
    return cut


def linear(call: FunctionCall) -> Cut:
    """linear, by a weight that all workers have."""
    x, cut = call.cut_of()
    if cut.dim == x.ndim - 1:
        raise Refused(_SUM.format(dim=-1))
    return cut


def einsum(call: FunctionCall) -> Cut:
    """einsum, of an equation in letters."""
    equation, *operands = call.args
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    if not isinstance(equation, str) or "." in equation:
        raise Refused("without letters for all dimensions")
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow:
        output = "".join(sorted(c for c in set(inputs) - {","} if inputs.count(c) == 1))
    letters = {
        (term[cut.dim], cut.sizes)
        for term, x in zip(terms, operands, strict=True)
        if isinstance(cut := call.layout_of(x), Cut)
    }
    if len(letters) > 1:
        raise Refused("of tensors that are split along different dimensions")
    ((letter, _),) = letters
    for term, x in zip(terms, operands, strict=True):
        cut = call.layout_of(x)
        if term.count(letter) > 1 or (letter in term and not isinstance(cut, Cut)):
            raise Refused(f"of tensors of which not all are split along {letter!r}")
    if letter not in output:
        x, cut = call.cuts[0]
        raise Refused(_SUM.format(dim=cut.dim - x.ndim))
    return call.cuts[0][1].at(output.index(letter))


def attended(call: FunctionCall) -> Cut:
    """scaled_dot_product_attention: heads, or samples, that are cut alike."""
    q, k, v = (call.given(n, name) for n, name in enumerate(("query", "key", "value")))
    mask = call.given(3, "attn_mask")
    cuts = [call.layout_of(x) for x in (q, k, v)]
    cut = cuts[0]
    if not all(isinstance(one, Cut) for one in cuts) or not isinstance(cut, Cut):
        raise Refused("of queries, keys and values of which not all are split")
    for x, one in zip((q, k, v), cuts, strict=True):
        assert isinstance(one, Cut)
        if one.dim >= x.ndim - 2 or one.dim - x.ndim != cut.dim - q.ndim:
            raise Refused(
                f"of a tensor that is split along dimension {one.dim - x.ndim}: heads, or samples, "
                f"are computed one by one, positions and features are not"
            )
        same = (one.sizes, one.whole) == (cut.sizes, cut.whole)
        if not same and not (call.kwargs.get("enable_gqa") and _grouped(cut, one)):
            raise Refused(f"of blocks of {cut.sizes} heads of queries and of {one.sizes} others")
    if isinstance(mask, torch.Tensor):
        _check_mask(call, mask, cut, cut.dim - q.ndim)
    return cut


def _grouped(queries: Cut, others: Cut) -> bool:
    """True if every block of queries is in as many groups as are beside it."""
    if not others.whole or queries.whole % others.whole:
        return False
    each = queries.whole // others.whole
    if not others.is_shared:
        return queries.sizes == tuple(n * each for n in others.sizes)
    return all(n == 1 for n in others.sizes) and all(n <= each for n in queries.sizes)


def _check_mask(call: FunctionCall, mask: Any, cut: Cut, behind: int) -> None:
    theirs = call.layout_of(mask)
    if isinstance(theirs, Cut):
        if theirs.dim - mask.ndim != behind or theirs.sizes != cut.sizes:
            raise Refused("with a mask that is split along another dimension")
    elif not call.fits(mask, behind, cut):
        raise Refused("with a mask for all heads, of which it would need this worker's part")
