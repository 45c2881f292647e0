"""Ring attention: queries stay where they are, and keys and values go around the ring of workers
that the sequence is cut over (Liu, Zaharia & Abbeel 2023, "Ring attention with blockwise
transformers").

The step around the ring is `linop.shift`, a permutation of blocks, whose adjoint is its inverse:
backward brings the blocks of keys and values back in the reverse order, and behind each the
gradient that it has collected, by the same derived adjoint. So a worker keeps its own block, the
last that it was sent, and its result, whatever the number of workers; and no derivative is written
here: those of local terms are torch's (`linop.layers.attention.blocks`). Double backward and
forward mode run `Ring.plain`, which is torch's functions and `linop.autograd.apply` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from linop.backends import Backend
from linop.backends.autograd.bridge import bridge_of
from linop.backends.autograd.functions import add_dependency, apply
from linop.backends.autograd.real_calls import is_tracing, really
from linop.backends.autograd.recompute import opened, run
from linop.caching import cached_property
from linop.errors import LinopError, name_layer
from linop.layers.attention.blocks import (
    Scores,
    State,
    attended,
    combine,
    gradients,
    nothing,
    padded,
    result,
    wide,
)
from linop.layers.attention.cuts import Kind, Part, Segments, parts, positions, size
from linop.operators.operator import LinearOperator

Given = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""Queries, keys, values, the mask's rows of these queries, and the seed of dropout."""


def leaf() -> Tensor:
    """An input of every application, so that all workers' results require gradients."""
    with torch.inference_mode(False):
        return torch.empty(0, requires_grad=True)


