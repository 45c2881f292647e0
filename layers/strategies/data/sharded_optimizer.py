"""Optimizers of which each worker has a part, of parameters that all have (ZeRO stage 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from linop.backends import use
from linop.errors import ArgumentError, expect
from linop.layers.state.optimizer_state import gather_optimizer_state, scatter_optimizer_state
from linop.layers.state.state_tensors import keyed_parameters
from linop.strategies.data.data_parallel import DataParallel
from linop.strategies.data.reducer import reducer_of
from linop.strategies.data.replicas import SERVER, agree, described, summed_already
from linop.strategies.data.sharded.members import rows
from linop.strategies.data.sharded.units import units_of
from linop.strategies.mesh import Axis


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of a `DataParallel` module, whose state is divided over the workers. Collective.

    Gradients are the same on all workers after backward. A step updates this worker's block of the
    rows of every parameter, by torch's optimizer of these alone, and gathers the others': G after
    the step. It is right for optimizers that treat elements alone, such as SGD and Adam.

    Args:
        module: parallel over the axis, or its ``module``.
        axis: such as ``mesh["dp"]``.
        optimizer: makes one of torch of blocks of parameters, such as ``partial(torch.optim.AdamW,
            lr=1e-3)``.

    Attributes:
        optimizer: this worker's; its ``state_dict`` is this worker's part.
        param_groups, state, defaults: those of `optimizer`: this worker's blocks, and the options,
            which any learning-rate scheduler of torch may change, the same on all workers.
        parts: a module of this worker's blocks of the parameters, by their names.
        whole: one group of the whole parameters, whose gradients `linop.layers.GradScaler`
            unscales.

    `linop.layers.save` and `load` take it for an optimizer of the module.

    Raises:
        ArgumentError: the module has no parameters with gradients, its parameters are sharded, or a
            server has them. BackendError: modules differ between workers. On every worker.

    Example:
        Every worker has the parameters, and updates one row of two; the weight was zero.

        >>> x, sgd = torch.arange(8.0).view(4, 2), lambda parts: torch.optim.SGD(parts, lr=1.0)
        >>> def program(backend):
        ...     dp = strategies.Mesh(dp=2)["dp"]
        ...     net = strategies.DataParallel(torch.nn.Linear(2, 2, bias=False), dp)
        ...     torch.nn.init.zeros_(net.module.weight)
        ...     optimizer = strategies.ShardedOptimizer(net, dp, sgd)
        ...     net(x.chunk(2)[backend.worker]).sum().backward()
        ...     optimizer.step()
        ...     return tuple(optimizer.parts.weight.shape), net.module.weight.tolist()
        >>> linop.launch(program, workers=2)[0]
        ((1, 2), [[-12.0, -16.0], [-12.0, -16.0]])
    """

    def __init__(self, module: Any, axis: Axis, optimizer: Callable[[list[Tensor]], Any]) -> None:
        self.module = module.module if isinstance(module, DataParallel) else module

        def checked() -> tuple[dict[str, Tensor], Any]:
            expect("module", self.module, torch.nn.Module)
            if not callable(optimizer):
                raise ArgumentError(
                    f"optimizer: a function of parameters expected, such as functools.partial("
                    f"torch.optim.AdamW, lr=1e-3), given {optimizer!r}"
                )
            if apart := summed_already(self.module, axis):
                raise ArgumentError(
                    f"parameters {sorted(apart)[:4]} are cut over the axis, and have no copies to "
                    f"shard: use fully_shard, or any optimizer of torch"
                )
            found = {name: p for name, p in self._named().items() if p.requires_grad}
            known = {getattr(p, "_linop_strategy", "") for p in found.values()}
            if not found or known & {"shard", SERVER}:
                raise ArgumentError(
                    "parameters expected whole, with equal gradients on every worker; sharded "
                    "ones, and those of a server, take any optimizer of torch"
                )
            return found, described(found)

        backend = expect("ShardedOptimizer: axis", axis, Axis).backend
        found = agree(backend, "ShardedOptimizer", checked)
        self._axis = axis
        self._parts: list[Any] = []
        self._reducers: set[Any] = set()
        self.parts = torch.nn.Module()
        self.optimizer = optimizer(self._shards_of(found))
        self.whole = SimpleNamespace(param_groups=[{"params": [*found.values()]}])

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # an attribute in torch
        """Options of each group, with this worker's blocks of its parameters."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # an attribute in torch
        """State that the optimizer keeps for this worker's blocks."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # an attribute in torch
        """Options of groups that do not say their own."""
        options: dict[str, Any] = self.optimizer.defaults
        return options

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Update parameters of the module that had no gradients before, too. Collective.

        Args:
            param_group: "params": whole parameters of the module, thawed on all workers; and
                options, as in torch.

        Raises:
            ArgumentError: one is not the module's, has no gradient, or is updated already.
                BackendError: workers give different ones. On every worker.
        """

        def checked() -> tuple[dict[str, Tensor], Any]:
            given = param_group["params"]
            given = [given] if isinstance(given, Tensor) else [*given]
            names = {p: name for name, p in self._named().items()}
            for p in given:
                name = names.get(p)
                if name is None or not p.requires_grad or name in self.parts._parameters:
                    raise ArgumentError(
                        f"ShardedOptimizer.add_param_group: {name or 'a tensor'!r}; parameters of "
                        f"its module expected, whole, with requires_grad and not in a group yet"
                    )
            found = {names[p]: p for p in given}
            return found, described(found)

        found = agree(self._axis.backend, "ShardedOptimizer", checked)
        shards = self._shards_of(found)
        self.optimizer.add_param_group({**param_group, "params": shards})
        self.whole.param_groups[0]["params"] += found.values()

    def _named(self) -> dict[str, Tensor]:
        """Parameters of the module by their keys in the state of the single-process model, each
        once: without the prefixes of wrappers inside of it, as of experts."""
        keys: dict[Tensor, str] = {}
        for key, p in keyed_parameters(self.module).items():
            keys.setdefault(p, key)
        return {key: p for p, key in keys.items()}

    def _shards_of(self, found: Mapping[str, Tensor]) -> list[Any]:
        """This worker's blocks of parameters, which are updated from now on. Collective."""
        self._reducers |= {*filter(None, map(reducer_of, found.values()))}
        shards: dict[str, Any] = {}
        for unit, parameters in units_of("ShardedOptimizer", found, {}, self._axis):
            # A slice of the first dimension alone; of a scalar, which is not cut, all.
            cuts = [member.space.slices(self._axis.index)[:1] or ... for member in unit.members]
            self._parts.append((unit, parameters, cuts))
            pairs = zip(unit.members, parameters, strict=True)
            unit.have_shards([torch.nn.Parameter(rows(m, p, self._axis)) for m, p in pairs])
            shards |= unit._parameters
        self.parts._parameters.update((name, shards[name]) for name in found)
        return [shards[name] for name in found]

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """As in torch; the hook gets this worker's optimizer."""
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        """As in torch; the hook gets this worker's optimizer."""
        return self.optimizer.register_step_post_hook(hook)

    def __reduce__(self) -> Any:
        raise ArgumentError(
            "ShardedOptimizer: it cannot be copied or pickled; make another one of a copy of the "
            "module, and give it the state: other.load_state_dict(optimizer.state_dict())"
        )

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self.optimizer!r})"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters. Collective.

        Args:
            closure: computes gradients first, on all workers; its result is returned.

        Raises:
            ArgumentError: gradients have not been summed over the workers.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(reducer.unsummed for reducer in self._reducers):
            raise ArgumentError(
                "ShardedOptimizer: gradients of no_sync() have not been summed over the workers; "
                "call reduce_gradients() of the DataParallel module before step()"
            )
        with torch.no_grad():
            for unit, parameters, rows_here in self._parts:
                for shard, p, here in zip(unit.shards, parameters, rows_here, strict=True):
                    shard.grad = None if p.grad is None else p.grad[here]
        self.optimizer.step()
        with torch.no_grad():
            for unit, parameters, _ in self._parts:
                torch._foreach_copy_(parameters, unit.values())
        return loss

    def state_dict(  # type: ignore[override]  # None on other workers
        self, worker: int | None = None
    ) -> dict[str, Any] | None:
        """The state of the optimizer of one process, with parameters in the module's order. It is
        None on workers that do not get it. Collective.

        Args:
            worker: which one gets it; by default all.
        """
        with use(self._axis.backend):
            return gather_optimizer_state(self.module, self, worker)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load the state of the optimizer of one process: each worker takes its blocks. Collective.

        Args:
            state: on all workers, or on some, with None on others.

        Raises:
            ArgumentError, ShapeError: it does not fit. BackendError: no worker has it. All on every
                worker.
        """
        with use(self._axis.backend):
            scatter_optimizer_state(self.module, self, state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients; or set them to zero, as in torch."""
        self.module.zero_grad(set_to_none)
