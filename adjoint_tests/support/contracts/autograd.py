"""Contracts of `linop.autograd`, as SPMD programs: `test_autograd` runs each on threads and under
MPI. Each is ``contract(backend, *arguments)``, for two workers or more.

A worker that fails says so with an AssertionError; others may then wait for it, which threads see
at once, and `linop.testing.workers.jobs` after a grace. Needs torch.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import linop
from linop import LinearOperator, Partition, Space, TensorSpace
from linop.backends import Backend
from linop.errors import (
    DTypeError,
)
from support.contracts.plans import LARGE, OPERATORS, mine, raised, size, stencil, total

apply, add_dependency = linop.autograd.apply, linop.autograd.add_dependency

# Arguments and results of all workers, and of this one


def tensor(array: np.ndarray, gradient: bool = False) -> Any:
    """A tensor of the same values, in memory of its own."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(array.copy()).requires_grad_(gradient)


def part(space: Space, arrays: Any, backend: Backend, gradient: bool = False) -> Any:
    """This worker's part of a vector, as `apply` takes it."""
    held = {r.name: tensor(arrays[r.name], gradient) for r in space.on(mine(backend))}
    if not held:
        return torch.empty(0, dtype=torch.float64, requires_grad=gradient)
    return held if len(held) > 1 else next(iter(held.values()))


def each(x: Any) -> list[Any]:
    return list(x.values()) if isinstance(x, dict) else [x]


def same(given: Any, wanted: Any) -> None:
    """Equal in form, dtype and every element; zero-volume tensors are."""
    assert type(given) is type(wanted), (type(given), type(wanted))
    if isinstance(given, dict):
        assert list(given) == list(wanted)
    for one, other in zip(each(given), each(wanted), strict=True):
        assert one is not None, "no gradient"
        assert (one.shape, one.dtype) == (other.shape, other.dtype), (one, other)
        assert torch.equal(one, other), (one, other)


def loss(y: Any, weights: Any) -> Any:
    """Re <weights, y> on this worker."""
    return sum((a * b.conj()).real.sum() for a, b in zip(each(y), each(weights), strict=True))


def gradients(x: Any) -> Any:
    """Of the same form as the argument."""
    return {n: t.grad for n, t in x.items()} if isinstance(x, dict) else x.grad


def wanted(op: LinearOperator, seed: int, backend: Backend) -> Any:
    """This worker's result of an operator applied to its domain's integers."""
    return part(op.codomain, op(op.domain.integers(seed)).arrays, backend)


def works(op: LinearOperator, backend: Backend, seed: int = 3) -> None:
    """Forward and back are the operator and its adjoint."""
    x = part(op.domain, op.domain.integers(seed).arrays, backend, gradient=True)
    y = apply(op, x, backend)
    same(_detached(y), wanted(op, seed, backend))
    loss(y, part(op.codomain, op.codomain.integers(seed + 1).arrays, backend)).backward()
    same(gradients(x), wanted(op.H, seed + 1, backend))


def _detached(y: Any) -> Any:
    return {n: t.detach() for n, t in y.items()} if isinstance(y, dict) else y.detach()


# Contracts


def forward_and_back(backend: Backend, what: str) -> None:
    """All operators, of one region, of several, and of none; their gradients by the dot test."""
    for op in (OPERATORS[what](size(backend)), OPERATORS[what](size(backend)).H):
        works(op, backend)
        works(op, backend, 5)
        x = part(op.domain, op.domain.integers(8).arrays, backend)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                y = apply(op, x, backend)
            assert not any(one.requires_grad for one in each(y))
            same(y, wanted(op, 8, backend))


def who_needs_no_gradient_takes_part(backend: Backend) -> None:
    """Whatever needs gradients on whom: results do on all, and all run backward."""
    n, me = size(backend), mine(backend)
    op = total(n)
    for odd in range(n):
        x = torch.full((5,), 1.0 + me, dtype=torch.float64, requires_grad=me == odd)
        y = apply(op, x, backend)
        assert y.requires_grad
        (y * (me + 1)).sum().backward()
        if me == odd:
            same(x.grad, torch.full((5,), n * (n + 1) / 2, dtype=torch.float64))
        assert linop.backends.autograd.bridge.bridge_of(op, backend).anchor.grad is None


