"""Cached properties in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from linop.caching import cached_property


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