@dataclass(frozen=True, eq=False)
class Ring:
    """Attention of this worker's queries to the keys and values of all workers of a ring.

    Attributes:
        backend: whose plans move keys and values.
        where: path of the layer, for errors.
        move, back: the step around the ring, of keys and values, and of their gradients; None
            where there is one worker.
        index: this worker's position in the ring.
        queries, keys: positions of each worker's block.
        causal: True if queries take no later keys.
        scale: factor of the products.
        spread: function from keys or values to those of every head.
        features: of a key and of a value.
        kept: function of a seed, rows and columns (positions), and a dtype to dropout's factors;
            None: there is no dropout.
    """

    backend: Backend
    where: str
    move: LinearOperator | None
    back: LinearOperator | None
    index: int
    queries: Sequence[Segments]
    keys: Sequence[Segments]
    causal: bool
    scale: float
    spread: Callable[[Tensor], Tensor]
    features: tuple[int, int]
    kept: Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor] | None = None
    anchor: Tensor = field(default_factory=leaf)

    @property
    def plan(self) -> str:
        """Its description, for errors of checkpoints."""
        return f"attention around a ring of {self.steps}"

    @property
    def steps(self) -> int:
        """The number of workers."""
        return len(self.keys)

    def __call__(self, *given: Tensor | None) -> Tensor:
        """Attention of this worker's queries, of shape (batch, heads, rows, features). Collective
        among the workers of the ring.

        Args:
            given: as `Given`; keys and values of shape (batch, groups, columns, features), the mask
                of one that broadcasts with (batch, heads, rows, all columns).
        """
        q, k, v, mask, seed = given
        assert q is not None and k is not None and v is not None
        if is_tracing():
            return self._traced((q, k, v, mask, seed))
        if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
            return self.plain((q, k, v, mask, seed))
        if not torch.is_grad_enabled():
            out: Tensor = run(self, [q, k, v, mask, seed])[0]
            return out.to(q.dtype)
        number = 0 if self.move is None else opened(bridge_of(self.move, self.backend))
        y: Tensor = _around(self, number, self.anchor, q, k, v, mask, seed)
        return y

    def _traced(self, given: Given) -> Tensor:
        """A node of torch's graphs, whose backward is another one."""
        q, k, v, mask, seed = given
        kind = wide(q.dtype)
        rows = tuple(map(int, q.shape[:3]))
        around = self.move is not None
        kept = (*map(int, k.shape[:2]), self._longest, sum(self.features)) if around else (0,)
        forms = [((*rows, self.features[1]), kind), ((*rows, 1), kind), (kept, k.dtype)]
        of_inputs = [(tuple(map(int, x.shape)), x.dtype) for x in (q, k, v)]
        forward, backward = self._nodes[mask is not None, seed is not None]
        there = [x for x in given if x is not None]
        out = really(self, forward, forms, *there, derivative=(backward, of_inputs))[0]
        return out.to(q.dtype)

    @cached_property
    def _nodes(self) -> dict[tuple[bool, bool], tuple[Any, Any]]:
        """Functions of the present tensors of `Given`, and of these, results and their gradients;
        by the presence of the mask and the seed."""

        def both(masked: bool, seeded: bool) -> tuple[Any, Any]:
            def filled(given: Sequence[Tensor]) -> Given:
                rest = iter(given[3:])
                mask, seed = (next(rest) if there else None for there in (masked, seeded))
                return (*given[:3], mask, seed)  # type: ignore[return-value]

            def forward(*given: Tensor) -> Sequence[Tensor]:
                out, logs, last = self.run(filled(given))
                return out, logs, last if self.move is not None else last.new_empty(0)

            def backward(*tensors: Tensor) -> Sequence[Tensor]:
                given, (out, logs, last), gradient = tensors[:-6], tensors[-6:-3], tensors[-3]
                with torch.no_grad():
                    own = filled(given)
                    return self.gradients(own, last, out, logs, gradient.to(own[0].dtype))

            return forward, backward

        return {(m, s): both(m, s) for m in (False, True) for s in (False, True)}

    # Local terms

    @cached_property
    def _every_part(self) -> list[list[Part]]:
        """By step."""
        owners = ((self.index - step) % self.steps for step in range(self.steps))
        mine = self.queries[self.index]
        return [parts(mine, self.keys[owner], self.causal) for owner in owners]

    def _parts(self, step: int) -> list[Part]:
        return self._every_part[step]

    def _scores(self, part: Part, step: int, given: Given) -> Scores:
        mask, seed = given[3:]
        owner = self.keys[(self.index - step) % self.steps]
        partial, of_mask, kept = part.kind is Kind.PARTIAL, None, None
        if partial or mask is not None or (seed is not None and self.kept is not None):
            device = given[0].device
            of_rows = torch.tensor(positions(self.queries[self.index]), device=device)[part.rows]
            of_columns = torch.tensor(positions(owner), device=device)[part.columns]
        if partial or mask is not None:

            def of_mask(rows: slice) -> Tensor:
                allowed = of_columns <= of_rows[rows].unsqueeze(1) if partial else None
                if mask is None:
                    assert allowed is not None
                    return allowed
                mine = mask[..., part.rows, :][..., rows, :].index_select(-1, of_columns)
                if allowed is None:
                    return mine
                if mine.dtype is torch.bool:
                    return mine & allowed
                return mine.masked_fill(~allowed, -torch.inf)

        if seed is not None and self.kept is not None:
            make, draw = self.kept, seed

            def kept(rows: slice) -> Tensor:
                return make(draw, of_rows[rows], of_columns, wide(given[0].dtype))

        return Scores(self.scale, self.spread, part.kind is Kind.DIAGONAL, of_mask, kept)

    def _add(
        self, state: State | None, q: Tensor, kv: Sequence[Tensor], step: int, given: Given
    ) -> State | None:
        """A state, to which the terms of a block of keys and values are added; None: of no terms.
        It is changed in place, except in a graph of torch's."""
        for part in self._parts(step):
            rows = part.rows
            k, v = (x[:, :, part.columns] for x in kv)
            terms = attended(q[:, :, rows], k, v, self._scores(part, step, given))
            if rows == slice(0, q.shape[2]):
                state = terms if state is None else combine(state, terms)
                continue
            state = state or nothing(q, self.features[1])
            if torch.is_grad_enabled():
                state = combine(state, padded(terms, rows.start, q.shape[2] - rows.stop))
                continue
            both = combine(State(*(x[:, :, rows] for x in state)), terms)
            for x, y in zip(state, both, strict=True):
                x[:, :, rows] = y
        return state

    def _result(self, state: State | None, q: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        empty = mask is not None or state is None  # otherwise each row has a column
        return result(state or nothing(q, self.features[1]), empty)

    def _packed(self, k: Tensor, v: Tensor) -> Tensor:
        """Keys and values in one tensor, as long as the longest block."""
        return self._extended(torch.cat([k, v], -1))

    def _extended(self, kv: Tensor) -> Tensor:
        more = self._longest - kv.shape[2]
        return torch.nn.functional.pad(kv, (0, 0, 0, more)) if more else kv

    @cached_property
    def _longest(self) -> int:
        return max(map(size, self.keys))

    # Around the ring

    def run(self, tensors: Sequence[Any]) -> tuple[Tensor, ...]:
        """Attention, the logarithms of the sums of exponentials, and the last block of keys and
        values. Nothing is recorded for autograd. Collective."""
        q, k, v = (x.detach() for x in tensors[:3])
        mask, seed = tensors[3:]
        both: Sequence[Tensor]
        state: State | None
        bridge = None if self.move is None else bridge_of(self.move, self.backend)
        with torch.no_grad():
            state, kv = None, k if bridge is None else self._packed(k, v)
            for step in range(self.steps):
                last = step == self.steps - 1
                if bridge is not None and not last:
                    bridge.start([self._sent(kv)])
                both = self._halves(kv) if step else (k, v)
                state = self._add(state, q, both, step, (q, k, v, mask, seed))
                if bridge is not None and not last:
                    kv = self._received(bridge.finish(), kv)
            return (*self._result(state, q, mask), kv)

    def gradients(
        self, given: Given, last: Tensor, out: Tensor, logs: Tensor, gradient: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v. Collective: keys and values come back, by the adjoint of the
        step, with their gradients behind them.

        Args:
            given: the arguments.
            last, out, logs: results of `run`.
            gradient: of attention.
        """
        q, k, v = given[:3]
        values = collected = None
        if self.move is not None and self.back is not None:
            values = bridge_of(self.move, self.backend).adjoint
            collected = bridge_of(self.back, self.backend).adjoint
        kv, of_kv, of_q = last, k, None
        for step in reversed(range(self.steps)):
            if values is not None and step > 1:
                values.start([self._sent(kv)])
            both = self._halves(kv) if step else (k, v)
            of_q, of_kv = self._of_block(q, both, step, given, (out, logs, gradient), of_q)
            if collected is not None and step < self.steps - 1:
                of_kv += self._received(collected.finish(), of_kv)
            if collected is not None and step:
                collected.start([self._sent(of_kv)])
            if values is not None and step > 1:
                kv = self._received(values.finish(), kv)
        of_k, of_v = self._halves(of_kv[:, :, : k.shape[2]])
        assert of_q is not None
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)

    def _of_block(
        self,
        q: Tensor,
        kv: Sequence[Tensor],
        step: int,
        given: Given,
        row: Sequence[Tensor],
        of_q: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of queries, added to `of_q`, and those of a block of keys and values, in one
        tensor."""
        found, count = self._parts(step), kv[0].shape[2]
        total = None
        for part in found:
            rows, columns = part.rows, part.columns
            k, v = (x[:, :, columns] for x in kv)
            out, logs, gradient = (x[:, :, rows] for x in row)
            scores = self._scores(part, step, given)
            each = gradients(q[:, :, rows], k, v, scores, (out, logs, gradient))
            if of_q is None and rows == slice(0, q.shape[2]):
                of_q = each[0]
            else:
                of_q = torch.zeros_like(q, dtype=out.dtype) if of_q is None else of_q
                of_q[:, :, rows] += each[0]
            both = torch.cat(each[1:], -1)
            if total is None and columns == slice(0, count):
                total = self._extended(both)
            else:
                total = self._zeros(kv[0], out.dtype) if total is None else total
                total[:, :, columns] += both
        of_q = torch.zeros_like(q, dtype=row[0].dtype) if of_q is None else of_q
        return of_q, self._zeros(kv[0], row[0].dtype) if total is None else total

    def _zeros(self, k: Tensor, dtype: torch.dtype) -> Tensor:
        shape = (*k.shape[:2], self._longest, sum(self.features))
        return torch.zeros(shape, dtype=dtype, device=k.device)

    def plain(self, given: Given) -> Tensor:
        """The same by torch's functions and `apply`, all of whose derivatives follow; it keeps
        every block's scores. Collective."""
        q, k, v = given[:3]
        state, kv = None, self._packed(k, v)
        with torch.enable_grad():  # and so not by torch's flash attention
            for step in range(self.steps):
                state = self._add(state, q, self._halves(kv), step, given)
                if self.move is not None and step < self.steps - 1:
                    moved = apply(self.move, self._sent(kv), self.backend, self.where)
                    kv = self._received((moved,), kv)
            # Also without rows or columns, a worker has its place in the ring of backward.
            return add_dependency(self._result(state, q, given[3])[0].to(q.dtype), q, kv)

    def _halves(self, kv: Tensor) -> Sequence[Tensor]:
        halves: Sequence[Tensor] = kv.split_with_sizes(self.features, -1)
        return halves

    def _sent(self, kv: Tensor) -> Tensor:
        return kv.reshape(self._shape)

    def _received(self, tensors: Sequence[Tensor], kv: Tensor) -> Tensor:
        return tensors[0].view(kv.shape)

    @cached_property
    def _shape(self) -> Sequence[int]:
        """Of this worker's block in messages."""
        assert self.move is not None
        regions = self.move.domain.regions
        (shape,) = [r.shape for r in regions if self.backend.worker in r.workers]
        return shape


class _Around(torch.autograd.Function):
    """Attention around a ring in torch's graph: ``apply(ring, number, anchor, *given)``."""

    @staticmethod
    def forward(ctx: Any, ring: Ring, number: int, anchor: Tensor, *given: Any) -> Tensor:
        del anchor
        out, logs, last = run(ring, given)
        ctx.ring, ctx.number = ring, number
        ctx.save_for_backward(*given, last, out, logs)
        y: Tensor = out.to(given[0].dtype)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        ring: Ring = ctx.ring
        *given, last, out, logs = ctx.saved_tensors
        try:
            if ring.move is not None:
                bridge_of(ring.move, ring.backend).adjoint.closing(ctx.number)
            if torch.is_grad_enabled():
                found = _differentiable(ring, given, gradient)
            else:
                found = ring.gradients(tuple(given), last, out, logs, gradient)
        except LinopError as error:
            name_layer(error, ring.where and f"{ring.where}, backward")
            raise
        return None, None, None, *found, None, None


_around = super(torch.autograd.Function, _Around).apply
"""``_Around.apply`` without torch's preparation for transforms, which `Ring.plain` serves."""


def _differentiable(ring: Ring, given: Sequence[Any], gradient: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k and v that have gradients."""
    leaves = [x if x.requires_grad else x.detach().requires_grad_() for x in given[:3]]
    y = ring.plain((*leaves, *given[3:]))
    found = torch.autograd.grad(y, leaves, gradient, create_graph=True)
    # Those of a worker whose queries take nothing of the others' keys do not depend on these; but
    # the others' do on its own, and so the way back is one of all.
    return tuple(add_dependency(x, y) for x in found)
