"""Meshes of workers: contracts for threads and ranks."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import linop
from linop import COPIES, Partition, TensorSpace
from linop.backends import use
from linop.backends.engine.base import Backend
from linop.errors import ArgumentError, BackendError, LinopError
from linop.schedules import GENERATORS
from linop.strategies import Mesh, Pipeline
from support.strategies.pipelines.pipelines import RATE, block, squares, values


def is_a_grid(backend: Backend, axes: dict[str, int]) -> None:
    """Sums along an axis, and along several, are those of NumPy's array of all workers."""
    mesh = Mesh(**axes)
    assert mesh.shape == axes, mesh
    everybody = np.arange(backend.workers or 1, dtype=np.int64).reshape(*axes.values())
    assert tuple(mesh.coordinates.values()) == mesh.partition.coordinates(mesh._worker)
    names = tuple(axes)
    for chosen in [*((name,) for name in names), names, names[:2], names[1:]]:
        if not chosen:
            continue
        axis = mesh[chosen]
        assert axis is mesh[chosen]
        assert axis.size == math.prod(axes[name] for name in chosen)
        assert axis.backend.worker == axis.index, axis
        assert axis.workers[axis.index] == backend.worker
        with use(axis.backend):
            X = TensorSpace((1,), axis.partition, np.int64, [COPIES])
            total = linop.all_reduce(X).compile(linop.backends.current())
            own = total(np.array([backend.worker]))
        at = tuple(names.index(name) for name in chosen)
        wanted = everybody.sum(at, keepdims=True)
        wanted = np.broadcast_to(wanted, everybody.shape)[tuple(mesh.coordinates.values())]
        assert own[0] == wanted, (chosen, own, wanted)


def is_cut_again(backend: Backend) -> None:
    """A mesh of an axis's backend is one of its workers; the same division is the same backend."""
    rows = Mesh(rows=2, columns=2)["rows"]
    inner = Mesh(rows.backend, a=2)["a"]
    assert inner.workers == (0, 1)
    assert inner.backend is rows.backend
    again = Mesh(backend, rows=2, columns=2)["rows"]
    assert again.backend is rows.backend
    one = Mesh(rows.backend, a=2, b=1)["b"]
    assert one.size == 1
    assert one.backend.workers == 1


def says_what_is_wrong(backend: Backend) -> None:
    """Errors of construction and of axes, on every worker, which go on."""
    with pytest.raises(ArgumentError, match=r"dp=3 × tp=1 given, and the backend has 2 workers"):
        Mesh(dp=3, tp=1)
    with pytest.raises(ArgumentError, match=r"no axes given"):
        Mesh()
    worker = backend.worker or 0
    with pytest.raises(BackendError, match=r"worker 1 has the axes \{'tp': 2\}, worker 0 \{'dp'"):
        Mesh(**{("dp", "tp")[worker]: 2})
    mesh = Mesh(dp=-1, tp=1)
    assert mesh.shape == {"dp": 2, "tp": 1}
    for names in ("pp", ("tp", "dp"), ("dp", "dp"), ()):
        with pytest.raises(ArgumentError, match=r"some of 'dp, tp', in this order, expected"):
            mesh[names]
    with pytest.raises(BackendError, match=r"worker 1 makes axis 'tp', worker 0 'dp'; the same"):
        mesh[("dp", "tp")[worker]]
    with pytest.raises(ArgumentError, match=r"on worker 1: axis 'pp': some of 'dp, tp'"):
        mesh[("dp", "pp")[worker]]
    with pytest.raises(ArgumentError, match=r"axis '0': some of 'dp, tp'"):
        mesh[0]  # type: ignore[index]
    for wrong in (2.0, "2", lambda: 2):
        with pytest.raises(ArgumentError, match=r"on worker 1: dp: expected a whole number, given"):
            Mesh(dp=(2, wrong)[worker], tp=1)  # type: ignore[arg-type]
    with pytest.raises(BackendError, match=r"worker 1: the workers of its part in ascending"):
        backend.part([0])  # type: ignore[attr-defined]
    assert mesh["dp"].size == 2


def fails_alone(backend: Backend) -> None:
    """A failed call of one group is raised in that group, and the others' goes on."""
    axis = Mesh(dp=2, tp=2)["tp"]
    X = TensorSpace((3,), axis.partition, axes=[COPIES])
    total = linop.all_reduce(X).compile(axis.backend)
    x = np.ones(3) if axis.workers[0] or axis.index else np.ones(4)
    if 0 in axis.workers:
        with pytest.raises(LinopError, match=r"shape \(4,\)"):
            total(x)
    else:
        assert total(x).tolist() == [2, 2, 2]
    whole = linop.all_reduce(TensorSpace((1,), Partition((4,)), axes=[COPIES])).compile(backend)
    assert whole(np.ones(1)).tolist() == [4]


def waits_crosswise(backend: Backend) -> None:
    """Worker 0 waits for 1 along the rows, 1 for 3 along the columns, 3 for 2, 2 for 0."""
    mesh = Mesh(rows=2, columns=2)
    rows, columns = mesh["rows"], mesh["columns"]
    plans = []
    for axis in (rows, columns):
        X = TensorSpace((1,), axis.partition, axes=[COPIES])
        plans.append(linop.all_reduce(X).compile(axis.backend))
        plans[-1](np.ones(1))
    plans[backend.worker in (0, 3)](np.ones(1))


def trains_pipelines(backend: Backend) -> None:
    """Pipelines along one axis, in each group its own batch, are independent."""
    axis = Mesh(dp=2, pp=2)["pp"]
    stages = [block(3, seed) for seed in range(2)]
    schedule = GENERATORS["1f1b"](2, 3)
    sgd: Any = partial(torch.optim.SGD, lr=RATE)
    pipe = Pipeline(stages, schedule, squares, optimizer=sgd, backend=axis.backend)
    seed = axis.workers[0]
    x, target = values(6, 3, seed=seed), values(6, 3, seed=seed + 9)
    loss = pipe.step(x, target)
    if loss is not None:
        twin = torch.nn.Sequential(*(block(3, seed) for seed in range(2)))
        wanted = squares(twin(x), target)
        assert torch.allclose(loss, wanted, rtol=1e-12, atol=0), (loss, wanted)
