"""Clipping by the norm of the gradients of all stages: an all-reduce of each parameter's norm, and
of that of all parameters of a stage on several workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from linop.backends import Backend
from linop.layers.agreement.input_agreement import InputAgreement
from linop.layers.parameters.clipping import agreed_norms, total_norm
from linop.layers.parameters.groups import groups_of
from linop.operators.collectives import all_reduce
from linop.spaces.decomposition import COPIES
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace
from linop.strategies.pipelines.construction import Plan
from linop.strategies.pipelines.stages.stage import Stage


class GradientNorm:
    """The norm of all gradients, in torch's order of operations: bit for bit that of
    `torch.nn.utils.clip_grad_norm_` for the whole model. Constructed by all workers.

    Args:
        parts: the backend of each stage's workers.
        copies: identifiers of parameters that do not count, for tied ones do.
    """

    def __init__(
        self,
        plan: Plan,
        backend: Backend,
        agreement: InputAgreement,
        stages: Mapping[int, Stage],
        parts: Mapping[int, Backend],
        copies: Collection[int] = (),
    ) -> None:
        self._stages = stages
        self._first = {s: not part.worker for s, part in parts.items()}
        cut = {s: groups_of(stage.parameters, parts[s]) for s, stage in stages.items()}
        self._groups = {s: groups for s, groups in cut.items() if groups.workers != 1}
        self._counted: dict[int, list[Tensor]] = {}
        known = set(copies)
        for s, stage in stages.items():
            self._counted[s] = [p for p in stage.parameters if id(p) not in known]
            known |= {id(p) for p in stage.parameters}  # stages may share some
        mine = {s: 1 if s in self._groups else len(own) for s, own in self._counted.items()}
        dtypes = {p.dtype for stage in stages.values() for p in stage.parameters}
        said = agreement.gather_objects(
            (mine, sorted(dtypes, key=str)), "clip gradients of linop.strategies.Pipeline"
        )
        counts: dict[int, int] = {}
        for one, _ in said:
            counts |= one
        self._dtype = reduce(torch.promote_types, [d for _, kinds in said for d in kinds])
        self._start = {s: sum(counts[k] for k in range(s)) for s in counts}
        holders = [worker for grid in plan.grids for worker in grid.workers]
        self._size = sum(counts.values())
        X = TensorSpace((2 * self._size,), Partition((len(holders),), holders), axes=[COPIES])
        self._sum = backend.compile(all_reduce(X))
        if plan.worker in holders:
            self._sum(np.zeros(2 * self._size))

    def fail(self, error: BaseException) -> None:
        """End the other workers' waits for this one, whose step failed."""
        self._sum.fail(error)

    def clip(self, most: float) -> Tensor:
        """Scale this worker's gradients, if the norm of all is larger; return that. Collective."""
        norms, there = terms = np.zeros((2, self._size))
        for s, counted in self._counted.items():
            for k, norm in enumerate(self._norms(s, counted), self._start[s]):
                if norm is not None:
                    norms[k], there[k] = norm, 1
        every = dict.fromkeys(p for stage in self._stages.values() for p in stage.parameters)
        grads = [p for p in every if p.grad is not None]
        norms, there = self._sum(terms.reshape(-1)).reshape(2, -1)
        each = torch.from_numpy(norms[there > 0])
        total: Tensor = torch.linalg.vector_norm(each.to(self._dtype))
        torch.nn.utils.clip_grads_with_norm_(grads, most, total)
        return total

    def _norms(self, s: int, counted: Sequence[Tensor]) -> list[float | None]:
        """Norms of a stage's gradients; None for those that are not there, or that another worker
        counts. Collective over the stage's workers."""
        if s not in self._groups:
            return [
                None if p.grad is None else torch.linalg.vector_norm(p.grad).item() for p in counted
            ]
        own = {id(p) for p in counted}
        named = {
            name: p
            for name, p in self._stages[s].module.named_parameters()
            if id(p) in own and p.grad is not None
        }
        norms = agreed_norms(self._groups[s], named, 2.0)
        return [total_norm(norms, 2.0).item() if norms and self._first[s] else None]
