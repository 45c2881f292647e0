"""All faults, by the part of linop that they are planted in."""

from __future__ import annotations

from collections.abc import Mapping

from mutation.fault import Fault
from mutation.faults import (
    algebra,
    blocks,
    calls,
    data_parallel,
    experts,
    krylov,
    loops,
    pictures,
    proximal,
    running,
    saved_memory,
    schedules,
    simulation,
    strategies,
    tensor_parallel,
    tops,
)

ROOMS: Mapping[str, tuple[Fault, ...]] = {
    "spaces": algebra.SPACES,
    "normal form": algebra.NORMAL_FORM,
    "operators": algebra.OPERATORS,
    "blocks": blocks.BLOCKS,
    "Krylov methods": krylov.KRYLOV,
    "time loops": loops.LOOPS,
    "proximal maps": proximal.PROXIMAL,
    "planning": running.PLANNING,
    "verifier": running.VERIFIER,
    "pictures": pictures.PICTURES,
    "schedules": schedules.SCHEDULES,
    "simulation": simulation.SIMULATION,
    "execution": running.EXECUTION,
    "messages": running.MESSAGES,
    "windows": running.WINDOWS,
    "collectives": running.COLLECTIVES,
    "device": running.DEVICE,
    "agreement": running.AGREEMENT,
    "calls of layers": calls.CALLS,
    "autograd": tops.AUTOGRAD,
    "layers": tops.LAYERS,
    "strategies": strategies.STRATEGIES,
    "data parallel": data_parallel.DATA_PARALLEL,
    "experts": experts.EXPERTS,
    "saved memory": saved_memory.SAVED_MEMORY,
    "tensor parallel": tensor_parallel.TENSOR_PARALLEL,
    "checkpoints": tops.CHECKPOINTS,
    "testing": tops.TESTING,
}

FAULTS = tuple(fault for faults in ROOMS.values() for fault in faults)
"""From the ground floor to the top."""

ROOM_OF = {fault.name: room for room, faults in ROOMS.items() for fault in faults}
