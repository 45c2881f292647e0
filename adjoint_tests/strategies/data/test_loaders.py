"""Loaders whose parts may be empty, and passes that one worker begins alone."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from support.strategies.data.loaders import (
    is_brought_in_step,
    refuses_batches_without_rows,
    takes_structures_without_rows,
)
from support.workers import on_threads

CONTRACTS = refuses_batches_without_rows, takes_structures_without_rows, is_brought_in_step


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda one: one.__name__)
def test_on_threads(contract: Any) -> None:
    on_threads(2, contract)