def inactive_workers_take_part(backend: Backend) -> None:
    """Zero-volume tensors come and go, tie applications together, and have gradients."""
    n, me = size(backend), mine(backend)
    there = linop.repartition(
        TensorSpace((6,), Partition((1,), [0])), TensorSpace((6,), Partition((1,), [n - 1]))
    )
    for given in ("zero-volume", "None", "another zero-volume"):
        x: Any = None
        if me == 0:
            x = torch.arange(6.0, dtype=torch.float64, requires_grad=True)
        elif given == "zero-volume":
            x = torch.empty(0, dtype=torch.float64, requires_grad=True)
        elif given != "None":
            x = torch.empty((3, 0, 2), requires_grad=True)
        y = apply(there, x, backend)
        z = apply(there.H, 2 * y if me == n - 1 else y, backend)
        assert (y.shape, z.shape) == ((6 * (me == n - 1),), (6 * (me == 0),))
        assert y.requires_grad and z.requires_grad
        z.sum().backward()
        if me == 0:
            same(x.grad, torch.full((6,), 2.0, dtype=torch.float64))
        elif x is not None:
            assert x.grad.shape == x.shape
    works(there, backend)


def unused_results_are_tied(backend: Backend) -> None:
    """A worker that uses none of what others use ties it to its loss."""
    me = mine(backend)
    op = total(size(backend))
    x = torch.ones(5, dtype=torch.float64, requires_grad=True)
    y = apply(op, x, backend)
    bad = y + torch.inf
    weight = torch.tensor(3.0, requires_grad=True)
    end = add_dependency(weight * 2, bad, y.to(torch.complex128)) if me == 0 else y.sum()
    if me == 0:
        assert end.item() == 6 and end.dtype is torch.float32
    end.backward()
    same(x.grad, torch.full((5,), size(backend) - 1.0, dtype=torch.float64))


def any_layout_will_do(backend: Backend) -> None:
    """Transposed, strided and expanded arguments and gradients, and lazily conjugated ones."""
    n = size(backend)
    X = TensorSpace((3 * n, 4), Partition((n,)), np.complex128)
    op = 1j * linop.shift(X, 1)
    shape = X.local_shape(mine(backend))
    values = op.domain.integers(1)
    here = tensor(values[X.region(mine(backend)).name])
    wide = torch.zeros((shape[0], 2 * shape[1]), dtype=here.dtype)
    wide[:, ::2] = here
    forms = [here.T.contiguous().T, wide[:, ::2], here.conj().resolve_conj().conj(), here]
    for x in forms:
        same(apply(op, x, backend).detach(), wanted(op, 1, backend))
        z = torch.zeros_like(here, requires_grad=True)
        y = apply(op, z, backend)
        y.backward(x)
        same(z.grad, wanted(op.H, 1, backend))
    one = torch.ones((1, 1), dtype=here.dtype).expand(shape)
    same(apply(op, one, backend).detach(), 1j * torch.ones(shape, dtype=here.dtype))
    z = torch.zeros_like(here, requires_grad=True)
    apply(op, z, backend).sum().abs().backward()
    w = torch.zeros_like(here, requires_grad=True)
    apply(op, w, backend).real.sum().backward()
    same(w.grad, torch.full(shape, -1j, dtype=here.dtype))


def nothing_is_changed(backend: Backend) -> None:
    """Arguments and gradients stay as they are, and so does what else they are part of."""
    op = stencil(size(backend))
    start = part(op.domain, op.domain.integers(1).arrays, backend)
    w = start.clone().requires_grad_()
    v = 2 * w
    before = v.detach().clone()
    y = v + apply(op, v, backend)
    same(v.detach(), before)
    g = part(op.codomain, op.codomain.integers(2).arrays, backend)
    kept = g.clone()
    y.backward(g, retain_graph=True)
    same(g, kept)
    right = 2 * (g + wanted(op.H, 2, backend))
    same(w.grad, right)
    first = w.grad
    w.grad = None
    y.backward(g)
    same(w.grad, right)
    same(first, right)  # results are memory of their own
    result = apply(op, start, backend).detach()
    result += 1
    same(start, part(op.domain, op.domain.integers(1).arrays, backend))


def second_derivatives(backend: Backend) -> None:
    """<y, y>/2 has the gradient F* F x, and that the derivative F* F z."""
    op = 3 * stencil(size(backend))
    x = part(op.domain, op.domain.integers(1).arrays, backend, gradient=True)
    z = part(op.domain, op.domain.integers(2).arrays, backend)
    y = apply(op, x, backend)
    (g,) = torch.autograd.grad((y * y).sum() / 2, x, create_graph=True)
    same(g.detach(), wanted(op.H @ op, 1, backend))
    (h,) = torch.autograd.grad((g * z).sum(), x)
    same(h, wanted(op.H @ op, 2, backend))


