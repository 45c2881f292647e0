"""torch's inert values in control messages: dtypes, shapes, devices, and small tensors."""

from __future__ import annotations

from typing import Any

import torch

from linop.backends.together.messages import adapt
from linop.errors import ArgumentError


def _named(kind: type) -> Any:
    """Function that gives the value of a class by its name in torch."""

    def found(name: Any) -> Any:
        value = vars(torch).get(str(name))
        if not isinstance(value, kind):
            raise ArgumentError(f"torch has no {kind.__name__} {name!r}")
        return value

    return found


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _data(tensor: Any) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise ArgumentError(f"a tensor of layout {tensor.layout} on {tensor.device} cannot be sent")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return plain.dtype, tuple(plain.shape), data


def _tensor(data: tuple[Any, ...]) -> Any:
    """In host memory."""
    dtype, shape, values = data
    if not values:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(values), dtype=dtype).reshape(shape)


for _kind in (torch.dtype, torch.layout, torch.memory_format):
    adapt(_kind, f"torch.{_kind.__name__}", _name, _named(_kind))
adapt(torch.Size, "torch.Size", tuple, torch.Size)
adapt(torch.device, "torch.device", str, torch.device)
adapt(torch.Tensor, "torch.Tensor", _data, _tensor)
