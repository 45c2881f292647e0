"""NumPy's whole numbers do wherever Python's do; and sums of any length have one order."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import linop
from linop import COPIES, Partition, Region, Space, TensorSpace

LINE = Partition((2,))
X = TensorSpace((6, 4), LINE)
OVER = TensorSpace((6,), LINE, axes=(COPIES,))
R = Region("a", (4, 3))

TAKEN: dict[str, Callable[[Any], Any]] = {
    "shape": lambda n: Region("a", n(4)),
    "shapes": lambda n: Region("a", (n(4), n(3))),
    "worker": lambda n: Region("a", 3, n(1)),
    "workers": lambda n: Region("a", 3, (n(0), n(1))),
    "slices": lambda n: R[n(1) : n(3) : n(1)],
    "grid": lambda n: Partition((n(2), n(1)), [n(3), n(1)]),
    "coordinates": lambda n: LINE.coordinates(n(1)),
    "place": lambda n: LINE.worker(n(1)),
    "axes": lambda n: TensorSpace((6, 4), LINE, axes=[n(1)]),
    "sizes": lambda n: TensorSpace((4,), LINE, sizes={0: (n(1), n(3))}),
    "bounds": lambda n: TensorSpace((4,), LINE, bounds={0: ((n(0), n(2)), (n(1), n(4)))}),
    "region": lambda n: X.region(n(1)),
    "shift": lambda n: linop.shift(X, n(1), n(0)),
    "all_gather": lambda n: linop.all_gather(X, n(0)),
    "several axes": lambda n: linop.all_gather(X, [n(0)]),
    "all_reduce": lambda n: linop.all_reduce(OVER, n(0)),
    "ring": lambda n: linop.ring_all_reduce(OVER, n(0)),
    "reduce_scatter": lambda n: linop.reduce_scatter(OVER, n(0), n(0)),
    "all_to_all": lambda n: linop.all_to_all(X, n(0), n(1)),
    "gather": lambda n: linop.gather(X, n(1)),
    "power": lambda n: linop.shift(OVER, 1) ** n(3),
    "halo": lambda n: linop.halo_exchange(X, n(3), n(1), n(1), n(1)),
    "random": lambda n: Space(R).random(n(3))["a"].tolist(),
    "launch": lambda n: linop.launch(lambda backend: backend.worker, n(2)),
    "checks": lambda n: (
        linop.testing.check_adjoint(linop.shift(X, 1), seed=n(1), trials=n(2)).error
    ),
}


@pytest.mark.parametrize("kind", [np.int64, np.int8, np.uint8])
@pytest.mark.parametrize("name", TAKEN)
def test_whole_numbers_of_numpy(name: str, kind: Callable[[int], Any]) -> None:
    made, wanted = TAKEN[name](kind), TAKEN[name](int)
    if isinstance(wanted, linop.LinearOperator):
        assert made.stages.fingerprint == wanted.stages.fingerprint
    else:
        assert made == wanted
        assert repr(made) == repr(wanted)


SUMS = """
import numpy as np, linop
from linop.backends.threads import backend as threads
for dtype in ("float64", "complex128", "float32"):
    space = linop.Space([linop.Region("x", 300_000), linop.Region("y", (50, 2001))], dtype)
    v, w = space.random(0), space.random(1)
    print(repr(v.inner(w)), v.norm().hex())
"""


def test_inner_products_do_not_depend_on_the_threads_of_blas() -> None:
    said = set()
    for count in ("1", "2", "5"):
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        environment = {**os.environ, **dict.fromkeys(names, count)}
        run = [sys.executable, "-c", SUMS]
        ran = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
        said.add(ran.stdout)
    assert len(said) == 1


@pytest.mark.parametrize("size", [0, 1, 8191, 8192, 8193, 20000])
@pytest.mark.parametrize("layout", ["C", "F", "strided"])
def test_inner_products_of_any_length(size: int, layout: str) -> None:
    space = Space(Region("x", (2, size)), complex)
    v, w = space.integers(0), space.integers(1)
    if layout != "C":
        for one in (v, w):
            array = one["x"]
            one.arrays["x"] = np.asfortranarray(array) if layout == "F" else array[:, ::-1]
    assert v.inner(w) == (v["x"].conj() * w["x"]).sum()
