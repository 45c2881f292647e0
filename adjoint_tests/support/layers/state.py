"""States, saved and loaded, as SPMD programs. Needs torch.

Ranks import this module, and no test.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import linop
from linop import REPLICATED, Partition, TensorSpace, layers
from linop.spaces.partition import balanced
from support.layers.cases import cut, grids, normal

DTYPES = "float64 float32 bfloat16 float16 complex128 complex64 int64 int32 uint8 bool".split()


@dataclass(frozen=True)
class Held:
    """A model of one layer that only holds tensors, among them a plain one.

    Args:
        tensors: dtype and shape of each.
        partition: of all.
        axes: what its grid axes do, for each.
        seed: of where they are cut.
    """

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    partition: Partition
    axes: tuple[tuple[Any, ...], ...]
    seed: int

    @property
    def workers(self) -> int:
        return 1 + max(self.partition.workers)

    def state(self) -> dict[str, Any]:
        """The sequential one: any bits."""
        state = {}
        for number, (name, shape) in enumerate(self.tensors):
            dtype = getattr(torch, name)
            noise = torch.Generator().manual_seed(number)
            count = torch.Size(shape).numel() * dtype.itemsize
            bits = torch.randint(0, 2 if name == "bool" else 256, (count,), generator=noise)
            state[f"held.x{number}"] = bits.to(torch.uint8).view(dtype).reshape(shape)
        state["plain.weight"] = torch.arange(3.0)
        return state


class _Holder(layers.Layer):
    def __init__(self, held: Held) -> None:
        super().__init__([held.partition], held.partition)
        for number, (name, shape) in enumerate(held.tensors):
            axes = [REPLICATED if a is None else a for a in held.axes[number]]
            sizes = {
                d: _lengths(shape[d], held.partition.shape[k], held.seed + d)
                for k, d in enumerate(axes)
                if isinstance(d, int)
            }
            space = self.spaces[f"x{number}"] = TensorSpace(
                shape, held.partition, axes=axes, sizes=sizes
            )
            block = None
            if self.worker in held.partition:
                block = torch.zeros(space.local_shape(self.worker), dtype=getattr(torch, name))
            self.register_buffer(f"x{number}", block)


def _lengths(n: int, parts: int, seed: int) -> tuple[int, ...]:
    space = cut((n,), Partition((parts,)), seed) if seed % 2 else None
    return balanced(n, parts) if space is None else tuple(b - a for a, b in space.bounds[0])


def model_of(held: Held) -> Any:
    plain = torch.nn.Module()
    plain.register_parameter("weight", torch.nn.Parameter(torch.zeros(3)))
    return torch.nn.ModuleDict({"held": _Holder(held), "plain": plain})


def equal(given: Any, wanted: Any) -> None:
    """The same bits under the same names, in the same order."""
    assert list(given) == list(wanted)
    for key, whole in wanted.items():
        assert (given[key].dtype, given[key].shape) == (whole.dtype, whole.shape)
        assert _bytes(given[key]) == _bytes(whole), key


def _bytes(x: Any) -> bytes:
    flat = x.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if len(flat) else b""


@st.composite
def placements(draw: Any, tensors: Any, most: int) -> Held:
    """Any blocks for some tensors, on at most so many workers."""
    P = draw(grids(most, draw(st.integers(1, 3))))
    axes = []
    for _, shape in tensors:
        free = list(draw(st.permutations(range(len(shape)))))
        splits = draw(st.tuples(*[st.booleans()] * P.ndim))
        axes.append(tuple(free.pop() if split and free else None for split in splits))
    return Held(tensors, P, tuple(axes), draw(st.integers(0, 9)))


@st.composite
def pairs(draw: Any, most: int) -> tuple[Held, Held]:
    """The same tensors in two placements."""
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    some = st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=4)
    tensors = tuple(draw(some))
    return draw(placements(tensors, most)), draw(placements(tensors, most))


def scatters_and_gathers(backend: Any, held: Held) -> None:
    """From all, and from one; to all, and to one."""
    state, last = held.state(), held.workers - 1
    for holders in (range(held.workers), [last]):
        model = model_of(held)
        layers.scatter_state(model, state if backend.worker in holders else None)
        for to in (None, last):
            whole = layers.gather_state(model, to)
            assert (whole is not None) == (to in (None, backend.worker))
            if whole is not None:
                equal(whole, state)


def saves(backend: Any, held: Held, folder: str) -> None:
    model = model_of(held)
    layers.scatter_state(model, held.state())
    layers.save(model, f"{folder}/file")
    layers.save(model, f"{folder}/parts", sharded=True)


def loads(backend: Any, held: Held, folder: str) -> None:
    for name in ("file", "parts"):
        model = model_of(held)
        layers.load(model, f"{folder}/{name}")
        whole = layers.gather_state(model)
        assert whole is not None
        equal(whole, held.state())


def both_are_torchs(held: Held, folder: str) -> None:
    """Checkpoints are readable by torch alone."""
    state = held.state()
    equal(torch.load(f"{folder}/file"), state)
    empty = {key: torch.zeros_like(whole) for key, whole in state.items()}
    dcp.load(empty, checkpoint_id=f"{folder}/parts", no_dist=True)
    equal(empty, state)
    dcp_to_torch_save(f"{folder}/parts", f"{folder}/again")
    equal(dict(sorted(torch.load(f"{folder}/again").items())), dict(sorted(state.items())))


def network(workers: int) -> Any:
    """A convolution over space, then a linear layer, whose weight is cut along its columns."""
    P, one = Partition((1, 1, workers)), Partition((1, 1, 1))
    return torch.nn.Sequential(
        layers.Conv1d(P, 2, 3, 3, padding=1),
        layers.Repartition(P, one),
        layers.Linear(one, 6, 4, P_W=Partition((1, workers))),
    ).double()


def sequential() -> Any:
    twin = (torch.nn.Conv1d(2, 3, 3, padding=1), torch.nn.Identity(), torch.nn.Linear(6, 4))
    return torch.nn.Sequential(*twin).double()


def adam(model: Any) -> Any:
    """As any worker makes it: those without parameters have none."""
    parameters = list(model.parameters())
    return torch.optim.Adam(parameters, lr=0.1, amsgrad=True) if parameters else None


def trained(model: Any, optimizer: Any, steps: range, block: Callable[[Any], Any]) -> None:
    for step in steps:
        loss = model(block(normal((3, 2, 6), step))).square().sum()
        model.zero_grad()
        loss.backward()
        if optimizer is not None:
            optimizer.step()


def blocks(workers: int, worker: int) -> Callable[[Any], Any]:
    X = TensorSpace((3, 2, 6), Partition((1, 1, workers)))
    if worker not in X.partition:
        return lambda whole: torch.empty((3, 0), dtype=torch.float64)
    return lambda whole: whole[X.slices(worker)]


def begun(backend: Any, workers: int) -> tuple[Any, Any, Any]:
    """A network of so many workers, its optimizer, and what cuts its input."""
    model = network(workers)
    layers.scatter_state(model, _start())
    return model, adam(model), blocks(workers, backend.worker)


def _start() -> Any:
    return {
        key: normal(tuple(whole.shape), number)
        for number, (key, whole) in enumerate(sequential().state_dict().items())
    }


def trains_and_saves(backend: Any, workers: int, folder: str) -> None:
    """Two steps, a checkpoint, and three more: those after it are repeated to the bit."""
    model, optimizer, block = begun(backend, workers)
    trained(model, optimizer, range(2), block)
    layers.save(model, f"{folder}/file", optimizer)
    layers.save(model, f"{folder}/parts", optimizer, sharded=True)
    trained(model, optimizer, range(2, 5), block)
    layers.save(model, f"{folder}/end", optimizer)
    for name in ("file", "parts"):
        again, fresh, _ = begun(backend, workers)
        layers.load(again, f"{folder}/{name}", fresh)
        trained(again, fresh, range(2, 5), block)
        wanted, found = layers.gather_state(model), layers.gather_state(again)
        assert wanted is not None
        equal(found, wanted)
        one = layers.gather_optimizer_state(model, optimizer)
        other = layers.gather_optimizer_state(again, fresh)
        same_optimizer(other, one)


def keeps_its_state(backend: Any) -> None:
    """Steps after it leave a gathered state as it is, and a scattered one."""
    model, optimizer, block = begun(backend, 1)
    trained(model, optimizer, range(2), block)
    state = layers.gather_optimizer_state(model, optimizer)
    before = copy.deepcopy(state)
    trained(model, optimizer, range(2, 3), block)
    same_optimizer(state, before)
    layers.scatter_optimizer_state(model, optimizer, state)
    trained(model, optimizer, range(3, 4), block)
    same_optimizer(state, before)


def same_optimizer(given: Any, wanted: Any, tolerance: float = 0.0) -> None:
    assert given["param_groups"] == wanted["param_groups"]
    assert given["state"].keys() == wanted["state"].keys()
    for number, values in wanted["state"].items():
        assert set(given["state"][number]) == set(values)
        for name, value in values.items():
            assert (given["state"][number][name] - value).abs().max() <= tolerance, name


def resumes(backend: Any, workers: int, folder: str) -> None:
    """The rest of the training, by another number of workers."""
    end = torch.load(f"{folder}/end")
    for name in ("file", "parts"):
        model, optimizer, block = begun(backend, workers)
        layers.load(model, f"{folder}/{name}", optimizer)
        trained(model, optimizer, range(2, 5), block)
        whole = layers.gather_state(model)
        assert whole is not None
        for key, wanted in end["model"].items():
            assert (whole[key] - wanted).abs().max() < 1e-11
        same_optimizer(layers.gather_optimizer_state(model, optimizer), end["optimizer"], 1e-9)


def _with(**changes: Any) -> Any:
    state = _start()
    state.update({key.replace("_", "."): value for key, value in changes.items()})
    return {key: value for key, value in state.items() if value is not None}


class Factored(torch.optim.SGD):  # type: ignore[misc]
    """An optimizer whose state has other shapes than its parameters, and is no optimizer of torch's
    that refuses blocks."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["row"] = torch.zeros(len(p), 1)
        return super().step(closure)


