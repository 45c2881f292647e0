"""Control messages are read as they were written, and nothing else can be read: any other bytes are
an error of linop's, without much memory, and no code runs."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import linop
from linop.backends.together import messages
from linop.backends.together.deadlock import Note, State, Wait
from linop.backends.together.messages import DEEPEST, decoded, encoded
from linop.errors import ArgumentError, BackendError, DeadlockError, LinopError, ShapeError

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters())
    | st.binary()
    | st.just(...)
)
KEYS = st.integers() | st.text(max_size=3) | st.tuples(st.integers(), st.text(max_size=3))
NOTES = st.builds(
    Note,
    st.text(),
    st.integers(),
    st.integers(),
    st.none()
    | st.just(State(Wait("w", ("plan", 1), (1, 0), (1, math.inf), (0,)), {("a", 1): (2, 3)})),
    st.text(),
)
ITEMS = st.recursive(
    LEAVES | NOTES | st.frozensets(KEYS, max_size=3) | st.sets(KEYS, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    """True if both are of the same types throughout, and equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@given(ITEMS)
def test_what_is_written_is_read(item: Any) -> None:
    assert same(decoded(encoded(item)), item)


@given(st.data())
def test_arrays_and_scalars(data: st.DataObject) -> None:
    dtype = data.draw(
        arrays.boolean_dtypes()
        | arrays.integer_dtypes()
        | arrays.floating_dtypes()
        | arrays.complex_number_dtypes()
    )
    array = data.draw(arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0)))
    again = decoded(encoded(array))
    assert again.dtype == array.dtype and again.shape == array.shape
    assert again.tobytes() == array.tobytes()
    if array.size:
        one = array.reshape(-1)[0]
        assert type(decoded(encoded(one))) is type(one)
        assert np.asarray(decoded(encoded(one))).tobytes() == np.asarray(one).tobytes()


@given(st.sampled_from([LinopError, BackendError, DeadlockError, ShapeError]), st.text())
def test_errors_keep_class_text_and_marks(kind: type[LinopError], text: str) -> None:
    error = kind(text)
    error.alarm = 3
    linop.errors.interrupt(error)
    again = decoded(encoded(error))
    assert type(again) is kind and str(again) == text and again.alarm == 3
    assert linop.errors.has_interrupted(again)


@given(ITEMS, st.data())
def test_other_bytes_are_an_error_of_linops(item: Any, data: st.DataObject) -> None:
    whole = bytearray(encoded(item))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole)))
        if data.draw(st.booleans()):
            del whole[at : at + data.draw(st.integers(1, 9))]
        else:
            whole[at:at] = data.draw(st.binary(max_size=9))
    try:
        decoded(whole)
    except BackendError:
        pass


@given(st.binary())
def test_any_bytes(data: bytes) -> None:
    try:
        decoded(data)
    except BackendError:
        pass


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.mkdir, (Path(self.path),)


def test_a_pickle_is_none(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="control message cannot be read"):
        decoded(pickle.dumps(Evil(str(tmp_path / "ran"))))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name",
    ["os:stat_result", "subprocess:Popen", "linop.backends.engine.base:Backend", "linop.errors:T"],
)
@pytest.mark.parametrize("tag", [b"r", b"e"])
def test_other_classes_are_refused(name: str, tag: bytes) -> None:
    with pytest.raises(BackendError, match="refused"):
        decoded(tag + encoded((name, ("ls",) if tag == b"r" else "x")))


@pytest.mark.parametrize("many", [DEEPEST, 100_000])
def test_messages_are_not_deep(many: int) -> None:
    item: Any = None
    for _ in range(many):
        item = [item]
    with pytest.raises(ArgumentError, match="levels deep"):
        encoded(item)
    with pytest.raises(BackendError, match="levels deep"):
        decoded(b"[\1\0\0\0" * many + b"N")


def test_lengths_are_of_bytes_that_are_there() -> None:
    for tag in (b"s", b"b", b"(", b"[", b":", b"i"):
        with pytest.raises(BackendError, match="its end is missing"):
            decoded(tag + b"\xff\xff\xff\xff" + bytes(10))


@pytest.mark.parametrize("item", [object(), lambda: 0, {"a": print}, np.array([None])])
def test_what_cannot_be_sent_is_an_error_on_all(item: Any) -> None:
    def main(backend: Any) -> str:
        with pytest.raises(
            ArgumentError, match=r"worker 1: .*cannot be sent to other workers"
        ) as info:
            backend.transport.gather_all(item if backend.worker == 1 else 0)
        return str(info.value)

    said = linop.launch(main, 3, backend="threads")
    assert len({*said}) == 1


def test_messages_are_not_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "LONGEST_MESSAGE", 100)
    with pytest.raises(ArgumentError, match="at most 100 are sent"):
        encoded("x" * 100)
    with pytest.raises(BackendError, match="at most 100"):
        decoded(bytes(101))
