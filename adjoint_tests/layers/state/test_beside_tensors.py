"""States that are more than tensors, or of other numbers than the model's: nothing is lost."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import linop
from linop import layers
from linop.errors import ArgumentError, LinopError
from linop.layers.state.state_tensors import check_range


class Counted(torch.nn.Linear):  # type: ignore[misc]  # torch is not typed here
    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Written(torch.nn.Linear):  # type: ignore[misc]
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}more"] = torch.ones(1)


class Renamed(torch.nn.Linear):  # type: ignore[misc]
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_state_dict_post_hook(self._rename)

    @staticmethod
    def _rename(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")


FUNCTIONS: list[Callable[[Any, Path], Any]] = [
    layers.save,
    lambda model, path: layers.save(model, path, sharded=True),
    layers.load,
    lambda model, path: layers.gather_state(model),
    lambda model, path: layers.scatter_state(model, {}),
]


@given(
    st.sampled_from([Counted, Written, Renamed]),
    st.sampled_from(FUNCTIONS),
    st.booleans(),
    st.integers(1, 3),
)
def test_what_is_beside_tensors_is_refused(
    kind: Any, function: Callable[[Any, Path], Any], inside: bool, workers: int
) -> None:
    """By every worker, though one alone has it."""

    def program(backend: Any) -> None:
        layer = kind(2, 2) if not backend.worker else torch.nn.Linear(2, 2)
        model = torch.nn.Sequential(torch.nn.ReLU(), layer) if inside else layer
        with pytest.raises(LinopError, match="the model's state is more than its tensors"):
            function(model, Path("nowhere"))

    linop.launch(program, workers, "threads")
    assert not Path("nowhere").exists()


KINDS = [torch.bool, torch.uint8, torch.int64, torch.float32, torch.float64, torch.complex64]


@given(st.sampled_from(KINDS), st.sampled_from(KINDS), st.booleans(), st.integers(1, 2))
def test_numbers_of_another_kind_are_refused(
    tmp_path_factory: pytest.TempPathFactory, given: Any, wanted: Any, sharded: bool, workers: int
) -> None:
    """If the model's dtype has none of them: imaginary parts and fractions are not dropped."""
    path = tmp_path_factory.mktemp("kinds") / "state"

    def model(dtype: Any, value: float) -> Any:
        found = torch.nn.Module()
        found.register_buffer("x", torch.full((3,), value, dtype=dtype))
        return found

    def program(backend: Any) -> None:
        layers.save(model(given, 1), path, sharded=sharded)
        other = model(wanted, 0)
        if torch.can_cast(given, wanted):
            layers.load(other, path)
            assert (other.x == 1).all()
        else:
            with pytest.raises(ArgumentError, match="does not hold such numbers"):
                layers.load(other, path)
            assert not other.x.any()

    linop.launch(program, workers, "threads")


RANGES = [
    torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int64, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128,
]  # fmt: skip


@given(
    st.sampled_from(RANGES),
    st.sampled_from(RANGES),
    st.integers(-300, 300),
    st.booleans(),
    st.integers(1, 2),
)
def test_numbers_beyond_the_range_are_refused(
    tmp_path_factory: pytest.TempPathFactory,
    given: Any,
    wanted: Any,
    size: int,
    sharded: bool,
    workers: int,
) -> None:
    """On all workers, and nothing is changed."""
    assume(torch.can_cast(given, wanted))
    is_whole = not (given.is_floating_point or given.is_complex)
    value = torch.tensor(float(size) if is_whole else 10.0**size, dtype=torch.float64).to(given)
    loaded = value.to(wanted).to(torch.complex128)
    if is_whole:
        lost = not _is_number(value.to(wanted), value.item())
    else:
        lost = not _is_rounded(value, value.to(wanted))
    path = tmp_path_factory.mktemp("ranges") / "state"

    def model(of: Any, dtype: Any) -> Any:
        found = torch.nn.Module()
        found.register_buffer("x", torch.stack([of.new_zeros(()), of]).to(dtype))
        return found

    def program(backend: Any) -> None:
        layers.save(model(value, given), path, sharded=sharded)
        other = model(value.new_zeros(()), wanted)
        if not lost:
            layers.load(other, path)
            found = other.x[1].to(torch.complex128)
            assert found == loaded or (found.isnan() and loaded.isnan())
        else:
            with pytest.raises(ArgumentError, match="beyond the range of the model's"):
                layers.load(other, path)
            assert not other.x.to(torch.complex128).any()

    linop.launch(program, workers, "threads")


