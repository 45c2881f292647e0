"""`spatial`: a module of torch whose images or volumes are cut over workers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from linop.backends.autograd.real_calls import broken
from linop.errors import ArgumentError, BackendError, PartitionError, ShapeError, expect
from linop.layers.agreement.input_agreement import agreement_of
from linop.layers.parameters.generator import drawn_seed
from linop.spaces.region import naturals
from linop.strategies.data.replicas import agree, check_equal, described
from linop.strategies.mesh import Axis
from linop.strategies.space.cut_tensor import CutTensor
from linop.strategies.space.draws import Draws
from linop.strategies.space.grid import Grid
from linop.strategies.space.layout import even
from linop.strategies.space.saving import Saving
from linop.strategies.space.sums import Sums

_NAME = "spatial"
_NO_GRAPH = (
    "linop: spatial cuts tensors, and its workers agree on a call, outside of graphs: leave "
    "fullgraph=True out, and torch compiles what is before and behind it"
)
_TRANSFORMED: Any = getattr(torch._C, "_are_functorch_transforms_active", bool)
"""True inside of a transform of torch.func; of no argument, `bool` is False."""


def spatial(
    net: torch.nn.Module, axes: Axis, dims: Sequence[int] = (2, 3), *, check: bool = True
) -> Spatial:
    """Cut the images or volumes of any module of torch over workers. Collective.

    The module is called as before, and computes what it did, on tensors of which each worker has a
    block. Its parameters are replicated: each worker has them all, and gets their whole gradients,
    which are sums over the workers; those that `fully_shard` has sharded before, also over these
    workers, stay shards. See `Spatial`.

    Args:
        net: the module, the same on all workers. It is not changed.
        axes: of a mesh, one for each dimension that is cut, such as ``mesh["x", "y"]``.
        dims: the dimensions of the module's inputs that are cut: (2, 3) are those of images,
            (2, 3, 4) of volumes, (0, 2, 3) batch and images.
        check: compare parameters and buffers of the workers now.

    Raises:
        ArgumentError: `net` is no module, `axes` are no axes of a mesh, or `dims` are not as many
            dimensions. BackendError: workers have different modules. On every worker.

    Example:
        A convolution of an image whose rows are on two workers, which exchange those at the seam:

        >>> net, image = torch.nn.Conv2d(1, 1, 3, padding=1), torch.arange(16.0).view(1, 1, 4, 4)
        >>> wanted = net(image)
        >>> def program(backend):
        ...     mine = strategies.spatial(net, strategies.Mesh(x=2)["x"], dims=[2])
        ...     y = mine(image)
        ...     return tuple(y.block.shape), torch.allclose(y.whole(), wanted, atol=1e-5)
        >>> linop.launch(program, workers=2)
        [((1, 1, 2, 4), True), ((1, 1, 2, 4), True)]
    """
    axis = expect("spatial: axes", axes, Axis)
    extents = axis.extents or (axis.size,)

    def checked() -> tuple[tuple[int, ...], Any]:
        expect("spatial: net", net, torch.nn.Module)
        given = naturals(dims, "spatial: dims", ArgumentError)
        if len(given) != len(extents) or len({*given}) != len(given):
            raise ArgumentError(
                f"spatial: dims={dims!r} for axes {axis.name!r} of {extents} workers; a dimension "
                f"for each axis expected, as dims=(2, 3) for mesh['x', 'y']"
            )
        buffers = described(dict(net.named_buffers()))
        return given, (described(_replicated(net, axis)), buffers, given)

    found = agree(axis.backend, _NAME, checked)
    if check:
        check_equal(_replicated(net, axis) | dict(net.named_buffers()), axis.backend, _NAME)
    for unit, common in _units(net, axis):
        unit.alike = common
    return Spatial(net, axis, Grid(axis.backend, extents, found))


def _units(net: torch.nn.Module, axis: Axis) -> list[tuple[Any, int]]:
    """Units of `fully_shard` over some of the workers that cut space, and how many of these."""
    every = [unit for one in net.modules() for unit in getattr(one, "_linop_units", ())]
    return [(u, n) for u in every if (n := len({*u.axis.workers} & {*axis.workers})) > 1]


def _replicated(net: torch.nn.Module, axis: Axis) -> dict[str, Tensor]:
    """Parameters that all workers have whole, or the same shards of."""
    shards = {id(p) for unit, _ in _units(net, axis) for p in unit.shards}
    return {name: p for name, p in net.named_parameters() if id(p) not in shards}


class Spatial(torch.nn.Module):
    """A module whose images are cut over workers, as `spatial` makes it. Collective: all workers
    call it.

    Arguments: a tensor that is the same on all workers is whole, and each takes its block of it, if
    it has all the dimensions that are cut; a tensor in blocks is made by `cut`. Results are
    `CutTensor`, with the shape of the whole tensor, this worker's ``block``, and ``whole()``; those
    that no cut is left of, such as the classes of an image, are plain tensors, the same on all
    workers. Functions of torch go on with cut tensors, losses too; a loss is a plain tensor, the
    same on all workers, and its ``backward()`` on each gives all of them the gradients that one
    process has.

    Attributes:
        module: the given one; its keys are those of this module's ``state_dict``.
        axis: the workers.
        grid: of the workers, and the dimensions that they cut.

    Raises:
        BackendError: from a call, workers pass different arguments, or are in different modes; on
            every worker. PartitionError: a function cannot be computed of a cut tensor; it names
            the module, and the line of the model. Or it is called by a transform of torch.func.

    Example:
        Each worker gives its rows of an image, and has its block of the result:

        >>> net = torch.nn.AvgPool2d(2)
        >>> def program(backend):
        ...     mine = strategies.spatial(net, strategies.Mesh(x=2)["x"], dims=[2])
        ...     y = mine(mine.cut(torch.full((1, 1, 2, 4), 1.0 + backend.worker)))
        ...     return tuple(y.shape), y.block.tolist()
        >>> linop.launch(program, workers=2)
        [((1, 1, 2, 2), [[[[1.0, 1.0]]]]), ((1, 1, 2, 2), [[[[2.0, 2.0]]]])]
    """

    _linop_wrapped = "module"

    def __init__(self, module: torch.nn.Module, axis: Axis, grid: Grid) -> None:
        super().__init__()
        self.module = module
        self.axis, self.grid = axis, grid
        self._agreed: set[int] = set()
        self._sums = Sums(grid)
        self.register_load_state_dict_pre_hook(_within)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """The state of the module, with its keys."""
        return self.module.state_dict(*arguments, **options)

    def load_state_dict(self, state_dict: Any, *arguments: Any, **options: Any) -> Any:
        """Load the state of the module; the same on all workers."""
        return self.module.load_state_dict(state_dict, *arguments, **options)

    def cut(self, block: Tensor, shape: Sequence[int] | None = None) -> CutTensor:
        """The tensor in blocks whose block this worker has: balanced blocks along the dimensions
        that are cut, as `numpy.array_split` makes them. Collective.

        Args:
            block: this worker's.
            shape: of the whole tensor; by default what the blocks make up.

        Raises:
            ShapeError: blocks do not make it up; on every worker.
        """
        expect("Spatial.cut: block", block, torch.Tensor)
        agreement = agreement_of(self.grid.backend)
        wanted = None if shape is None else tuple(shape)
        said = agreement.gather_objects(
            (tuple(block.shape), str(block.dtype), bool(block.requires_grad), wanted),
            "call linop.strategies.Spatial.cut",
        )
        whole = wanted or self._made_up([one[0] for one in said])
        layout = self.grid.whole(whole)
        if max(self.grid.dims) < len(whole):
            bounds = {d: even(whole[d], self.grid.extents[k]) for k, d in enumerate(self.grid.dims)}
            layout = layout.changed(axes=self.grid.dims, bounds=bounds)
        for worker, (given, dtype, _, their) in enumerate(said):
            expected = self.grid.shape_on(layout, worker)
            if given != expected or dtype != said[0][1] or their != wanted:
                raise ShapeError(
                    f"Spatial.cut: worker {worker} has a block of shape {given} and {dtype}, of a "
                    f"whole {their or whole}; {expected} and {said[0][1]} expected, its block of "
                    f"{whole}"
                )
        if any(one[2] for one in said) and not block.requires_grad:
            block = block.detach().requires_grad_()
        return CutTensor(block, layout, self.grid)

    def _made_up(self, blocks: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The shape that blocks make up, by worker."""
        shape = list(blocks[0])
        for k, d in enumerate(self.grid.dims):
            if d < len(shape):
                line = self.grid.partition[
                    tuple(slice(None) if a == k else 0 for a in range(len(self.grid.extents)))
                ].workers
                shape[d] = sum(blocks[w][d] if d < len(blocks[w]) else 0 for w in line)
        return tuple(shape)

    def take(self, x: Tensor) -> CutTensor | Tensor:
        """A tensor that all workers have, cut: each keeps its block. Nothing moves."""
        if isinstance(x, CutTensor) or x.ndim <= max(self.grid.dims):
            return x
        layout = self.grid.images(x.shape)
        if layout.is_whole:
            return x
        block = self.grid.move(x, self.grid.whole(x.shape), layout)
        return CutTensor(block, layout, self.grid)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result. See `Spatial`."""
        if torch.compiler.is_dynamo_compiling():
            return broken(_NO_GRAPH, self._called, args, kwargs)
        return self._called(args, kwargs)

    def _called(self, args: Any, kwargs: Any) -> Any:
        if _TRANSFORMED():
            raise PartitionError(
                "Spatial: called inside of a transform of torch.func (grad, vjp, jvp, vmap, …), "
                "which does not go through tensors that are cut; use torch.autograd.grad of its "
                "result, and call it for each sample, or of a batch"
            )
        leaves, structure = tree_flatten((args, kwargs))
        self._agree(leaves)
        taken = [self.take(x) if isinstance(x, Tensor) else x for x in leaves]
        args, kwargs = tree_unflatten(taken, structure)
        with ExitStack() as stack:
            stack.enter_context(Draws(self._seed))
            if torch.is_grad_enabled():
                stack.enter_context(Saving(self.module.parameters()))
                stack.enter_context(self._sums)
            return self.module(*args, **kwargs)

    def _agree(self, leaves: Sequence[Any]) -> None:
        """Check, together, that all workers pass the same: one sum of a number a call.

        Raises:
            BackendError: they do not; on every worker.
        """
        agreement, doing = agreement_of(self.grid.backend), "call linop.strategies.Spatial"
        if agreement.workers == 1:
            return
        mine = (
            *(_described(x) for x in leaves),
            f"training={self.training}",
            f"gradients={torch.is_grad_enabled()}",
            f"autocast={torch.is_autocast_enabled('cpu')}",
        )
        digest = hashlib.sha256(repr((self.grid.backend.worker, mine)).encode()).digest()
        total = agreement.sum(int.from_bytes(digest[:8], "little", signed=True), doing)
        if total in self._agreed:
            return
        said = agreement.gather_objects(mine, doing)
        for worker, theirs in enumerate(said):
            if theirs != said[0]:
                raise BackendError(
                    f"Spatial: worker {worker} calls it with {', '.join(map(str, theirs))}, worker "
                    f"0 with {', '.join(map(str, said[0]))}; the same expected on every worker"
                )
        if len(self._agreed) > 1000:
            self._agreed.clear()
        self._agreed.add(total)

    def _seed(self) -> int:
        """A seed that worker 0 draws. Collective."""
        mine = drawn_seed() if self.grid.backend.worker == 0 or _is_process(self) else 0
        said: list[int] = agreement_of(self.grid.backend).gather_objects(
            mine, "draw a seed of linop.strategies.Spatial"
        )
        return said[0]


def _is_process(net: Spatial) -> bool:
    """True for a worker with a generator of its own: it draws, so that all stay in step."""
    return net.grid.backend.name != "threads"


def _described(x: Any) -> str:
    if isinstance(x, CutTensor):
        return f"a cut tensor of shape {x.blocks}, {x.dtype}"
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)}, {x.dtype}, requires_grad={x.requires_grad}"
    return repr(x) if isinstance(x, int | float | str | bool | None) else type(x).__name__


def _within(wrapper: Any, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    """Before torch loads a model with the wrapper inside of it: name what is for its module so."""
    del wrapper, unused
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module.{key.removeprefix(prefix)}"] = state.pop(key)
