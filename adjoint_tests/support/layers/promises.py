"""The promises of every layer beside torch's, as an SPMD program. Needs torch.

Ranks import this module, and no test.
"""

from __future__ import annotations

from typing import Any

import torch

from linop import layers
from linop.backends import Backend
from linop.testing import assert_dot_exact
from support.contracts.plans import mine
from support.layers.cases import WIDE, Case, block, cut, made, normal, same


def keeps_promises(backend: Backend, case: Case, adjoints: bool = True) -> None:
    """The state is the twin's, and goes back and forth, also of a layer without memory; calls with
    promised shapes are the same; and each movement has its adjoint, which worker 0 looks at."""
    layer, twin = made(backend, case)
    equal(layers.gather_state(layer), twin.state_dict())
    changed = {
        k: x + 1 if x.is_floating_point() else x.clone() for k, x in twin.state_dict().items()
    }
    layers.scatter_state(layer, changed)
    equal(layers.gather_state(layer), changed)
    with torch.device("meta"):
        bare = getattr(layers, case.layer)(
            *case.partitions, *case.arguments, **case.options, **case.places, **_wide(case)
        )
    assert all(x.is_meta for x in bare.parameters())
    layers.scatter_state(bare, changed)
    operators: list[Any] = []
    applied = layer.applied
    layer.__dict__["applied"] = lambda op, of=None: (operators.append(op), applied(op, of))[1]
    x = block(cut(case.shape, case.partitions[0], case.seed), normal(case.shape, 3), backend)
    first = layer(x)
    assert torch.equal(first, bare(x))
    with layers.fixed_shapes():
        assert torch.equal(first, layer(x))
    if adjoints and mine(backend) == 0:
        for op in operators:
            assert_dot_exact(op)


def _wide(case: Case) -> dict[str, Any]:
    """The dtype, of layers that take one."""
    kind = getattr(torch.nn, case.layer)
    return {"dtype": WIDE} if "dtype" in kind.__init__.__code__.co_varnames else {}


def equal(given: Any, wanted: Any) -> None:
    """The same values under the same names."""
    assert list(given) == list(wanted)
    for name, whole in wanted.items():
        same(given[name], whole, 0.0)
