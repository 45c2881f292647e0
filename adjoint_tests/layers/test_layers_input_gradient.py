"""Agreement of all workers on sending a layer's input gradient back."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import linop  # noqa: E402
from linop import Partition, layers  # noqa: E402
from linop.backends import Backend  # noqa: E402
from linop.backends.autograd.bridge import Bridge  # noqa: E402


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("wanting", [[], [0], [1], [0, 1]])
def test_only_wanted_gradients_are_sent_back(
    kind: str, wanting: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient that no worker needs is not sent; one that a worker needs comes from all."""
    shape, half, options = (3, 4), 2, {"dtype": torch.float64}
    make: Any = lambda: torch.nn.Linear(4, 6, **options)  # noqa: E731
    if kind == "conv":
        shape, half = (1, 1, 10), 5
        make = lambda: torch.nn.Conv1d(1, 2, 3, padding=1, **options)  # noqa: E731
    torch.manual_seed(3)
    twin = make()
    whole = torch.randn(shape, **options).requires_grad_()
    twin(whole).sum().backward()
    applied: list[Bridge] = []
    run = Bridge.run
    monkeypatch.setattr(Bridge, "run", lambda self, x: (applied.append(self), run(self, x))[1])

    def main(backend: Backend, wanting: list[int]) -> Any:
        me = backend.worker or 0
        if kind == "linear":
            split = Partition((1, 2))
            layer: Any = layers.Linear(split, 4, 6, P_W=Partition((2, 1)), **options)
        else:
            split = Partition((1, 1, 2))
            layer = layers.Conv1d(split, 1, 2, 3, padding=1, **options)
        x = whole.detach()[..., half * me : half * me + half].clone().requires_grad_(me in wanting)
        layer(x).sum().backward()
        assert all(p.grad is not None for p in layer.parameters())
        return x.grad

    assert linop.launch(partial(main, wanting=[]), 2, backend="threads") == [None, None]
    fewest = len(applied)
    torch.manual_seed(3)
    found = linop.launch(partial(main, wanting=wanting), 2, backend="threads")
    assert len(applied) == 2 * fewest + 2 * bool(wanting)
    for worker, gradient in enumerate(found):
        assert (gradient is not None) == (worker in wanting)
        if gradient is not None:
            expected = whole.grad[..., half * worker : half * worker + half]
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