def _optimizer_of(kind: Any, model: Any) -> Any:
    optimizer = kind(model.parameters())
    trained(model, optimizer, range(1), blocks(2, linop.backends.current().worker or 0))
    return optimizer


def _other(worker: int) -> Any:
    return torch.nn.Sequential(torch.nn.Linear(2, 2 + worker))


def _uneven(worker: int) -> Any:
    plain = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(plain.weight, worker)
    return plain


MISTAKES: list[tuple[str, Callable[[Any, int], Any]]] = [
    (
        "missing ['2.bias'], unexpected []",
        lambda m, w: layers.scatter_state(m, _with(**{"2_bias": None})),
    ),
    ("unexpected ['a.b']", lambda m, w: layers.scatter_state(m, _with(a_b=torch.ones(1)))),
    (
        "'2.bias' has shape (5,) in the state; (4,) expected",
        lambda m, w: layers.scatter_state(m, _with(**{"2_bias": torch.ones(5)}) if w else None),
    ),
    ("'2.bias' is a int; a tensor", lambda m, w: layers.scatter_state(m, _with(**{"2_bias": 3}))),
    ("no worker has the state", lambda m, w: layers.scatter_state(m, None)),
    (
        "workers 0 and 1 have different states, in '2.bias'; the same on both, or None on one",
        lambda m, w: layers.scatter_state(m, _with(**{"2_bias": torch.ones(5)} if w else {})),
    ),
    ("list given; a state_dict", lambda m, w: layers.scatter_state(m, [] if w else None)),
    ("worker 7; there are 2 workers", lambda m, w: layers.gather_state(m, 7)),
    ("one model expected on all", lambda m, w: layers.gather_state(_other(w))),
    ("differs between workers 0 and 1", lambda m, w: layers.gather_state(_uneven(w))),
    ("FileNotFoundError", lambda m, w: layers.load(m, "/nowhere/at/all")),
    ("0: NotADirectoryError: '/nowhere/at' is", lambda m, w: layers.save(m, "/nowhere/at/all")),
    ("no worker passes an optimizer", lambda m, w: layers.gather_optimizer_state(m, None)),
    (
        "none of the model's",
        lambda m, w: layers.gather_optimizer_state(
            m, torch.optim.SGD([torch.ones(w)]) if w else None
        ),
    ),
    (
        "a number expected, or one tensor of that shape",
        lambda m, w: layers.gather_optimizer_state(m, _optimizer_of(Factored, m)),
    ),
    (
        "with different options",
        lambda m, w: layers.gather_optimizer_state(m, torch.optim.SGD(m.parameters(), lr=w + 1)),
    ),
    (
        "groups of [2] parameters; the optimizer has [4]",
        lambda m, w: layers.scatter_optimizer_state(
            m, adam(m), adam(torch.nn.Linear(2, 2)).state_dict()
        ),
    ),
]
