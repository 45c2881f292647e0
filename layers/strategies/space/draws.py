"""Random numbers in a call of a spatial module: the same on all its workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from linop.layers.parameters.generator import from_seed_on, seed_of
from linop.strategies.space.cut_tensor import CutTensor

_FUNCTIONS = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli normal multinomial"
    " poisson binomial uniform_ normal_ random_ bernoulli_ cauchy_ exponential_ geometric_"
    " log_normal_ dropout dropout_ feature_dropout feature_dropout_ alpha_dropout alpha_dropout_"
    " feature_alpha_dropout rrelu rrelu_ rrelu_with_noise rrelu_with_noise_"
    " scaled_dot_product_attention lstm gru rnn_tanh rnn_relu fractional_max_pool2d"
    " fractional_max_pool3d _sample_dirichlet _standard_gamma native_dropout".split()
)


class Draws(TorchFunctionMode):
    """Mode of a call in which functions of whole tensors that draw random numbers draw the same on
    all workers: the generator starts, for each, at a key.

    Args:
        seed: gives the seed of the call, when something is drawn first. Collective.
    """

    def __init__(self, seed: Callable[[], int]) -> None:
        super().__init__()
        self._make, self._seed, self._count = seed, 0, 0
        self._before: Any = None

    def next(self) -> int:
        """A new key."""
        if not self._count:
            self._seed = self._make()
        self._count += 1
        return seed_of(f"{self._seed} {self._count}")

    def __enter__(self) -> Draws:
        self._before, _HERE.draws = _HERE.draws, self
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _HERE.draws = self._before

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in _FUNCTIONS or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if any(isinstance(x, CutTensor) for x in (*args, *kwargs.values())) or _is_still(
            name, args, kwargs
        ):
            return func(*args, **kwargs)
        device = next((x.device for x in args if isinstance(x, torch.Tensor)), None)
        given = device or torch.device(kwargs.get("device") or torch.get_default_device())
        with from_seed_on(self.next(), given):
            return func(*args, **kwargs)


def _is_still(name: str, args: Any, kwargs: Any) -> bool:
    """True for a function that draws nothing with such arguments."""
    if "dropout" in name:
        train = args[2] if len(args) > 2 else kwargs.get("train", kwargs.get("training", True))
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        return not train or not p
    if name == "scaled_dot_product_attention":
        return not (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    return False


class _Here(threading.local):
    draws: Draws | None = None


_HERE = _Here()


def next_key() -> int | None:
    """A key of the call that this thread is in."""
    return None if _HERE.draws is None else _HERE.draws.next()