def _is_number(tensor: Any, number: int) -> bool:
    """True if the one element of a tensor is a whole number."""
    found = tensor if tensor.dtype in WHOLE else tensor.to(torch.complex128).real
    return math.isfinite(found.item()) and int(found.item()) == number


def _is_rounded(before: Any, after: Any) -> bool:
    """True if the one element of a tensor of floats became its neighbour in another dtype."""
    limits = torch.finfo(after.dtype)
    x, y = (side.to(torch.complex128).real.item() for side in (before, after))
    if not math.isfinite(x):
        return x == y or (math.isnan(x) and math.isnan(y))
    near = abs(y - x) <= limits.eps * abs(x)
    return near or (x != 0 and abs(y - x) <= limits.smallest_normal)


WHOLE = [dtype for dtype in RANGES if not (dtype.is_floating_point or dtype.is_complex)]
ENDS = {end for dtype in WHOLE for end in (torch.iinfo(dtype).min, torch.iinfo(dtype).max)}


@pytest.mark.parametrize("given", WHOLE, ids=str)
def test_whole_numbers_become_no_others(given: Any) -> None:
    """At the ends of all ranges, and beside them."""
    ends = torch.iinfo(given)
    values = {0, 1, -1, 2**24 + 1, 2**53 + 1} | {end + k for end in ENDS for k in (-1, 0, 1)}
    for value in sorted(v for v in values if ends.min <= v <= ends.max):
        stored = torch.tensor([value], dtype=given)
        for wanted in RANGES:
            if _is_number(stored.to(wanted), value):
                check_range("load", "x", stored, wanted)
            else:
                with pytest.raises(ArgumentError, match="beyond the range of the model's"):
                    check_range("load", "x", stored, wanted)


FLOATS = [
    *(dtype for dtype in RANGES if dtype not in WHOLE),
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip
SIZES = [0.0, 0.5, 1.0, 1.5, 1e-8, 1e-40, 1e-300, 240.0, 449.0, 65504.0, 65520.0, 3.4e38, 1e300]


@pytest.mark.parametrize("given", FLOATS, ids=str)
def test_floats_are_rounded_and_become_no_others(given: Any) -> None:
    """Also in dtypes that saturate, or have no zero, sign or infinity."""
    for size in (*SIZES, math.inf, math.nan):
        for sign in (1, -1):
            stored = torch.tensor([sign * size], dtype=torch.float64).to(given)
            for wanted in FLOATS:
                if not torch.can_cast(given, wanted):
                    continue
                if _is_rounded(stored, stored.to(wanted)):
                    check_range("load", "x", stored, wanted)
                else:
                    with pytest.raises(ArgumentError, match="beyond the range of the model's"):
                        check_range("load", "x", stored, wanted)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_name_that_is_too_long_is_an_error_of_linop(sharded: bool) -> None:
    """On all workers, also if one alone has it."""
    net = torch.nn.Linear(2, 2)

    def program(backend: Any) -> None:
        for path in ("x" * 300, "x" * 300 if backend.worker else "short"):
            with pytest.raises(LinopError, match=r"File name too long|no file|No such file"):
                layers.load(net, path)
        with pytest.raises(LinopError, match="File name too long"):
            layers.save(net, "x" * 300, sharded=sharded)

    linop.launch(program, 2, "threads")
