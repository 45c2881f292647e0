"""Random numbers in a call of a spatial module: the same on all its workers."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode

from linop.errors import PartitionError
from linop.layers.dropout import BITS, random_bits
from linop.layers.parameters.generator import from_seed_on, seed_of
from linop.strategies.space.cut_tensor import CutTensor
from linop.strategies.space.opening import opened
from linop.strategies.space.places import place

_CHECKPOINT = torch.utils.checkpoint.__file__
_OPENED = frozenset(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout gumbel_softmax"
    " rrelu multi_head_attention_forward".split()
)
"""Functions that torch writes in Python, which call those that draw."""
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
        """A new key.

        Raises:
            PartitionError: what draws is computed again in backward, where it would draw others.
        """
        if _in_a_checkpoint():
            raise PartitionError(
                f"{place()}random numbers in torch.utils.checkpoint, in a module that is cut in "
                f"space: they could not be repeated in backward; draw them outside of checkpoints"
            )
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
        if kwargs.get("generator") is not None or any(
            isinstance(x, CutTensor) for x in (*args, *kwargs.values())
        ):
            return func(*args, **kwargs)
        if name in _OPENED and (body := opened(func)) is not None:
            with self.resumed():
                return body(*args, **kwargs)
        if name not in _FUNCTIONS or _is_still(name, args, kwargs):
            return func(*args, **kwargs)
        if name.rstrip("_") in ("dropout", "feature_dropout"):
            return _of_whole(name, self.next(), *args, **kwargs)
        device = next((x.device for x in args if isinstance(x, torch.Tensor)), None)
        given = device or torch.device(kwargs.get("device") or torch.get_default_device())
        with from_seed_on(self.next(), given):
            return func(*args, **kwargs)

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Context in a function that this mode was given, in which it is given others again."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)


def _in_a_checkpoint() -> bool:
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        frame = frame.f_back
    return False


def resumed() -> AbstractContextManager[None]:
    """That of the call that this thread is in."""
    return nullcontext() if _HERE.draws is None else _HERE.draws.resumed()


def _of_whole(name: str, key: int, x: Tensor, p: float, train: bool = True) -> Tensor:
    """Dropout of a whole tensor, by the same mask as of one that is cut."""
    factor = kept(name, key, x, tuple(x.shape), [slice(0, n) for n in x.shape], p)
    return x.mul_(factor) if name.endswith("_") else x * factor


def kept(
    name: str, key: int, x: Tensor, shape: Sequence[int], where: Sequence[slice], p: float
) -> Tensor:
    """The factors of dropout for a block: zeros with probability p, and 1 / (1 - p).

    Args:
        name: of the function: "feature…" drops whole channels.
        key: of the draw.
        x: the block.
        shape, where: of the whole tensor, and the block's indices in it.
    """
    seed = torch.tensor(key - 2**64 if key >= 2**63 else key, device=x.device)
    dims = 2 if name.startswith("feature") else None
    bits = random_bits(seed, shape, where, dims)
    return (bits >= int(p * 2**BITS)).to(x.dtype).mul_(1 / (1 - p) if p < 1 else 0)


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
