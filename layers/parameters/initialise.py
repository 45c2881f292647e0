"""For users, after construction: parameters filled by an initialiser as the sequential layer's are;
and seeds for threads. Layers make theirs by `linop.layers.parameters.weights`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from linop.errors import ArgumentError
from linop.layers.agreement.input_agreement import program_backend
from linop.layers.layer import Layer
from linop.layers.parameters.weights import filled_anew, shares_a_process


@torch.no_grad()
def initialize(
    layer: Layer, name: str, init: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    """Fill a parameter as an initialiser fills the sequential layer's: it is given the whole
    tensor, with its fan, and every worker takes its block. Collective, also for workers without a
    block.

    Every worker takes what the whole tensor takes from its generator, so generators in the same
    state stay so, and equal seeds give the values of the sequential layer, on any partition. Of
    `torch.nn.init`'s functions that draw each element by itself (not `orthogonal_`, `sparse_`,
    `trunc_normal_`), a worker keeps its block alone; of others it makes the whole tensor.

    Args:
        layer: a layer of linop.layers.
        name: of the parameter, as "weight".
        init: a function of `torch.nn.init`, or any that fills a tensor in place.
        args, kwargs: its arguments after the tensor.

    Raises:
        ArgumentError: the layer has no such parameter; on every worker. Whatever `init` raises.

    Example:
        >>> P = linop.Partition((1, 2))
        >>> def main(backend):
        ...     linear = layers.Linear(P, 4, 2, bias=False)  # two columns on each
        ...     layers.initialize(linear, "weight", torch.nn.init.eye_)
        ...     return linear.weight.tolist()
        >>> linop.launch(main, workers=2)
        [[[1.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]]
        >>> torch.nn.init.eye_(torch.empty(2, 4)).tolist()
        [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
    """
    if not isinstance(layer, Layer):
        kind = type(layer).__name__
        raise ArgumentError(
            f"initialize: a layer of linop.layers expected, given a {kind}; its parameters are "
            f"whole: call the initialiser with them"
        )
    if name not in layer.spaces or name not in layer._parameters:
        there = [n for n in layer.spaces if n in layer._parameters]
        raise ArgumentError(f"initialize: {layer._name} has no parameter {name!r}; it has {there}")
    space, mine = layer.spaces[name], layer._parameters[name]
    kind = None if mine is None else (mine.dtype, mine.device.type)
    # Values drawn depend on dtype and device, which only workers with a block know.
    said = layer._agreement.gather_objects(kind, "initialize", layer._name)
    dtype, device = next(one for one in said if one is not None)

    def make() -> Any:
        whole = torch.empty(space.global_shape, dtype=dtype, device=device)
        init(whole, *args, **kwargs)
        return whole if packing is None else packing.packed(whole)

    packing = getattr(layer, "packings", {}).get(name)
    by_element = init.__module__ == "torch.nn.init" and "generator" not in kwargs
    filled_anew(layer, name, make, by_element and packing is None)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context in which this worker draws from a generator of its own, started at a seed: plain
    modules constructed inside are equal on all workers with the same seed.

    Unlike after `torch.manual_seed`, torch's generator is restored at the end; and workers that are
    threads are independent. They share torch's generator otherwise, and plain modules that they
    construct at the same time get different values in each run, whatever the seed.

    Raises:
        ArgumentError: on threads, a function inside draws from torch's generator, and takes no
            other: dropout, or `torch.rand_like`.

    Example:
        >>> def main(backend):
        ...     with layers.seeded(0):
        ...         return torch.nn.Linear(4, 2).weight
        >>> one, other = linop.launch(main, workers=2)
        >>> torch.equal(one, other)
        True
    """
    if shares_a_process(program_backend()):
        with _Own(seed):
            yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


class _Own(TorchFunctionMode):
    """Mode in which random functions of this thread draw from generators of its own, one for each
    type of device. It adds 0.8 µs to every call of a torch function."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[str, Any] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name in _REFUSED:
            raise ArgumentError(
                f"linop.layers.seeded: {name} draws from torch's generator, which threads share; "
                f"call it outside, or draw with one of {', '.join(GENERATED[:4])}"
            )
        if name in GENERATED and kwargs.get("generator") is None:
            kind = self._kind(args, kwargs)
            if kind != "meta":  # where nothing is drawn
                kwargs = {**kwargs, "generator": self._generator(kind)}
        return func(*args, **kwargs)

    def _kind(self, args: Any, kwargs: dict[str, Any]) -> str:
        """Type of the device that a function draws on."""
        values = (*args, *kwargs.values())
        given = next((x for x in values if isinstance(x, torch.Tensor)), None)
        device = kwargs.get("device") or torch.get_default_device()
        kind: str = torch.device(device).type if given is None else given.device.type
        return kind

    def _generator(self, kind: str) -> Any:
        if kind not in self._generators:
            self._generators[kind] = torch.Generator(kind).manual_seed(self._seed)
        return self._generators[kind]


GENERATED = (
    "rand",
    "randn",
    "randint",
    "randperm",
    "normal",
    "bernoulli",
    "multinomial",
    "poisson",
    "uniform_",
    "normal_",
    "random_",
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    # Of torch.nn.init: a mode sees it as one function.
    "kaiming_uniform_",
)
"""Functions that take a generator."""
_REFUSED = (
    "rand_like",
    "randn_like",
    "randint_like",
    "dropout",
    "alpha_dropout",
    "feature_alpha_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "rrelu",
    "gumbel_softmax",
)
