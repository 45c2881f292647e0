"""A plan of a composition through real and complex spaces computes NumPy's; on any backend."""

from __future__ import annotations

from typing import Any

import numpy as np

from linop.backends import Backend
from linop.testing.describing import Description
from linop.testing.factories.real_linear import real_linear
from support.contracts.plans import mine


def numpy_s(description: Description, x: np.ndarray) -> np.ndarray:
    """The result of the steps of ``real_parts`` on a global array, or their adjoints for real inner
    products; written without linop's operators."""
    steps, is_real, kinds = description["steps"], False, []
    for step in steps:
        kinds.append(is_real)
        if isinstance(step, tuple):
            is_real = is_real and not step[1]
        elif step != "move":
            is_real = step != "conj"
    if not description["transposed"]:
        for step in steps:
            x = _step(step, x, back=False)
        return x
    for step, before in zip(reversed(steps), reversed(kinds), strict=True):
        x = _step(step, x, back=True)
        x = x.real if before else x
    return x


def _step(step: Any, x: np.ndarray, back: bool) -> np.ndarray:
    if isinstance(step, tuple):
        number = complex(*step) if step[1] else step[0]
        return x * (np.conj(number) if back else number)
    if step == "real":
        return x + 0j if back else x.real
    if step == "imag":
        return 1j * x if back else x.imag
    return x if step == "move" else np.conj(x)


def computes_numpy_s(backend: Backend, description: Description, seed: int) -> None:
    """Three times with new data, in every form of a call, forward and back."""
    op = real_linear(**description)
    plan = op.compile(backend)
    here = mine(backend)
    for one, A in ((plan, op), (plan.H, op.H)):
        for k in range(3):
            x = A.domain.integers(seed + k)
            wanted = A(x)
            held = {r.name: x[r.name] for r in A.domain.on(here)}
            made = [r.name for r in A.codomain.on(here)]
            given = next(iter(held.values()), None)
            before = None if given is None else given.copy()
            vector = one(backend.vector(A.domain, given))
            y = one(given)
            one.start(given)
            again = one.finish()
            outs = [np.full_like(wanted[name], 7) for name in made]
            into = one(given, out=outs[0]) if outs else one(given)
            for name in made:
                for found in (vector[name], y, again, into):
                    assert found.dtype == wanted[name].dtype
                    assert (found == wanted[name]).all()
            assert given is None or (given == before).all()
