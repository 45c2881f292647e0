"""Expert parallelism: each worker of an axis has some of the experts, and some of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor
from torch.nn import Module

from linop.backends import use
from linop.backends.autograd.functions import apply
from linop.errors import ArgumentError, expect
from linop.layers.experts.losses import RouterLosses, router_losses
from linop.layers.experts.mixture import check_capacity
from linop.operators.collectives import all_reduce
from linop.operators.operator import LinearOperator
from linop.spaces.decomposition import COPIES
from linop.spaces.tensor import TensorSpace
from linop.strategies import sequential
from linop.strategies.data.data_parallel import DataParallel
from linop.strategies.data.replicas import agree
from linop.strategies.experts.parallel_experts import (
    ParallelExperts,
    experts_of,
    multiplies_by_gates,
    refuse,
)
from linop.strategies.mesh import Axis


class ExpertParallel:
    """The workers of an axis, each with its rows of the batch and some experts of every layer.

    Gradients of experts are sums over the tokens of all workers of the axis, by the adjoint of the
    way there; those of other parameters are of a worker's own rows, and are to be summed over the
    axis: ``DataParallel(net, mesh["ep"])`` does that, and leaves experts alone.

    Args:
        axis: of a `Mesh`, such as ``mesh["ep"]``.
        data: an axis of copies of the experts, such as ``mesh["dp"]``: their gradients are summed
            over it, and the net is wrapped by ``DataParallel(net, mesh["dp", "ep"])``.
        capacity_factor: an expert takes ``ceil(capacity_factor · k · tokens / experts)`` of the
            tokens of the axis at most, as by `linop.Routing`; others pass by it. None: nothing is
            dropped, as in Mixtral.

    Raises:
        ArgumentError: the factor is no number from 0.

    Example:
        Two experts, which multiply by 1 and by 10. Each worker has one of them, and one token,
        which goes to the other worker's:

        >>> class Experts(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.scale = torch.nn.Parameter(torch.tensor([[[1.0]], [[10.0]]]))
        ...
        ...     def forward(self, x, indices, gates):
        ...         return x * (self.scale[indices, 0, 0] * gates).sum(-1, keepdim=True)
        >>> def program(backend):
        ...     ep = strategies.ExpertParallel(strategies.Mesh(ep=2)["ep"])
        ...     net = ep.parallelize(torch.nn.Sequential(Experts()))
        ...     token, gate = torch.full((1, 3), 1.0 + backend.worker), torch.ones(1, 1)
        ...     other = torch.tensor([[1 - backend.worker]])  # the expert of the other worker
        ...     return net[0](token, other, gate).tolist()
        >>> linop.launch(program, workers=2)
        [[[10.0, 10.0, 10.0]], [[2.0, 2.0, 2.0]]]
    """

    def __init__(
        self, axis: Axis, data: Axis | None = None, capacity_factor: float | None = None
    ) -> None:
        self.axis = expect("ExpertParallel: axis", axis, Axis)
        self.data = None if data is None else expect("ExpertParallel: data", data, Axis)
        check_capacity("ExpertParallel", capacity_factor)
        self.capacity_factor = capacity_factor
        self._sums: dict[int, LinearOperator] = {}

    def parallelize(self, net: Module, names: str | Sequence[str] | None = None) -> Module:
        """The net, whose experts are those of this worker from now on. Collective.

        Args:
            net: the same on all workers, with modules whose parameters are stacked, of shape
                (experts, …), some of them matrices of each expert, and that are called with hidden
                states, and indices and gates of each token: those of Mixtral, Qwen3-MoE, OLMoE and
                others in transformers.
            names: of these modules, or patterns, such as ``"model.layers.*.mlp.experts"``; by
                default all such modules.

        Raises:
            ArgumentError: there is none, or a module of these names is another one, or one whose
                results are not multiplied by the gates. BackendError: nets differ between workers.
                On every worker.
        """
        found = agree(self.axis.backend, "ExpertParallel", lambda: self._found(net, names))
        made: dict[Module, Module] = {}
        for name in found:
            whole = net.get_submodule(name)
            if whole not in made:
                made[whole] = self._parallel(whole)
            parent, _, last = name.rpartition(".")
            setattr(net.get_submodule(parent), last, made[whole])
        return net

    def _parallel(self, whole: Module) -> Module:
        before = sequential.outline(whole)
        one: Module = ParallelExperts(self.axis, whole, self.capacity_factor).train(whole.training)
        if self.data is not None and self.data.size > 1 and self.axis.size > 1:
            # The net's own DataParallel warns of means, if anything does.
            one = DataParallel(one, self.data, reduction="sum")
        sequential.keep(one, before)
        return one

    def _found(
        self, net: Module, names: str | Sequence[str] | None
    ) -> tuple[dict[str, int], tuple[dict[str, str], str]]:
        """Names of modules of experts, with their numbers, and a description."""
        expect("ExpertParallel.parallelize: net", net, Module)
        every = dict(net.named_modules(remove_duplicate=False))
        if names is None:
            some = [name for name, one in every.items() if name and experts_of(one)]
        else:
            patterns = [names] if isinstance(names, str) else [*names]
            some = [n for n in every if n and any(fnmatchcase(n, p) for p in patterns)]
        if not some:
            raise ArgumentError(
                f"no module of {type(net).__name__} "
                + ("is one of stacked experts" if names is None else f"is called {names!r}")
                + "; give names= of modules whose parameters have the shape (experts, …), and "
                "that have no buffers, in a net that is not parallel yet"
            )
        for name in some:
            if not experts_of(every[name]):
                refuse(every[name], name)
            if not multiplies_by_gates(every[name]):
                raise ArgumentError(
                    f"{name!r}: half the gate does not give half the result; experts expected "
                    f"whose results are multiplied by the gates, and not those that weigh their "
                    f"inputs: tokens are sent without gates"
                )
        shapes = {
            name: ", ".join(f"{n} {tuple(p.shape)}" for n, p in every[name].named_parameters())
            for name in some
        }
        found = {name: experts_of(every[name]) for name in some}
        return found, (shapes, f"capacity_factor={self.capacity_factor}")

    def experts(self, net: Module) -> list[Module]:
        """The modules of experts in a net that `parallelize` has made; such as for
        ``fully_shard(experts, mesh["dp"])`` before the net is sharded over all axes."""
        return [one for one in net.modules() if isinstance(one, ParallelExperts)]

    def router_losses(self, logits: Tensor, top_k: int) -> RouterLosses:
        """This worker's terms of the losses of a router, whose sums over the axis are those of all
        tokens. Collective.

        Args:
            logits: of this worker's tokens, of shape (tokens, experts).
            top_k: experts of a token.
        """
        experts = logits.shape[-1]
        if experts not in self._sums:
            P = self.axis.partition
            X = TensorSpace((experts + 1,), P, "int64", [COPIES], "choices")
            self._sums[experts] = all_reduce(X)
        with torch.no_grad():
            chosen = torch.topk(logits, top_k, -1).indices.reshape(-1)
            counts = torch.bincount(chosen, minlength=experts)
            mine = torch.cat([counts, counts.new_tensor([len(logits)])])
            with use(self.axis.backend):
                found = apply(self._sums[experts], mine) if self.axis.size > 1 else mine
        return router_losses(logits, found[:-1], int(found[-1]))

    def __repr__(self) -> str:
        return (
            f"ExpertParallel({self.axis.name} of {self.axis.size}, "
            f"capacity_factor={self.capacity_factor})"
        )
