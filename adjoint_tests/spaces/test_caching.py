"""Cached properties in threads."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from linop.caching import attributes, cached_property


class Node:
    """Two properties, each of which computes the other one of another object."""

    def __init__(self, compute: Callable[[], object]) -> None:
        self._compute = compute

    @cached_property
    def one(self) -> object:
        return self._compute()

    @cached_property
    def two(self) -> object:
        return self._compute()


def test_threads_do_not_wait_for_each_other() -> None:
    """Python 3.11's own has a lock for all objects of a class."""
    both = threading.Barrier(2)

    def inside(other: Callable[[], object]) -> Callable[[], object]:
        return lambda: (both.wait(10), other())

    leaf = Node(lambda: 1)
    first, second = Node(inside(lambda: leaf.two)), Node(inside(lambda: Node(lambda: 1).one))
    works = (lambda: first.one), (lambda: second.two)
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_the_first_value_is_kept() -> None:
    made: list[object] = []

    def compute() -> object:
        if not made:
            made.append(node)
            made.append(node.one)  # as another thread would meanwhile
        return object()

    node = Node(compute)
    assert node.one is node.one is made[1]


@pytest.fixture
def collections() -> Iterator[None]:
    """Collections as they were, whatever a test has set."""
    before = gc.get_threshold()
    yield
    gc.enable()
    gc.set_threshold(*before)


@pytest.mark.usefixtures("collections")
@pytest.mark.parametrize("ask", [attributes, lambda node: node.one], ids=["all", "one"])
@pytest.mark.parametrize("allocations", range(6))
def test_an_object_has_one_dict(ask: Callable[[Node], object], allocations: int) -> None:
    """Whoever asks for it while another one's is made: a finalizer here, as other threads would.
    In Python 3.11, with two of them, a later collection read memory that was freed."""

    class Cyclic:
        def __init__(self) -> None:
            self.itself = self

    gc.collect()
    gc.disable()
    node, meanwhile = Node(lambda: object), []
    garbage = Cyclic()
    watched = weakref.ref(garbage, lambda _: meanwhile.append(node.__dict__))
    del garbage
    taken = [{} for _ in range(200)]  # those that Python keeps for the next ones
    gc.set_threshold(gc.get_count()[0] + allocations)
    gc.enable()
    ask(node)
    gc.disable()
    assert taken and watched() is None if meanwhile else watched() is not None
    assert all(node.__dict__ is each for each in meanwhile)
