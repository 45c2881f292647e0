"""Bad input of `linop.schedules`: one linop error each, no error of its internals, and no hang."""

from collections.abc import Callable
from math import nan
from typing import Any

import pytest

from linop.errors import ArgumentError
from linop.schedules import (
    GENERATORS,
    Action,
    Kind,
    Schedule,
    Sizes,
    backward_first,
    check,
    one_forward_one_backward,
    simulate,
    with_messages,
)

TWO = one_forward_one_backward(2, 2)
SIZES = Sizes([1, 1])


@pytest.mark.parametrize("function", [check, simulate, with_messages])
@pytest.mark.parametrize("given", [None, "0F0,0B0", [[Action(0, Kind.FORWARD, 0)]]])
def test_no_schedule(function: Callable[[Any], object], given: object) -> None:
    with pytest.raises(ArgumentError, match="schedule: expected a Schedule, given"):
        function(given)


@pytest.mark.parametrize(
    ("actions", "text"),
    [
        ("0F0", "expected an Action"),
        (Action(0, "Q", 0), "expected a kind, one of F"),  # type: ignore[arg-type]
        (Action("0", Kind.FORWARD, 0), "numbers from 0"),  # type: ignore[arg-type]
        (Action(0, Kind.FORWARD, 0.5), "numbers from 0"),  # type: ignore[arg-type]
        (Action(-1, Kind.FORWARD, 0), "numbers from 0"),
        (Action(0, Kind.FORWARD), "0F without a micro-batch"),
        (Action(0, Kind.UPDATE, 3), "0U3: .* without a micro-batch, expected"),
        (Action(0, Kind.UPDATE, version=7), "0U@7: a version of forwards and backwards"),
        (Action(0, Kind.FORWARD, 0, peer=5), "0F0>5: a peer of sends and receives"),
    ],
)
def test_wrong_actions(actions: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=f"worker 1: {text}"):
        Schedule(((), (actions,)))


@pytest.mark.parametrize("rows", [None, 5, "0F0", [5], ["0F0"]])
def test_no_rows(rows: Any) -> None:
    with pytest.raises(ArgumentError, match=r"expected rows of actions|expected a row of actions"):
        Schedule(rows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "schedule: expected a str, given None"),
        (b"0F0", "schedule: expected a str, given b'0F0'"),
        ("0F0\n0F" + "9" * 5000, "line 2: .* numbers of up to 9 digits; given '0F9{58}'"),
        ("0F" + "9" * 140_000, "line 1: field larger than field limit"),
        ("٣F0", "line 1: action: expected"),
    ],
)
def test_no_text(text: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Schedule.from_csv(text)


def test_blank_lines_at_the_end_are_no_workers() -> None:
    assert len(Schedule.from_csv("0F0,0B0\r1F0,1B0\r\n\n \n").workers) == 2
    idle = Schedule(((), (Action(0, Kind.FORWARD, 0),), ()))
    assert Schedule.from_csv(idle.to_csv()).workers == idle.workers


@pytest.mark.parametrize("function", [simulate, with_messages])
@pytest.mark.parametrize("table", ["999999999F0,999999999B0", "0F0,0B0\n2F0,2B0"])
def test_gaps_between_stages(function: Callable[[Schedule], object], table: str) -> None:
    with pytest.raises(ArgumentError, match=r"stage [01]: no actions"):
        function(Schedule.from_csv(table))


EDGES = [5, [1], "ab", [("a", "b")], [(0,)], [(0, 1, 2)], [(0, 1.5)], [(0, 0)], [(0, 1), (0, 1)]]


@pytest.mark.parametrize("edges", EDGES)
def test_edges(edges: Any) -> None:
    with pytest.raises(ArgumentError, match="edges: "):
        check(TWO, edges=edges)
    with pytest.raises(ArgumentError, match="edges: "):
        with_messages(TWO, edges)


@pytest.mark.parametrize(
    "arguments",
    [
        {"sends": {(0, 1): 1, (1, 0): -1}},
        {"sends": {(0, 1): 1, (1, 0): "a"}},
        {"shapes": 5},
        {"shapes": {(0, 1): 5}},
        {"shapes": {(0, 1): (1, 2, 3)}},
        {"versions": "a"},
        {"versions": 1.5},
        {"versions": 0},
        {"versions": [1, 1]},
        {"versions": {9: 1}},
        {"replicas": 5},
        {"replicas": TWO},
        {"replicas": [None]},
        {"sizes": 5},
        {"limit": nan, "sizes": SIZES},
        {"limit": [nan, 9], "sizes": SIZES},
        {"limit": ["a", 9], "sizes": SIZES},
    ],
)
def test_arguments_of_check(arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"^{next(iter(arguments))[:-1]}"):
        check(TWO, **arguments)


@pytest.mark.parametrize(
    "sizes",
    [
        {"activations": 5},
        {"activations": [nan, 1]},  # nan would pass below every limit
        {"activations": [-1, 1]},
        {"activations": [10**400, 1]},
        {"activations": ["a", 1]},
        {"activations": [1, 1], "weights": [-1, 1]},
        {"activations": [1, 1], "messages": {(0, 1): -5}},
        {"activations": [1, 1], "messages": 5},
    ],
)
def test_sizes(sizes: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="sizes: "):
        Sizes(**sizes)


def test_sizes_of_a_simulation() -> None:
    with pytest.raises(ArgumentError, match="sizes: 2 activations expected, one a stage, given 1"):
        simulate(TWO).peak_bytes(Sizes([1]))


@pytest.mark.parametrize(
    "arguments",
    [
        {"costs": None},
        {"costs": "F"},
        {"costs": {"F": 10**400, "B": 1}},
        {"costs": {"F": 1, "B": 2, "Update": 3}},
        {"costs": {"F": 1, "B": 2, "SEND_F": 3}},
        {"edges": {0: 1}},
        {"slots": "a"},
        {"slots": nan},
        {"slots": {}},
        {"slots": {(0, 1): 1}},
        {"slots": {(0, 1): None, (1, 0): 1}},
        {"cores": 1.5},
        {"cores": "a"},
    ],
)
def test_arguments_of_simulate(arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"^{next(iter(arguments))}: "):
        simulate(TWO, **arguments)


def test_many_cores() -> None:
    assert simulate(TWO, cores=10**12).time == simulate(TWO).time


@pytest.mark.parametrize("generator", GENERATORS.values())
@pytest.mark.parametrize("numbers", [("a", 1), (1.5, 3), (1, None), (nan, 1), (2.0, 2)])
def test_numbers_of_generators(generator: Callable[..., Schedule], numbers: tuple) -> None:  # type: ignore[type-arg]
    with pytest.raises(ArgumentError, match=r"(stages|micro_batches): at least 1 expected, given"):
        generator(*numbers)


@pytest.mark.parametrize("in_flight", [5, [nan, 1], ["a", 1], [1.5, 1]])
def test_in_flight(in_flight: Any) -> None:
    with pytest.raises(ArgumentError, match="in_flight: "):
        backward_first(2, 2, in_flight)
