"""Parameters and buffers as layers make them when they are constructed: drawn as by the sequential
layer, registered in blocks. `linop.layers.parameters.initialise` fills them anew for users."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from linop.backends import Backend
from linop.backends.threads.backend import Thread
from linop.errors import ArgumentError
from linop.layers.agreement.input_agreement import agreement_of
from linop.layers.layer import Layer
from linop.layers.parameters.draws import (
    Fill,
    Recorder,
    Target,
    materialise,
    recorded_fills,
    replay,
)
from linop.spaces.tensor import TensorSpace

_ONE_AT_A_TIME = threading.Lock()


def drawn(layer: Layer, make: Callable[[], Any]) -> Any:
    """The sequential layer that `make` constructs; its parameters are to be held by `hold`, and
    their values are those that it would have on any worker whose generator is in the same state.
    Collective.

    It is on the meta device: when the layer's construction ends, this worker's blocks are drawn
    (`linop.layers.parameters.draws`). If it fills its parameters in other ways than torch's layers
    do, every worker makes the whole.
    """
    processes = _processes(layer)
    found = recorded_fills(make)
    if found is None:
        return _in_turn(layer, processes, make)
    made, recorder = found
    layer.__dict__["_unfinished"] = _Unfinished(layer, recorder, processes)
    return made


class _Unfinished:
    """Parameters that `hold` has registered, and whose values are drawn when it is called."""

    def __init__(self, layer: Layer, recorder: Recorder, processes: Sequence[str]) -> None:
        self._layer, self._recorder, self._processes = layer, recorder, processes
        self._held: list[tuple[str, Tensor]] = []

    def block(self, name: str, space: TensorSpace, whole: Any) -> Tensor | None:
        """Memory for this worker's block of a parameter; None if its values are there already."""
        device = self._recorder.device_of(whole)
        if device is None:
            return None
        self._held.append((name, whole))
        shape = (
            space.local_shape(self._layer.worker) if self._layer.worker in space.partition else 0
        )
        return torch.empty(shape, dtype=whole.dtype, device=device)

    def __call__(self) -> None:
        layer, self._layer.__dict__["_fills"] = self._layer, self._recorder.fills(self._held)
        devices = {name: self._recorder.device_of(whole) for name, whole in self._held}
        fill_blocks(layer, self._processes, {}, devices)


def fill_blocks(
    layer: Layer,
    processes: Sequence[str],
    dtypes: Mapping[str, torch.dtype],
    devices: Mapping[str, Any],
) -> None:
    """Draw the values of a layer's blocks, from torch's generator; those on the meta device have
    none, and take nothing of the generator. Collective.

    Args:
        processes: of each worker.
        dtypes: of parameters, by name, where they are not those of the layer's construction.
        devices: of parameters, by name.
    """
    cpu = torch.device("cpu")

    def target_of(fill: Fill) -> Target:
        block = layer._parameters.get(fill.name)
        here = block is not None
        where = layer.spaces[fill.name].slices(layer.worker) if here else ()
        dtype, device = dtypes.get(fill.name, fill.dtype), devices.get(fill.name, cpu)
        return Target(block, where, dtype, device)

    fills: Sequence[Fill] = layer.__dict__.get("_fills", ())
    real = [f for f in fills if devices.get(f.name, cpu).type != "meta"]
    if any(fill.random for fill in fills):  # the same on all workers, whose devices may differ
        _in_turn(layer, processes, lambda: replay(real, target_of))
    else:
        replay(real, target_of)


