"""Reversible blocks: what backward needs is rebuilt from the block's outputs, by the inverse."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from linop.backends.autograd.functions import checkpoint_context
from linop.errors import ArgumentError, BackendError
from linop.strategies.memory.chain import buffers_kept

Pair = tuple[Tensor, Tensor]


class Reversible(torch.nn.Module):
    """``y1 = x1 + f(x2)``, ``y2 = x2 + g(y1)``: the matrix ``[1 0; G 1] [1 F; 0 1]``, whose inverse
    is the same additions with -1 (Gomez et al. 2017, "The reversible residual network").

    Takes a pair of tensors and returns one, so that blocks make a `torch.nn.Sequential`. Autograd
    keeps nothing of `f` and `g`, nor of the blocks before: at the backward of a block its inputs
    are computed from its outputs, and with them, once, what autograd had saved. Of a chain only the
    last pair is kept, whatever its depth. Random numbers are drawn as before, from the restored
    state of torch's generator for the CPU, autocast is as it was, and buffers that the first
    computation changed (running statistics of norms) are changed once; operators of linop inside
    are not called again, but their results are kept. Between blocks the two may be swapped.

    Inputs are rebuilt to rounding, with an error that grows along the chain.

    Args:
        f, g: modules, whose result has the shape of their input. They must not keep state between
            calls that changes what they compute.

    Raises:
        ArgumentError: from a call, the input is no pair of tensors, or f or g gives another shape.
        BackendError: from backward, an output was changed in place, f or g computes something else
            than before, or with other parameters (`torch.func.functional_call`), or gradients of
            gradients are asked for.

    Example:
        >>> block = strategies.Reversible(torch.nn.Linear(2, 2), torch.nn.Tanh())
        >>> x1, x2 = torch.ones(1, 2), torch.zeros(1, 2)
        >>> y1, y2 = block((x1, x2))
        >>> torch.equal(y2, x2 + torch.tanh(y1))
        True
        >>> found = block.inverse((y1, y2))
        >>> [torch.allclose(x, again, atol=1e-6) for x, again in zip((x1, x2), found)]
        [True, True]
    """

    def __init__(self, f: Any, g: Any) -> None:
        super().__init__()
        if not (callable(f) and callable(g)):
            raise ArgumentError(
                f"Reversible: two functions or modules expected, given {f!r}, {g!r}"
            )
        self.f, self.g = f, g

    def forward(self, pair: Pair) -> Pair:
        """The outputs."""
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ArgumentError("Reversible: a pair of tensors expected, as (x1, x2)")
        x1, x2 = pair
        frame = _Frame(self.f, self.g) if torch.is_grad_enabled() else None
        with nullcontext() if frame is None else frame.recorded(0, x2):
            of_x2 = _applied(self.f, x2, x1)
        y1 = x1 + of_x2
        with nullcontext() if frame is None else frame.recorded(1, y1):
            of_y1 = _applied(self.g, y1, x2)
        y2 = x2 + of_y1
        if frame is not None:
            frame.close((x1, x2), (y1, y2))
        return y1, y2

    @torch.no_grad()
    def inverse(self, pair: Pair) -> Pair:
        """The inputs that give these outputs, to rounding."""
        y1, y2 = pair
        x2 = y2 - self.g(y1)
        return y1 - self.f(x2), x2


class _Frame:
    """A call of a block, and what its backward needs of it."""

    def __init__(self, *functions: Any) -> None:
        self._functions = functions
        self._counts, self._saved = [0, 0], [dict[int, Tensor](), dict[int, Tensor]()]
        self._states: list[Tensor | None] = [None, None]
        self._wanted = [True, True]  # the input's gradient: it decides what autograd saves
        self._shapes: list[list[Any]] = [[], []]
        self._tensors = [_tensors_of(function) for function in functions]
        self._autocast: dict[str, Any] = {}
        self._contexts = [checkpoint_context(), checkpoint_context()]
        self._outputs: Pair | None = None
        self._versions: tuple[int, ...] = ()
        self._next: _Frame | None = None
        self._swapped = False
        self._before: weakref.ref[_Frame] | None = None

    @contextmanager
    def recorded(self, part: int, x: Tensor) -> Iterator[None]:
        """Context of the first computation of f (0) or g (1), of x: autograd saves handles."""
        self._wanted[part] = x.requires_grad
        self._shapes[part] = self._parameters(part)
        before = torch.get_rng_state()

        def pack(x: Tensor) -> Any:
            if isinstance(x, torch.nn.Parameter):
                return x
            number = self._counts[part]
            self._counts[part] += 1
            return number

        def unpack(kept: Any) -> Tensor:
            return kept if isinstance(kept, torch.Tensor) else self._saved_again(part, kept)

        self._autocast = _autocast(x.device.type)
        with self._contexts[part][0], saved_tensors_hooks(pack, unpack):
            yield
        if not torch.equal(before, torch.get_rng_state()):
            self._states[part] = before

    def close(self, inputs: Pair, outputs: Pair) -> None:
        """The block's end. If the inputs are the outputs of a block, that one no longer keeps them:
        they can be rebuilt here."""
        self._outputs = (outputs[0].detach(), outputs[1].detach())
        self._versions = tuple(y._version for y in self._outputs)
        marks: list[tuple[Any, int]] = [getattr(x, _FRAME, (None, 0)) for x in inputs]
        (before, first), (other, second) = marks
        if before is not None and before is other and first != second and before._next is None:
            before._check()
            self._before, before._next, before._outputs = weakref.ref(before), self, None
            self._swapped = first == 1
        for number, y in enumerate(outputs):
            setattr(y, _FRAME, (self, number))

    def _check(self) -> None:
        assert self._outputs is not None
        if tuple(y._version for y in self._outputs) != self._versions:
            raise BackendError(
                "Reversible: an output was changed in place; inputs cannot be rebuilt from it. "
                "Change a copy"
            )

    def _saved_again(self, part: int, number: int) -> Tensor:
        if torch.is_grad_enabled():
            raise BackendError("Reversible: no gradients of gradients (create_graph=True)")
        if number not in self._saved[part]:
            self._rebuild()
        if number not in self._saved[part]:
            raise BackendError(
                "Reversible: f or g saved other tensors when it was called again; functions that "
                "compute the same at each call expected"
            )
        return self._saved[part].pop(number)

    def _rebuild(self) -> None:
        """Compute the inputs, and all that autograd had saved."""
        if self._outputs is None:
            assert self._next is not None
            self._next._rebuild()
            self._next._forget()
        self._check()
        assert self._outputs is not None
        y1, y2 = self._outputs
        x2 = y2 - self._again(1, y1)
        x1 = y1 - self._again(0, x2)
        if self._next is not None:
            self._outputs = None
        before = None if self._before is None else self._before()
        if before is not None:
            before._outputs = (x2, x1) if self._swapped else (x1, x2)
            before._versions = tuple(x._version for x in before._outputs)

    def _parameters(self, part: int) -> list[Any]:
        return [p.shape for p in self._functions[part].parameters()]

    def _again(self, part: int, x: Tensor) -> Tensor:
        """Result of f or g, while what autograd saves is kept."""
        if self._shapes[part] != self._parameters(part):
            raise BackendError(
                "Reversible: parameters of f or g have other shapes than in forward; if they are "
                "sharded, call fully_shard for f and g, which are called again in backward, and "
                "not for the block"
            )
        saved = self._saved[part]
        saved.clear()
        function, known = self._functions[part], self._tensors[part]
        if not all(map(operator.is_, _tensors_of(function), known)):
            raise BackendError(
                "Reversible: f or g has other parameters or buffers than when it was called first, "
                "as by torch.func.functional_call; call modules with their own"
            )
        buffers = (x for x in known if not isinstance(x, torch.nn.Parameter))

        def pack(tensor: Tensor) -> Any:
            if not isinstance(tensor, torch.nn.Parameter):
                # A detached tensor, for the result's graph is not to live.
                saved[len(saved)] = tensor.detach()
            return None

        state = self._states[part]
        with torch.random.fork_rng(devices=[], enabled=state is not None), self._contexts[part][1]:
            if state is not None:
                torch.set_rng_state(state)
            cast = torch.autocast(**self._autocast)
            # Nothing is unpacked.
            hooks = saved_tensors_hooks(pack, lambda _: None)  # type: ignore[arg-type,return-value]
            with torch.enable_grad(), hooks, cast:
                given = x.detach().requires_grad_(self._wanted[part])
                with buffers_kept(buffers):
                    result: Tensor = function(given)
        return result.detach()

    def _forget(self) -> None:
        for saved in self._saved:
            saved.clear()


_FRAME = "linop_reversible"
"""Attribute of outputs: the call that they are of, and their number."""


def _tensors_of(function: Any) -> list[Tensor]:
    """Parameters and buffers of a module."""
    if not isinstance(function, torch.nn.Module):
        return []
    return [*function.parameters(), *function.buffers()]


def _autocast(device: str) -> dict[str, Any]:
    """Autocast as it is now, as arguments of `torch.autocast`."""
    return {
        "device_type": device,
        "dtype": torch.get_autocast_dtype(device),
        "enabled": torch.is_autocast_enabled(device),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


def _applied(function: Any, x: Tensor, other: Tensor) -> Tensor:
    before = x._version
    result: Tensor = function(x)
    if x._version != before:
        raise ArgumentError("Reversible: f or g changes its input in place; change a copy")
    if result.shape != other.shape:
        raise ArgumentError(
            f"Reversible: of an input of shape {tuple(x.shape)} a result of shape "
            f"{tuple(result.shape)}; {tuple(other.shape)} expected, to be added"
        )
    return result
