"""Contracts of tensors and layers on a device: on the simulated one, for which tensors in main
memory stand, and on a GPU. Each contract takes a backend and the arrays of the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import linop
from linop.backends import Backend
from linop.backends.device.device_arrays import DeviceArrays
from linop.errors import ArgumentError
from support.contracts.plans import OPERATORS, arrays_of, each, part, raised, size, total
from support.device.operators import PLACED, as_dict


def tensors_go_there_and_back(backend: Backend, arrays: DeviceArrays, seed: int) -> None:
    """Results and gradients are those of the operator and its adjoint, of every dtype, from tensors
    of any strides; they are on the device."""
    import torch

    for name, make in OPERATORS.items():
        if name.endswith("several") and size(backend) == 1:
            continue
        op = make(size(backend))
        x, y = op.domain.integers(seed), op.codomain.integers(seed + 1)
        mine, other = part(op.domain, x, backend), part(op.codomain, y, backend)
        given = each(mine, lambda a: _there(arrays, np.asfortranarray(a)).requires_grad_())
        image = linop.autograd.apply(op, given, backend)
        _same(arrays, image, part(op.codomain, op(x), backend))
        pairs = zip(arrays_of(image), arrays_of(other), strict=True)
        sum((t * _there(arrays, a)).sum() for t, a in pairs).backward()
        _same(arrays, each(given, lambda t: t.grad), part(op.domain, op.H(y), backend))
    for dtype in (torch.float32, torch.complex128, torch.bfloat16, torch.int64):
        op = linop.all_reduce(
            linop.TensorSpace(
                (5,),
                linop.Partition((size(backend),)),
                linop.backends.autograd.dtypes.numpy_dtype(dtype),
                axes=(linop.COPIES,),
            )
        )
        given = torch.arange(5).to(dtype).to(arrays.device)
        image = linop.autograd.apply(op, given, backend)
        assert image.dtype is dtype and (image == size(backend) * given).all()


def tensors_lie_where_their_regions_do(backend: Backend, arrays: DeviceArrays, seed: int) -> None:
    """In main memory and on the device: results, and gradients."""
    import torch

    def placed(space: linop.Space, value: Any) -> dict[str, Any]:
        return {
            name: torch.from_numpy(array.copy()).to(arrays.of(space[name].memory).device)
            for name, array in as_dict(space, part(space, value, backend), backend).items()
        }

    for make in PLACED.values():
        op = make(size(backend))
        x, y = op.domain.integers(seed), op.codomain.integers(seed + 1)
        given = {name: t.requires_grad_() for name, t in placed(op.domain, x).items()}
        image = as_dict(op.codomain, linop.autograd.apply(op, given, backend), backend)
        other = placed(op.codomain, y)
        # The sum of terms on several devices is no tensor.
        torch.autograd.backward(list(image.values()), [other[name] for name in image])
        grads = {name: t.grad for name, t in given.items()}
        for space, found, right in (
            (op.codomain, image, op(x)),
            (op.domain, grads, op.H(y)),
        ):
            wanted = placed(space, right)
            assert list(found) == list(wanted)
            for name, tensor in found.items():
                assert tensor.device == wanted[name].device
                assert torch.equal(tensor.detach(), wanted[name]), (name, tensor, wanted[name])


def _there(arrays: DeviceArrays, array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array.copy(order="K")).to(arrays.device)


def _same(arrays: DeviceArrays, value: Any, wanted: Any) -> None:
    for one, other in zip(arrays_of(value), arrays_of(wanted), strict=True):
        assert one.device.type == arrays.device
        assert np.array_equal(one.detach().cpu().numpy(), other), (one, other)


def other_devices_are_refused(backend: Backend, arrays: DeviceArrays) -> None:
    """On every worker, with how to get there."""
    import torch

    op = total(size(backend))
    away = torch.ones(5, dtype=torch.float64, device="meta" if arrays.device == "cpu" else "cpu")
    text = raised(ArgumentError, lambda: linop.autograd.apply(op, away, backend))
    assert f"work in {arrays.memory}; move it with .to({arrays.device!r})" in text, text


def layers_work(backend: Backend, arrays: DeviceArrays) -> None:
    """A convolution over rows of an image is its twin of torch.nn, forward and back."""
    import torch

    n, here = size(backend), {"device": arrays.device, "dtype": torch.float64}
    partition = linop.Partition((1, 1, n, 1))
    twin = torch.nn.Conv2d(2, 3, 3, padding=1, **here)
    with linop.backends.use(backend):
        layer = linop.layers.Conv2d(partition, 2, 3, 3, padding=1, **here)
    with torch.no_grad():
        for parameter in (*layer.parameters(), *twin.parameters()):
            parameter.fill_(2)
    X = linop.TensorSpace((1, 2, 4 * n, 5), partition)
    x = X.integers(1)
    whole = _there(arrays, X.gather(x)).requires_grad_()
    mine = _there(arrays, part(X, x, backend)).requires_grad_()
    for _ in range(2):
        image, wanted = layer(mine), twin(whole)
        rows = slice(4 * backend.worker, 4 * backend.worker + 4)  # type: ignore[operator]
        assert image.device.type == arrays.device and torch.equal(image, wanted[:, :, rows])
    image.square().sum().backward()
    wanted.square().sum().backward()
    assert torch.equal(mine.grad, whole.grad[:, :, rows])
    wanted = dict(twin.named_parameters())
    for name, parameter in layer.named_parameters():  # of those that hold a block
        assert torch.allclose(parameter.grad, wanted[name].grad, rtol=1e-12), name


def functions_of_tensors_are_checked(backend: Backend, arrays: DeviceArrays) -> None:
    """Checks of functions of tensors in main memory, whatever the backend's arrays."""
    import torch

    for function in (torch.diff, torch.fft.rfft):
        assert linop.testing.check_adjoint(linop.testing.torch_function(function, 6), backend)


CONTRACTS: dict[Callable[..., None], list[tuple[Any, ...]]] = {
    tensors_go_there_and_back: [(3,)],
    tensors_lie_where_their_regions_do: [(3,)],
    other_devices_are_refused: [()],
    layers_work: [()],
    functions_of_tensors_are_checked: [()],
}
"""With the arguments that each is tried with."""