def reset_parameters(layer: Layer) -> None:
    """See `Layer.reset_parameters`."""
    names = [name for name in layer.spaces if name in layer._parameters]
    if not names and not layer.constants:
        return
    fills: Sequence[Fill] = layer.__dict__.get("_fills", ())
    known = {fill.name for fill in fills} | set(layer.constants)
    for name in names:
        if name not in known:
            raise ArgumentError(
                f"{layer._name}: reset_parameters: {name!r} was not drawn by this layer; fill it "
                f"with linop.layers.initialize(layer, {name!r}, init)"
            )
    agreement = agreement_of(layer.backend)
    materialise(layer, layer.backend.arrays.device)
    own = {n: (p.dtype, p.device.type) for n, p in layer._parameters.items() if p is not None}
    said = agreement.gather_objects((process(), own), "reset_parameters of", layer._name)
    everybodys = {name: kind for _, theirs in said for name, kind in theirs.items()}
    dtypes = {name: dtype for name, (dtype, _) in everybodys.items()}
    devices = {name: torch.device(device) for name, (_, device) in everybodys.items()}
    fill_blocks(layer, [process for process, _ in said], dtypes, devices)
    with torch.no_grad():
        for name, value in layer.constants.items():
            x = layer._parameters.get(name, layer._buffers.get(name))
            if x is not None:
                x.fill_(value)


def filled_anew(layer: Layer, name: str, make: Callable[[], Tensor], by_element: bool) -> None:
    """Fill this worker's block of a parameter. Collective.

    Args:
        make: makes the whole parameter, and draws its elements.
        by_element: True if these may be drawn without memory for all (`recorded_fills`).
    """
    processes, mine = _processes(layer), layer._parameters[name]
    found = recorded_fills(make) if by_element else None
    where = layer.spaces[name].slices(layer.worker) if mine is not None else ()
    if found is None:
        whole = _in_turn(layer, processes, make)
        if mine is not None:
            mine.copy_(whole[where])
        return
    made, recorder = found
    device = recorder.device_of(made)
    assert device is not None
    target = Target(mine, where, made.dtype, device)
    _in_turn(layer, processes, lambda: replay(recorder.fills(), lambda _: target))


def _in_turn(layer: Layer, processes: Sequence[str], make: Callable[[], Any]) -> Any:
    """Result of `make`, which draws from torch's generator. Workers that are threads of one process
    share it: each draws from the state at the call, and it advances once. Collective."""
    if len(set(processes)) == len(processes):
        return make()
    agreement = agreement_of(layer.backend)
    state = torch.get_rng_state()
    agreement.gather_objects(None)  # no worker draws before all have read the state
    with _ONE_AT_A_TIME:
        torch.set_rng_state(state)
        made = make()
    agreement.gather_objects(None)
    return made


def first_of_process(layer: Layer) -> bool:
    """True if this worker is the first of its process: the one that draws from the generator of
    the process. Collective."""
    return layer.worker == _processes(layer).index(process())


def shares_a_process(backend: Backend) -> bool:
    """True if workers are threads, which share torch's generator."""
    return (backend.workers or 1) > 1 and isinstance(backend, Thread)


def _processes(layer: Layer) -> list[str]:
    """The process of each worker. Collective: it also compares the layer that is constructed."""
    agreement = agreement_of(layer.backend)
    layer._number, said = agreement.agree_on_construction(layer.description(), process())
    return said


def process() -> str:
    """This worker's process."""
    return f"{socket.gethostname()} {os.getpid()}"


def hold(layer: Layer, name: str, space: TensorSpace, whole: Any) -> None:
    """Register this worker's block of a parameter, a copy; None on workers that hold none, as torch
    does for absent parameters.

    Args:
        space: of the global parameter.
        whole: the sequential layer's parameter.
    """
    layer.spaces[name] = space
    unfinished = layer.__dict__.get("_unfinished")
    values = None if unfinished is None else unfinished.block(name, space, whole)
    if layer.worker not in space.partition:
        layer.register_parameter(name, None)
        return
    if values is None:
        # A copy, so that the whole parameter can be freed.
        values = whole.detach()[space.slices(layer.worker)].clone(
            memory_format=torch.contiguous_format
        )
    layer.register_parameter(name, torch.nn.Parameter(values, whole.requires_grad))


def hold_buffer(layer: Layer, name: str, space: TensorSpace, whole: Any) -> None:
    """Register this worker's block of a buffer, a copy; None on workers that hold none."""
    layer.spaces[name] = space
    block = None
    if layer.worker in space.partition:
        block = whole.detach()[space.slices(layer.worker)].clone()
    layer.register_buffer(name, block)
