"""All faults, by the part of linop that they are planted in."""

from __future__ import annotations

from collections.abc import Mapping

from mutation import algebra, running, tops
from mutation.fault import Fault

ROOMS: Mapping[str, tuple[Fault, ...]] = {
    "spaces": algebra.SPACES,
    "normal form": algebra.NORMAL_FORM,
    "operators": algebra.OPERATORS,
    "planning": running.PLANNING,
    "verifier": running.VERIFIER,
    "execution": running.EXECUTION,
    "messages": running.MESSAGES,
    "windows": running.WINDOWS,
    "collectives": running.COLLECTIVES,
    "device": running.DEVICE,
    "agreement": running.AGREEMENT,
    "autograd": tops.AUTOGRAD,
    "layers": tops.LAYERS,
    "checkpoints": tops.CHECKPOINTS,
    "testing": tops.TESTING,
}

FAULTS = tuple(fault for faults in ROOMS.values() for fault in faults)
"""From the ground floor to the top."""

ROOM_OF = {fault.name: room for room, faults in ROOMS.items() for fault in faults}
