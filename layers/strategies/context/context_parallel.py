"""Context parallelism: each worker of an axis has some tokens of every sequence, and attention,
which alone looks at several tokens, is that of the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from linop.backends import use
from linop.errors import ArgumentError, ShapeError, expect
from linop.layers.attention.attention import METHODS, scaled_dot_product_attention
from linop.layers.attention.compiled import compiled_attention, place_of
from linop.layers.attention.cuts import Segments, in_order, positions, zigzag
from linop.layers.layer import Function, Layer
from linop.operators.collectives import all_gather
from linop.spaces.decomposition import REPLICATED
from linop.spaces.decomposition import Axis as Role
from linop.spaces.partition import balanced
from linop.spaces.tensor import TensorSpace
from linop.strategies.context.modules import attended_heads, check_tokens, window_of
from linop.strategies.interrupted import end_if_interrupted
from linop.strategies.mesh import Axis


class ContextParallel:
    """The workers of an axis, each with a part of the tokens of every sequence.

    Under ``with cp:``, and in the modules that `parallelize` was called for,
    `torch.nn.functional.scaled_dot_product_attention` is this one's: of queries, keys and values of
    this worker's tokens, with those of the other workers.

    Args:
        axis: of a `Mesh`.
        method: "ring": keys and values go around the workers, and a worker has three blocks of
            them at most: its own, one that it computes with, one that arrives. "ulysses": an
            all-to-all cuts heads instead of the sequence, and another one the sequence again; as
            many workers have something to do as there are heads.
        zigzag: True: each worker has two chunks of the sequence, the w-th of 2 P and the w-th last,
            so that causal attention is as much work on all; False: blocks in the order of the
            sequence. By default True for the ring, and False for "ulysses".

    Raises:
        ArgumentError: there is no such method.

    Example:
        Each worker has four of eight tokens, and attention is that of all eight:

        >>> query, key, value = torch.randn(3, 1, 2, 8, 4, dtype=torch.float64)
        >>> attention = torch.nn.functional.scaled_dot_product_attention
        >>> whole = attention(query, key, value, is_causal=True)
        >>> def program(backend):
        ...     cp = strategies.ContextParallel(strategies.Mesh(cp=2)["cp"])
        ...     with cp:
        ...         mine = attention(*(cp.shard(x, 2) for x in (query, key, value)), is_causal=True)
        ...     return cp.positions(8).tolist(), torch.allclose(mine, cp.shard(whole, 2))
        >>> linop.launch(program, workers=2)
        [([0, 1, 6, 7], True), ([2, 3, 4, 5], True)]
    """

    hooks_are_ours = True
    """`full_module` leaves them out."""

    def __init__(self, axis: Axis, method: str = "ring", zigzag: bool | None = None) -> None:
        self.axis = expect("ContextParallel", axis, Axis)
        if method not in METHODS:
            raise ArgumentError(
                f"ContextParallel: method={method!r}; one of {', '.join(METHODS)} expected"
            )
        self.method = method
        self.zigzag = method == "ring" if zigzag is None else zigzag
        self._gathers: dict[int, _Whole] = {}
        self._modes: list[_Attention] = []
        self._windows: list[int | None] = []
        self._where = place_of(axis.backend)

    def __deepcopy__(self, memo: object) -> ContextParallel:
        return self  # of copied nets, too

    # Tokens

    def _cut(self, length: int) -> list[Segments]:
        n = self.axis.size
        return zigzag(length, n) if self.zigzag else in_order(balanced(length, n))

    def positions(self, length: int) -> Tensor:
        """Positions in a sequence of so many tokens of those that this worker has, in its order: an
        int64 tensor, as rotary and learned embeddings take it."""
        return torch.tensor(positions(self._cut(length)[self.axis.index]), dtype=torch.int64)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This worker's tokens of a tensor that all workers have. Nothing is sent.

        Args:
            x: such as token indices, targets, or the rows of a mask.
            dim: the dimension of the sequence.
        """
        return x.index_select(dim, self.positions(x.shape[dim]).to(x.device))

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole sequence, on every worker, of a tensor of which each has its tokens.
        Collective; the gradient is this worker's part, without messages, since all workers compute
        the same of the whole (`linop.REPLICATED`).

        Args:
            dim: the dimension of the sequence.

        Raises:
            ShapeError, DTypeError: blocks do not make up a tensor; on every worker.
        """
        if dim not in self._gathers:
            with use(self.axis.backend):
                self._gathers[dim] = _Whole(self.axis, dim)
        whole: Tensor = self._gathers[dim](x)
        if not self.zigzag:
            return whole
        order = [p for part in self._cut(whole.shape[dim]) for p in positions(part)]
        where = torch.tensor(order, device=whole.device).argsort()
        return whole.index_select(dim, where)

    # Attention

    def scaled_dot_product_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention over the whole sequence. Collective.

        Args:
            query, key, value: of this worker's tokens, of shape (batch, heads, tokens, features);
                `enable_gqa` allows fewer heads of keys and values.
            attn_mask, dropout_p, is_causal, scale: as of
                `linop.layers.scaled_dot_product_attention`.

        Returns:
            This worker's rows of the result.

        Raises:
            LinopError: as `linop.layers.scaled_dot_product_attention`.
        """
        device = query.device.type
        if torch.is_autocast_enabled(device):
            kind = torch.get_autocast_dtype(device)
            query, key, value = (_cast(x, kind) for x in (query, key, value))
            attn_mask = None if attn_mask is None else _cast(attn_mask, kind)
        window = self._windows[-1] if self._windows else None
        if torch.compiler.is_dynamo_compiling():
            given = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            places = self.axis.partition, (-2,), self.method, self.zigzag, window
            return compiled_attention(self._where, *given, *places)
        try:
            with use(self.axis.backend):
                return scaled_dot_product_attention(
                    query,
                    key,
                    value,
                    attn_mask,
                    dropout_p,
                    is_causal,
                    scale,
                    enable_gqa,
                    P_x=self.axis.partition,
                    x_axes=(-2,),
                    method=self.method,
                    zigzag=self.zigzag,
                    window=window,
                )
        except ShapeError as error:
            if attn_mask is None or not 1 < attn_mask.shape[-1] == key.shape[-2]:
                raise
            raise ShapeError(
                f"{error}. attn_mask has as many columns as this worker has keys; those of all "
                f"keys expected, in the order of the sequence, and not as a model of transformers "
                f"makes them of this worker's tokens, for padding or a window"
            ) from error

    def __enter__(self) -> ContextParallel:
        self._modes.append(_Attention(self.scaled_dot_product_attention))
        self._modes[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._modes.pop().__exit__(*error)

    def parallelize(self, net: torch.nn.Module) -> torch.nn.Module:
        """The net, whose calls are under ``with cp:`` from now on; those of its parts, too, so that
        they are recomputed as they were computed (`torch.utils.checkpoint`). Parameters stay as
        they are: the gradients of all workers are to be summed, as `DataParallel` does.

        Raises:
            ArgumentError: a module of it looks at several tokens in another way: attention of
                transformers that is not torch's, convolutions of sequences, recurrent ones.
        """
        check_tokens(expect("ContextParallel.parallelize", net, torch.nn.Module))
        for module in net.modules():
            module.register_forward_pre_hook(self._before)
            module.register_forward_hook(self._after, always_call=True)
            end_if_interrupted(module, self._open, self._leave)
        return net

    def _open(self, module: torch.nn.Module) -> int:
        del module
        return len(self._windows)

    def _leave(self, module: torch.nn.Module) -> None:
        self._after(module, None, None)

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        del args
        own = window_of(module)
        inherited = self._windows[-1] if self._windows else None
        says = own is not None or "sliding_window" in vars(module)
        self._windows.append(own if says else inherited)
        self.__enter__()

    def _after(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        del module, args, result
        self._windows.pop()
        self.__exit__(None, None, None)

    def __repr__(self) -> str:
        return (
            f"ContextParallel({self.axis.name} of {self.axis.size}, method={self.method!r}, "
            f"zigzag={self.zigzag})"
        )


def _cast(x: Tensor, kind: torch.dtype) -> Tensor:
    """A tensor as autocast has it, which leaves doubles and masks of bool as they are."""
    return x.to(kind) if x.is_floating_point() and x.dtype is not torch.float64 else x


_SHORT = {"query": "q", "key": "k", "value": "v"}


class _Attention(TorchFunctionMode):
    """Mode of a thread in which attention is another function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()

        def attention_of_parts(q: Tensor, k: Tensor, v: Tensor, *given: Any, **named: Any) -> Any:
            # For other modes it is a function of torch, as those that follow layouts.
            if has_torch_function((q, k, v)):
                every = (q, k, v)
                return handle_torch_function(attention_of_parts, every, *every, *given, **named)
            return function(q, k, v, *given, **named)

        self._function = attention_of_parts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            named = {_SHORT.get(name, name): x for name, x in (kwargs or {}).items()}
            return self._function(*args, **named)
        if func is torch.nn.functional.multi_head_attention_forward:  # what it calls is not seen
            return attended_heads(self._function, *args, **(kwargs or {}))
        if func is torch.Tensor.unflatten:  # torch's compiler follows it as a method alone
            return args[0].unflatten(*args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Whole(Layer):
    """All blocks along a dimension, concatenated in the order of the workers, on each of them."""

    floating = False

    def __init__(self, axis: Axis, dim: int) -> None:
        super().__init__([axis.partition], axis.partition)
        self.dim = dim

    def axes(self, number: int, ndim: int) -> list[Role]:
        return [self.dim % ndim if ndim else 0]

    def output_axes(self, grid: Any, ndim: int) -> list[Role]:
        return [REPLICATED]

    def bind(self, *inputs: TensorSpace) -> Function:
        return self.moved(all_gather, inputs[0], 0, REPLICATED, of=0)