def forward_mode(backend: Backend) -> None:
    """One worker alone has a tangent, and all push theirs forward. Not for threads: torch has one
    forward level for all of them."""
    me = mine(backend)
    op = 3 * stencil(size(backend))
    x = part(op.domain, op.domain.integers(1).arrays, backend, gradient=True)
    z = part(op.domain, op.domain.integers(2).arrays, backend)
    for odd in range(size(backend)):
        alone = op.domain.integers(2)
        for region in op.domain:
            if odd not in region.workers:
                alone.arrays[region.name] *= 0
        with forward_ad.dual_level():
            given = forward_ad.make_dual(x, z) if me == odd else x
            tangent = forward_ad.unpack_dual(apply(op, given, backend)).tangent
            same(tangent.detach(), part(op.codomain, op(alone).arrays, backend))


def branches_differ(backend: Backend, seed: int) -> None:
    """Collectives of a backward pass come in one order, whatever lies between them where."""
    n, me = size(backend), mine(backend)
    ops = [total(n), stencil(n), total(n).H]
    ops[1] = ops[1] @ linop.identity(ops[1].domain)
    rng = np.random.default_rng(seed)
    odd = np.random.default_rng([seed, me])
    x = torch.ones(5, dtype=torch.float64, requires_grad=True)
    s = part(ops[1].domain, ops[1].domain.integers(1).arrays, backend, gradient=True)
    results = [x, x]
    wide = s
    for _ in range(6):
        which = int(rng.integers(3))
        if which == 1:
            wide = apply(ops[1], wide, backend) / 64
        else:
            source = results[int(odd.integers(len(results)))] / n  # another one on each worker
            results.append(apply(ops[which], source, backend))
        for _ in range(int(odd.integers(4))):
            k = int(odd.integers(len(results)))
            results[k] = results[k] * 1.5 if odd.integers(2) else results[k] + 1
    order = odd.permutation(len(results))
    loss = sum(results[k].sum() for k in order) if me else results[-1].sum()
    add_dependency(loss, wide, *results).backward()
    assert x.grad is not None and s.grad is not None
    works(ops[0], backend)
    works(ops[1], backend)


