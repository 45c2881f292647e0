"""How checks with torch's tensors run on ranks: the one way for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import linop
from linop.backends import use


def check_on(comm: Any, check: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Run a check on this rank: its backend is the first argument, and the current one meanwhile.
    torch has one thread, since ranks share the cores.

    Args:
        options: of the backend.
    """
    torch.set_num_threads(1)
    backend = linop.backends.get("mpi", comm=comm, **options)
    with use(backend):
        check(backend, *arguments)
