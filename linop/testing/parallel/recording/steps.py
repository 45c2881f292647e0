"""One step of a twin and of a parallel model on this rank, recorded. Collective."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from linop.errors import ArgumentError
from linop.testing.parallel.recording.programs import Program
from linop.testing.parallel.recording.recorder import Recorder
from linop.testing.parallel.recording.records import Parameter, Probe, Record
from linop.testing.parallel.recording.switches import switches
from linop.testing.parallel.recording.tensors import numbers, tensors_in

SEED = 20_240
_WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")


def recorded(
    program: Program,
    dtype: torch.dtype,
    trace: bool = True,
    place: tuple[int, int] | None = None,
    make: Callable[[], Recorder] = Recorder,
    probes: Sequence[Probe] = (),
) -> tuple[Record, Record | None]:
    """One step of the parallel model on this rank and, on rank 0, of the twin.

    Args:
        dtype: of the numbers, torch's default while models are built.
        trace: False to record results alone.
        place: rank and number of ranks; None for those of `torch.distributed`.
        make: returns a recorder.
        probes: functions that are looked at alone after the step.
    """
    rank, world = place or (dist.get_rank(), dist.get_world_size())
    with _numbers_of(dtype):
        twin, again = (_converted(_built("twin", program.twin), dtype) for _ in range(2))
        _check_alike(twin, again)
        switched: tuple[list[str], list[str]] = ([], [])
        with switches(switched[0].append, switched[1].append):
            net = _built("model", program.model, twin)
        _check_apart(net, twin)
        batch, whole = (_converted(program.batch(), dtype) for _ in range(2))
        _check_same_batch(batch, whole)
        mine = batch if program.mine is None else program.mine(batch, rank, world)
        known = {name for name, _ in (*twin.named_parameters(), *twin.named_buffers())}
        known |= {name for name, _ in twin.named_modules()}
        way = trace, program.optimizer, known, make
        chosen, of_twin = (
            {(p.name, p.module, p.line, p.occurrence) for p in probes if p.rank == of}
            for of in (rank, -1)
        )
        record = _step(net, _own_step(program), mine, rank, *way, chosen)
        record.unsynchronized[:0], record.divided[:0] = switched
        reference = _step(again, _twins_step(program), whole, rank, *way, of_twin)
        for name, one in record.parameters.items():
            theirs = reference.parameters.get(name)
            if theirs is not None:
                one.expected = _expected(program.shard, name, theirs, rank, world)
    return record, reference if rank == 0 else None


def _built(what: str, make: Callable[..., Any], *args: Any) -> Any:
    torch.manual_seed(SEED)
    found = make(*args)
    if not isinstance(found, torch.nn.Module):
        raise ArgumentError(
            f"{what}() returned {type(found).__name__}, a torch.nn.Module expected: the part of "
            f"the model that this rank holds"
        )
    return found


def _check_alike(twin: torch.nn.Module, again: torch.nn.Module) -> None:
    for (name, a), (_, b) in zip(twin.named_parameters(), again.named_parameters(), strict=True):
        if not torch.equal(a, b):
            raise ArgumentError(
                f"twin() gives another {name!r} each time; draw its values from a generator that "
                f"it seeds, so that all ranks have the same twin"
            )


def _check_same_batch(batch: Any, again: Any) -> None:
    for a, b in zip(tensors_in(batch), tensors_in(again), strict=False):
        same = a.shape == b.shape and a.dtype == b.dtype
        if not same or not bool(((a == b) | ((a != a) & (b != b))).all()):
            raise ArgumentError(
                "batch() gives another batch each time; draw it from a generator that it seeds, or "
                "keep it outside: ranks, and the twin, have to see the same"
            )


def _check_apart(net: torch.nn.Module, twin: torch.nn.Module) -> None:
    theirs = {id(one): name for name, one in twin.named_parameters()}
    for name, one in net.named_parameters():
        if id(one) in theirs:
            raise ArgumentError(
                f"model(twin): its parameter {name!r} is the twin's own {theirs[id(one)]!r}; the "
                f"parallel model needs tensors of its own (copy.deepcopy(twin), or .clone())"
            )


@contextmanager
def _numbers_of(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _converted(value: Any, dtype: torch.dtype) -> Any:
    """With its floating-point numbers in a dtype; complex ones in that of their parts."""
    if isinstance(value, torch.nn.Module):
        return value._apply(lambda tensor: _converted(tensor, dtype))
    if isinstance(value, torch.Tensor):
        if value.is_complex() and dtype in (torch.float32, torch.float64):
            return value.to(dtype.to_complex())
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _converted(one, dtype) for key, one in value.items()}
    if isinstance(value, tuple | list):
        made = [_converted(one, dtype) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value


def _own_step(program: Program) -> Callable[[Any, Any], Any]:
    if program.step is not None:
        return program.step
    return _twins_step(program, "batch" if program.mine is None else "mine")


def _twins_step(program: Program, what: str = "batch") -> Callable[[Any, Any], Any]:
    """The step of a program that has none of its own.

    Args:
        what: the function of the program that returns what the step is given.
    """

    def step(model: Any, batch: Any) -> Any:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            number = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
            raise ArgumentError(
                f"{what}() returned a {type(batch).__name__}{number}, a tuple of the input and the "
                f"target expected" + ", since there is no step()" * (what == "mine")
            )
        value = program.loss(_output(model, batch[0]), batch[1])
        value.backward()
        return value

    return step


def _output(model: Any, given: Any) -> Any:
    """The model's output. A tuple or dict is passed as several arguments if the forward has them,
    else as one."""
    inner = model
    while isinstance(getattr(inner, "module", None), torch.nn.Module):
        inner = inner.module
    parameters = inspect.signature(inner.forward).parameters.values()
    names = {one.name for one in parameters if one.kind is not one.VAR_POSITIONAL}
    needed = [one for one in parameters if one.default is one.empty
              and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]  # fmt: skip
    if isinstance(given, dict) and names.issuperset(given):
        return model(**given)
    if isinstance(given, tuple) and len(needed) > 1:
        return model(*given)
    return model(given)


def _step(
    net: torch.nn.Module,
    step: Callable[[Any, Any], Any],
    batch: Any,
    rank: int,
    trace: bool,
    optimizer: Callable[[Any], Any] | None,
    known: set[str],
    make_recorder: Callable[[], Recorder],
    wanted: set[tuple[str, str, str, int]],
) -> Record:
    recorder = make_recorder()
    recorder.wanted = wanted
    plain_name = plain_names(net, known)
    named = {plain_name(name): one for name, one in net.named_parameters(remove_duplicate=False)}
    buffers = {plain_name(name): one for name, one in net.named_buffers(remove_duplicate=False)}
    values = {name: _whole(one) for name, one in {**named, **buffers}.items()}
    left: dict[str, list[Any]] = {name: [] for name in named}
    removed = [
        one.register_post_accumulate_grad_hook(_keeping(left[name]))
        for name, one in named.items()
        if one.requires_grad and one.is_leaf and not hasattr(one, "full_tensor")
    ]
    torch.manual_seed(SEED)
    with recorder.recording(net, plain_name) if trace else nullcontext():
        loss = step(net, batch)
        if trace:
            recorder.finished()
    found = recorder.probe()
    for hook in removed:
        hook.remove()
    if not isinstance(loss, torch.Tensor | float | int) or (
        isinstance(loss, torch.Tensor) and loss.numel() != 1
    ):
        given = f"a tensor of shape {tuple(loss.shape)}" if hasattr(loss, "shape") else repr(loss)
        raise ArgumentError(
            f"step() or loss() returned {given}, the loss of the whole batch expected, a number or "
            f"a tensor of one element"
        )
    gradients = {
        name: None if one.grad is None else _whole(one.grad) for name, one in named.items()
    }
    moved = {n for n, one in named.items() if not np.array_equal(_whole(one), values[n])}
    trained = [one for one in dict.fromkeys(net.parameters()) if one.requires_grad]
    if trained:
        make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        make(trained).step()
    buffers = {plain_name(name): one for name, one in net.named_buffers(remove_duplicate=False)}
    first: dict[int, str] = {}
    for name, one in named.items():
        first.setdefault(id(one), name)
    parameters = {
        name: Parameter(
            name,
            values.get(name, _whole(one)),
            [one for one in left.get(name, ()) if one is not None],
            gradients.get(name),
            _whole(one),
            name in buffers,
            one.requires_grad,
            str(one.dtype).removeprefix("torch."),
            **recorder.gradients.about(name),
            tied="" if first.get(id(one), name) == name else first[id(one)],
            moved=name in moved,
            held=_held(one),
        )
        for name, one in {**named, **buffers}.items()
    }
    return Record(
        rank,
        float(loss.detach() if isinstance(loss, torch.Tensor) else loss),
        recorder.tensors,
        recorder.calls,
        recorder.collectives,
        parameters,
        recorder.notes,
        {name: type(one).__name__ for name, one in net.named_modules()},
        recorder.lifted,
        recorder.unsynchronized,
        recorder.divided,
        recorder.declared,
        _axes(net),
        found,
    )


def _axes(net: torch.nn.Module) -> dict[tuple[int, ...], str]:
    """Groups of ranks that include this one, and the axes of meshes that they are."""
    found = {}
    for mesh in dict.fromkeys(getattr(one, "device_mesh", None) for one in net.parameters()):
        if mesh is None or mesh.get_coordinate() is None:
            continue
        for name in mesh.mesh_dim_names or ():
            found[tuple(dist.get_process_group_ranks(mesh.get_group(name)))] = name
    return found


def plain_names(net: torch.nn.Module, known: set[str]) -> Callable[[str], str]:
    """A function from names of modules and parameters to those that they have without wrappers: of
    data parallelism, compilation, checkpointing, or of classes around the model.

    Args:
        known: names that the twin has.
    """
    wrappers = {
        name for name, one in net.named_modules()
        if isinstance(one, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel)
    }  # fmt: skip

    def plain(name: str) -> str:
        kept, path = [], ""
        for part in name.split("."):
            outer, path = path, f"{path}.{part}" if path else part
            if part in _WRAPPERS or (part == "module" and outer in wrappers):
                continue
            kept.append(part)
        found = ".".join(kept)
        while kept and ".".join(kept) not in known:
            kept = kept[1:]
        return ".".join(kept) if kept else found

    return plain


def _keeping(values: list[Any]) -> Callable[[torch.Tensor], None]:
    def keep(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            with torch._C.DisableTorchFunction():
                values.append(numbers(parameter.grad))

    return keep


def _whole(tensor: torch.Tensor) -> np.ndarray:
    """All numbers of a tensor; of a DTensor those of the global one. Collective."""
    full = getattr(tensor, "full_tensor", None)
    with torch.no_grad():
        found = numbers(tensor if full is None else full())
    if found is None:
        raise ArgumentError(
            f"a parameter of {tensor.numel():,} numbers is too large to be compared; check a "
            f"smaller configuration of the model"
        )
    return found


def _held(tensor: Any) -> np.ndarray | None:
    """The positions of the elements of a DTensor that this rank has, flat; None of other tensors,
    and where ranks have terms of a sum."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return None
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placements = tensor.placements
    if not all(type(one) in (Shard, Replicate) for one in placements):
        return None
    everything = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape)
    mine = distribute_tensor(everything, mesh, placements, src_data_rank=None).to_local()
    return mine.reshape(-1).cpu().numpy()


def _expected(
    shard: Callable[[str, Any, int, int], Any] | None,
    name: str,
    theirs: Parameter,
    rank: int,
    world: int,
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray] | None:
    if shard is None or theirs.buffer:
        return None

    def cut(value: np.ndarray | None) -> Any:
        if value is None:
            return None
        return np.array(shard(name, torch.from_numpy(value), rank, world))

    return cut(theirs.value), cut(theirs.gradient), cut(theirs.after)
