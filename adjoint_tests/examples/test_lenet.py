"""examples/lenet5.py: the network of the paper's appendix C."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from support.layers.networks import (
    has_table_1,
    lenet,
    lenet_trains_as_its_twin,
)
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

needs_digits = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None,
    reason="scikit-learn is not installed: pip install 'linop-algebra[examples]'",
)
TOLERANCE = 1e-8
"""Of losses: the issue's. Sums in another order grow in Adam, slowly."""


def test_parameters_on_threads() -> None:
    on_threads(4, has_table_1)


@needs_mpi
@pytest.mark.timeout(300)
def test_parameters_on_ranks() -> None:
    on_ranks(4, has_table_1)


@needs_digits
def test_training_on_threads() -> None:
    on_threads(4, lenet_trains_as_its_twin, "digits", 64, 10, TOLERANCE)


@needs_digits
@needs_mpi
@pytest.mark.timeout(300)
def test_training_on_ranks() -> None:
    on_ranks(4, lenet_trains_as_its_twin, "digits", 64, 10, TOLERANCE, watch=200)


@pytest.mark.skipif("LINOP_MNIST" not in os.environ, reason="LINOP_MNIST names no folder with it")
@needs_mpi
@pytest.mark.timeout(300)
def test_a_hundred_steps_on_mnist() -> None:
    on_ranks(4, lenet_trains_as_its_twin, "mnist", 64, 100, TOLERANCE, watch=200)


@needs_digits
def test_going_on_from_a_checkpoint(tmp_path: Path) -> None:
    """A sequential epoch, and a distributed one later, are two epochs."""
    whole, parts, checkpoint = (tmp_path / name for name in ("whole", "parts", "checkpoint"))
    common: dict[str, Any] = {"batch": 256, "dtype": "float64"}
    lenet.main(True, epochs=2, record=whole, plot=tmp_path / "plot.png", **common)
    lenet.main(True, epochs=1, checkpoint=checkpoint, **common)
    lenet.main(False, epochs=2, resume=True, checkpoint=checkpoint, record=parts, **common)
    wanted, found = (json.loads(file.read_text()) for file in (whole, parts))
    assert len(wanted["losses"]) == 12
    assert found["losses"] == pytest.approx(wanted["losses"], abs=TOLERANCE)
    assert found["accuracies"] == wanted["accuracies"]
    assert (tmp_path / "plot.png").stat().st_size > 1000
