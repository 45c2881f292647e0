"""`linop.testing.parallel`: collectives of torch, followed element by element, are linop's
operators; the shadows of tensors follow what torch does to them."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import COPIES, Partition, TensorSpace
from linop.testing.parallel.lifting import operator, place_of, space_of
from linop.testing.parallel.matrices import matrix
from linop.testing.parallel.recording.records import Collective, Record

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from linop.testing.parallel.recording.records import Lifted, Moved
from linop.testing.parallel.recording.shadows import Shadows

worlds, sizes = st.integers(2, 5), st.integers(1, 4)


def lifted(name: str, world: int, given: int, made: int, peer: int = -1) -> np.ndarray:
    """The matrix of the operator of one collective of all ranks."""
    records, movements = {}, {}
    for rank in range(world):
        about = Collective(
            0, name, tuple(range(world)), "sum", peer, [], [], None, None, "", "", "forward", 0, -1,
            "", "float64", "",
        )  # fmt: skip
        arguments, results = np.arange(1, given + 1), np.arange(given + 1, given + made + 1)
        sent = [arguments] if name != "broadcast" or rank == peer else []
        records[rank] = Record(rank, 0.0, [], [], [about], {})
        movements[rank] = Lifted(0, False, [arguments], [results], [Moved(0, sent, [results])])
    found = matrix(records, movements, [[0]] * world, [[0]] * world)
    ends = (
        space_of(name, {r: [n] for r in range(world)}) for name, n in (("x", given), ("y", made))
    )
    op = operator(found, *ends)
    assert op.H.H.equals(op)
    return of(op)


@given(
    st.lists(st.lists(st.integers(0, 4), max_size=2), min_size=1, max_size=4),
    st.lists(st.lists(st.integers(0, 4), max_size=2), min_size=1, max_size=4),
    st.data(),
)
def test_an_operator_has_the_matrix_that_it_is_of(
    given: list[list[int]], made: list[list[int]], data: st.DataObject
) -> None:
    ends = [space_of(name, dict(enumerate(sizes))) for name, sizes in (("x", given), ("y", made))]
    shape = ends[1].size, ends[0].size
    coefficients = st.sampled_from([0, 0, 1, 1, -2, 1 / 3, 0.75])
    entries = data.draw(st.lists(coefficients, min_size=shape[0] * shape[1],
                                 max_size=shape[0] * shape[1]))  # fmt: skip
    wanted = np.array(entries, float).reshape(shape)
    assert np.array_equal(of(operator(wanted, *ends)), wanted)
    for space in ends:
        sizes = [(r.workers[0], int(r.name[1]), e) for r in space.regions for e in range(r.size)]
        assert [place_of(space, k) for k in range(space.size)] == sizes


def of(op: linop.LinearOperator) -> np.ndarray:
    return op.to_matrix().toarray()


@given(worlds, sizes)
def test_collectives_are_linops(world: int, n: int) -> None:
    grid = Partition((world,))
    copies = TensorSpace((n,), grid, axes=(COPIES,))
    assert np.array_equal(lifted("all_reduce", world, n, n), of(linop.all_reduce(copies)))
    gather = of(linop.all_gather(TensorSpace((world * n,), grid)))
    assert np.array_equal(lifted("all_gather", world, n, world * n), gather)
    assert np.array_equal(lifted("reduce_scatter", world, world * n, n), gather.T)


@given(worlds, sizes, st.data())
def test_a_broadcast_is_linops(world: int, n: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, world - 1))
    X = TensorSpace((n,), Partition((1,), [root]))
    wanted = of(linop.broadcast(X, Partition((world,))))
    found = lifted("broadcast", world, n, n, root)
    assert np.array_equal(found[:, root * n : (root + 1) * n], wanted)
    assert np.count_nonzero(found) == np.count_nonzero(wanted)


@given(worlds, sizes)
def test_an_all_to_all_is_its_own_adjoint(world: int, n: int) -> None:
    found = lifted("all_to_all", world, world * n, world * n)
    assert np.array_equal(found, found.T)
    assert np.array_equal(found @ found, np.eye(len(found)))
    # Chunk s of rank r goes to chunk r of rank s: a transposition of the axes of ranks and chunks.
    x = np.arange(float(len(found)))
    wanted = x.reshape(world, world, n).transpose(1, 0, 2).ravel()
    assert np.array_equal(found @ x, wanted)


# Shadows


class Seen(TorchDispatchMode):
    def __init__(self, shadows: Shadows) -> None:
        super().__init__()
        self.shadows = shadows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.shadows.operation(func, args, kwargs or {}, result)
        return result


def into_slices(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(2, *x.shape)
    y[1] = x
    y[0, 1:] += 2 * x[:-1]
    return y


def scaled_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[::2].mul_(-3)
    return y.sub_(x.flip(0), alpha=0.5)


LINEAR = {
    "views": lambda x: x.t().reshape(2, -1).unsqueeze(1).expand(2, 3, -1),
    "pieces": lambda x: torch.cat([*x.chunk(2)[::-1], x[1:2]], 0).contiguous(),
    "stack": lambda x: torch.stack([x, x.roll(1, 0)], -1),
    "rows": lambda x: x[torch.tensor([2, 0, 0])],
    "sums": lambda x: (x.sum(0) + x[1] * 3 - x[0] / 4).neg(),
    "mask": lambda x: x * torch.tensor([1.0, 0.0, 2.0, 0.5])[:, None],
    "pad": lambda x: torch.nn.functional.pad(x, (1, 2)),
    "slices": into_slices,
    "in place": scaled_in_place,
}


@pytest.mark.parametrize("name", LINEAR)
def test_shadows_follow_linear_functions(name: str) -> None:
    x = torch.arange(12.0).reshape(4, 3) + 0.5
    shadows = Shadows(0, False, [x])
    with Seen(shadows):
        y = LINEAR[name](x)
    done = shadows.finish([y])
    assert not done.unknown
    record = Record(0, 0.0, [], [], [], {})
    found = matrix({0: record}, {0: done}, [[0]], [[0]]).toarray()
    units = torch.eye(12, dtype=x.dtype).reshape(12, 4, 3)
    wanted = torch.stack([LINEAR[name](unit).reshape(-1) for unit in units], 1).numpy()
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("function", [torch.exp, torch.relu, lambda x: x * x])
def test_others_are_unknown(function: Any) -> None:
    x = torch.arange(3.0) + 1
    shadows = Shadows(0, False, [x])
    with Seen(shadows):
        y = function(x)
    done = shadows.finish([y])
    assert done.unknown and (done.made[0] == -1).all()