def passes_in_any_common_order(backend: Backend) -> None:
    """Several backward passes of one operator, in an order that all share."""
    n = size(backend)
    op = total(n)
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 1, 0]):
        xs = [torch.ones(5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        ys = [apply(op, x, backend) for x in xs]
        for k in order:
            (10**k * ys[k]).sum().backward(retain_graph=True)
        for k in range(3):
            if k in order:
                same(xs[k].grad, torch.full((5,), 10.0**k * n * order.count(k)).double())


def results_are_kept(backend: Backend) -> None:
    """A tensor's memory is its own, whatever comes later; gradients' too, and views."""
    n = size(backend)
    op = OPERATORS["large total"](n)
    x = torch.zeros(LARGE, dtype=torch.float64, requires_grad=True)
    kept = []
    for k in range(8):
        y = apply(op, x + k, backend)
        (g,) = torch.autograd.grad((y * k).sum(), x)
        kept.append((y.detach() if k % 2 else y[5:], g[3:]))
    for k, (y, g) in enumerate(kept):
        assert (y == k * n).all() and (g == k * n).all()


def one_worker_repeats_what_others_keep(backend: Backend) -> None:
    """A worker alone checkpoints what contains operators; nothing is communicated twice."""
    n, me = size(backend), mine(backend)
    A, B = total(n), 2 * total(n).H

    def layer(x: Any) -> Any:
        return apply(B, torch.sin(apply(A, torch.cos(x), backend)), backend).exp()

    found = []
    for who in ((), (0,), (n - 1,), range(n)):
        x = torch.linspace(0, 0.1, 5, dtype=torch.float64).add(me / 10).requires_grad_()
        if me in who:
            context = linop.autograd.checkpoint_context
            y = checkpoint(layer, x, use_reentrant=False, context_fn=context)
        else:
            y = layer(x)
        z = apply(A, torch.sin(y), backend)
        z.sum().backward()
        found.append(x.grad)
    for grad in found[1:]:
        assert torch.equal(grad, found[0])


def all_workers_repeat(backend: Backend, reentrant: bool) -> None:
    """Without it, where all of them do it alike."""
    op = total(size(backend))

    def layer(x: Any) -> Any:
        return torch.sin(apply(op, torch.cos(x), backend))

    found = []
    for how in (layer, lambda x: checkpoint(layer, x, use_reentrant=reentrant)):
        x = torch.linspace(0, 1, 5, dtype=torch.float64, requires_grad=True)
        for _ in range(2):
            how(how(x)).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def mixed_precision(backend: Backend) -> None:
    """Under autocast tensors come in short dtypes, and are converted as torch's functions do it;
    gradients come back in theirs."""
    n, me = size(backend), mine(backend)
    X = TensorSpace((3,), Partition((n,)), np.float32, axes=(linop.COPIES,))
    op = linop.all_reduce(X)
    x = torch.full((3,), 1.0 + me, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        short = torch.nn.functional.linear(x, torch.eye(3))
        assert short.dtype is torch.bfloat16
        y = apply(op, short, backend)
    assert y.dtype is torch.float32
    y.sum().backward()
    same(x.grad, torch.full((3,), float(n)))
    same(y.detach(), torch.full((3,), n * (n + 1) / 2))
    raised(DTypeError, lambda: apply(linop.all_reduce(X), short, backend))


def every_dtype(backend: Backend, dtype: str) -> None:
    """Arrays share memory with tensors in every dtype, bfloat16 included."""
    if dtype == "bfloat16":
        import ml_dtypes  # noqa: F401
    n = size(backend)
    X = TensorSpace((3,), Partition((n,)), np.dtype(dtype), axes=(linop.COPIES,))
    op = linop.all_reduce(X)
    kind = getattr(torch, dtype)
    whole = not (kind.is_floating_point or kind.is_complex)
    x = torch.arange(6).to(kind)[::2].requires_grad_(not whole)
    y = apply(op, x, backend)
    same(y.detach(), torch.tensor([0, 2 * n, 4 * n]).to(kind))
    assert y.requires_grad is not whole
    if not whole:
        y.real.sum().backward() if kind.is_complex else y.sum().backward()
        same(x.grad, torch.full((3,), n).to(kind))


def plans_are_made_once(backend: Backend) -> None:
    """An operator is compiled once for a backend, and its adjoint with it; it goes with it."""
    op = total(size(backend))
    x = torch.ones(5, dtype=torch.float64, requires_grad=True)
    module = linop.autograd.Module(op, backend)
    for _ in range(3):
        module(x).sum().backward()
        apply(op.H, apply(op, x, backend), backend).sum().backward()
    bound: Any = backend.bound  # type: ignore[attr-defined]
    assert len(bound) == 2
    del module, op
    for _ in range(400):  # another thread may be collecting
        gc.collect()
        if not bound:
            return
        time.sleep(0.01)
    raise AssertionError(list(bound.values()))


def slices_at_once(backend: Backend) -> None:
    """vmap applies the plan to each slice; so a worker without regions passes empty slices."""
    n, me = size(backend), mine(backend)
    op = linop.broadcast(TensorSpace((5,), Partition((1,), [0])), Partition((n,)))
    x = torch.arange(20.0, dtype=torch.float64).reshape(4, 5)[:, : 5 if me == 0 else 0]

    def f(x: Any) -> Any:
        return apply(op, x, backend)

    y = torch.func.vmap(f)(x)
    same(y.detach(), torch.arange(20.0, dtype=torch.float64).reshape(4, 5))
    jacobian = torch.func.jacrev(f)(x[0]).detach()
    right = torch.eye(5, dtype=torch.float64) * n
    assert jacobian.shape == (5, x.shape[1])
    if me == 0:
        same(jacobian, right)


CONTRACTS: tuple[tuple[Callable[..., None], tuple[Any, ...]], ...] = (
    *((forward_and_back, (what,)) for what in OPERATORS),
    (who_needs_no_gradient_takes_part, ()),
    (inactive_workers_take_part, ()),
    (unused_results_are_tied, ()),
    (any_layout_will_do, ()),
    (nothing_is_changed, ()),
    (second_derivatives, ()),
    *((branches_differ, (seed,)) for seed in range(4)),
    (passes_in_any_common_order, ()),
    (results_are_kept, ()),
    (one_worker_repeats_what_others_keep, ()),
    *((all_workers_repeat, (reentrant,)) for reentrant in (False, True)),
    (mixed_precision, ()),
    *((every_dtype, (dtype,)) for dtype in ("bfloat16", "float16", "complex64", "int32", "uint8")),
    (plans_are_made_once, ()),
    (slices_at_once, ()),
)
"""Each with its arguments."""
