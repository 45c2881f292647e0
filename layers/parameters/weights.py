"""Parameters and buffers as layers make them when they are constructed: drawn as by the sequential
layer, registered in blocks. `linop.layers.parameters.initialise` fills them anew for users."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import torch

from linop.backends import Backend
from linop.backends.threads.backend import Thread
from linop.layers.agreement.input_agreement import agreement_of
from linop.layers.layer import Layer
from linop.spaces.tensor import TensorSpace

_ONE_AT_A_TIME = threading.Lock()


def drawn(layer: Layer, make: Callable[[], Any]) -> Any:
    """Result of `make`, which draws at random, as in a sequential program; equal on all workers
    whose generators are in the same state. Collective.

    Workers that are threads of one process share a generator: each draws from the state at the
    call, and the generator advances once.
    """
    processes = _processes(layer)
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
    block = None
    if layer.worker in space.partition:
        # A copy, so that the whole parameter can be freed.
        values = whole.detach()[space.slices(layer.worker)].clone(
            memory_format=torch.contiguous_format
        )
        block = torch.nn.Parameter(values, whole.requires_grad)
    layer.register_parameter(name, block)


def hold_buffer(layer: Layer, name: str, space: TensorSpace, whole: Any) -> None:
    """Register this worker's block of a buffer, a copy; None on workers that hold none."""
    layer.spaces[name] = space
    block = None
    if layer.worker in space.partition:
        block = whole.detach()[space.slices(layer.worker)].clone()
    layer.register_buffer(name, block)
