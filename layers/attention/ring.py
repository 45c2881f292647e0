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
from linop.backends.autograd.functions import apply
from linop.backends.autograd.recompute import opened, run
from linop.errors import LinopError, name_layer
from linop.layers.attention.blocks import (
    Scores,
    State,
    attended,
    combine,
    gradients,
    nothing,
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
        if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
            return self.plain((q, k, v, mask, seed))
        if not torch.is_grad_enabled():
            return run(self, [q, k, v, mask, seed])[0].to(q.dtype)
        number = 0 if self.move is None else opened(bridge_of(self.move, self.backend))
        y: Tensor = _Around.apply(self, number, self.anchor, q, k, v, mask, seed)
        return y

    # Local terms

    def _parts(self, step: int) -> list[Part]:
        owner = (self.index - step) % self.steps
        return parts(self.queries[self.index], self.keys[owner], self.causal)

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

    def _add(self, state: State, q: Tensor, kv: Tensor, step: int, given: Given) -> State:
        """A state, to which the terms of a block of keys and values are added."""
        for part in self._parts(step):
            k, v = kv[:, :, part.columns].split(self.features, -1)
            terms = attended(q[:, :, part.rows], k, v, self._scores(part, step, given))
            before, after = part.rows.start, q.shape[2] - part.rows.stop
            if before or after:
                ends = 0, 0, before, after
                least = torch.finfo(terms.top.dtype).min
                pads = (least, 0.0, 0.0)
                terms = State(
                    *(
                        torch.nn.functional.pad(x, ends, value=z)
                        for x, z in zip(terms, pads, strict=True)
                    )
                )
            state = combine(state, terms)
        return state

    def _packed(self, k: Tensor, v: Tensor) -> Tensor:
        """Keys and values in one tensor, as long as the longest block."""
        kv = torch.cat([k, v], -1)
        return torch.nn.functional.pad(kv, (0, 0, 0, max(map(size, self.keys)) - kv.shape[2]))

    # Around the ring

    def run(self, tensors: Sequence[Any]) -> tuple[Tensor, ...]:
        """Attention, the logarithms of the sums of exponentials, and the last block of keys and
        values. Nothing is recorded for autograd. Collective."""
        q, k, v, mask, seed = (None if x is None else x.detach() for x in tensors)
        bridge = None if self.move is None else bridge_of(self.move, self.backend)
        with torch.no_grad():
            state, kv = nothing(q, self.features[1]), self._packed(k, v)
            for step in range(self.steps):
                last = step == self.steps - 1
                if bridge is not None and not last:
                    bridge.start([self._sent(kv)])
                state = self._add(state, q, kv, step, (q, k, v, mask, seed))
                if bridge is not None and not last:
                    kv = self._received(bridge.finish(), kv)
            return (*result(state), kv)

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
        own, kv = self._packed(k, v), last
        of_q = torch.zeros_like(q, dtype=out.dtype)
        for step in reversed(range(self.steps)):
            if values is not None and step > 1:
                values.start([self._sent(kv)])
            rows = out, logs, gradient
            of_kv = self._of_block(q, kv if step else own, step, given, rows, of_q)
            if collected is not None and step < self.steps - 1:
                of_kv += self._received(collected.finish(), of_kv)
            if collected is not None and step:
                collected.start([self._sent(of_kv)])
            if values is not None and step > 1:
                kv = self._received(values.finish(), kv)
        of_k, of_v = of_kv[:, :, : k.shape[2]].split(self.features, -1)
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)

    def _of_block(
        self,
        q: Tensor,
        kv: Tensor,
        step: int,
        given: Given,
        row: tuple[Tensor, Tensor, Tensor],
        of_q: Tensor,
    ) -> Tensor:
        """Gradients of a block of keys and values; those of queries are added to `of_q`."""
        of_kv = torch.zeros_like(kv, dtype=of_q.dtype)
        for part in self._parts(step):
            rows, columns = part.rows, part.columns
            k, v = kv[:, :, columns].split(self.features, -1)
            mine = tuple(x[:, :, rows] for x in row)
            scores = self._scores(part, step, given)
            each = gradients(q[:, :, rows], k, v, scores, mine)  # type: ignore[arg-type]
            of_q[:, :, rows] += each[0]
            of_kv[:, :, columns, : self.features[0]] += each[1]
            of_kv[:, :, columns, self.features[0] :] += each[2]
        return of_kv

    def plain(self, given: Given) -> Tensor:
        """The same by torch's functions and `apply`, all of whose derivatives follow; it keeps
        every block's scores. Collective."""
        q, k, v = given[:3]
        state, kv = nothing(q, self.features[1]), self._packed(k, v)
        with torch.enable_grad():  # and so not by torch's flash attention
            for step in range(self.steps):
                state = self._add(state, q, kv, step, given)
                if self.move is not None and step < self.steps - 1:
                    moved = apply(self.move, self._sent(kv), self.backend, self.where)
                    kv = self._received((moved,), kv)
            return result(state)[0].to(q.dtype)

    def _sent(self, kv: Tensor) -> Tensor:
        return kv.reshape(self._shape(kv))

    def _received(self, tensors: Sequence[Tensor], kv: Tensor) -> Tensor:
        return tensors[0].view(kv.shape)

    def _shape(self, kv: Tensor) -> Sequence[int]:
        assert self.move is not None
        return self.move.domain[self._name].shape

    @property
    def _name(self) -> str:
        assert self.move is not None
        (name,) = [r.name for r in self.move.domain.regions if self.backend.worker in r.workers]
        return name


class _Around(torch.autograd.Function):
    """Attention around a ring in torch's graph: ``apply(ring, number, anchor, *given)``."""

    @staticmethod
    def forward(ctx: Any, ring: Ring, number: int, anchor: Tensor, *given: Any) -> Tensor:
        del anchor
        out, logs, last = run(ring, given)
        ctx.ring, ctx.number = ring, number
        ctx.save_for_backward(*given, last, out, logs)
        return out.to(given[0].dtype)

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
                found = ring.gradients(tuple(given), last, out, logs, gradient)  # type: ignore[arg-type]
        except LinopError as error:
            name_layer(error, ring.where and f"{ring.where}, backward")
            raise
        return None, None, None, *found, None, None


def _differentiable(ring: Ring, given: Sequence[Any], gradient: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k and v that have gradients."""
    leaves = [x if x.requires_grad else x.detach().requires_grad_() for x in given[:3]]
    y = ring.plain((*leaves, *given[3:]))  # type: ignore[arg-type]
    return torch.autograd.grad(y, leaves, gradient, create_graph=True)
