"""A backward in two halves: gradients of the inputs, then those of the weights, each node of the
graph for what the half needs of it.

The first half notes the gradient that comes to every node that leads to the inputs and, another
way, to weights; the second starts from these nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node


class Part(NamedTuple):
    """A node, its leaves, and the gradients of its outputs, which the first half fills in."""

    node: Node
    leaves: Sequence[Tensor]
    gradients: list[Tensor | None]


def parts(roots: Sequence[Node], inputs: Sequence[Tensor]) -> list[Part] | None:
    """The nodes that lead to inputs, and to other leaves by a way without such nodes. None if one
    leaf is led to by several of them: its gradients cannot be told apart.

    Args:
        roots: nodes of the outputs.
        inputs: leaves.
    """
    order = _descending(roots)
    # AccumulateGrad, the node of a leaf, has it as `variable`.
    leaf = {node: node.variable for node in order if hasattr(node, "variable")}
    reaches: dict[Node, bool] = {}
    weights: dict[Node, dict[int, Tensor]] = {}
    for node in reversed(order):
        below = [child for child, _ in node.next_functions if child is not None]
        reaches[node] = any(reaches[child] for child in below) or any(
            leaf.get(node) is x for x in inputs
        )
        found = {id(leaf[node]): leaf[node]} if node in leaf else {}
        for child in below:
            if not reaches[child]:
                found |= weights[child]
        weights[node] = found
    chosen = [node for node in order if reaches[node] and node not in leaf and weights[node]]
    every = [key for node in chosen for key in weights[node]]
    if not chosen or len(set(every)) < len(every):
        return None
    return [Part(node, list(weights[node].values()), []) for node in chosen]


def _descending(roots: Sequence[Node]) -> list[Node]:
    """All nodes of a graph, each before those that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    begin: list[tuple[Node | None, int]] = [(root, 0) for root in roots]
    stack: list[tuple[Node | None, Iterator[tuple[Node | None, int]]]] = [(None, iter(begin))]
    while stack:
        node, rest = stack[-1]
        child = next((child for child, _ in rest if child is not None and child not in seen), None)
        if child is None:
            if node is not None:  # None leads to the roots
                order.append(node)
            stack.pop()
        else:
            seen.add(child)
            stack.append((child, iter(child.next_functions)))
    return order[::-1]


def input_half(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Part] | None:
    """Set the ``grad`` of inputs; return what `weight_half` needs, None if it has to start anew."""
    found = parts([edge.node for edge in edges], inputs)
    for part in found or ():
        part.node.register_prehook(partial(_noted, part.gradients))
    torch.autograd.backward(edges, gradients, inputs=inputs, retain_graph=True)
    return found


def _noted(known: list[Tensor | None], grads: tuple[Tensor | None, ...]) -> Any:
    """Note a node's gradients in the first half. In the second, hooks of tensors have run again:
    their work is in what was noted, which takes the place of what they give."""
    if known:
        return tuple(known)
    known.extend(grads)
    return None


def weight_half(found: Sequence[Part]) -> None:
    """Add the gradients of the leaves to their ``grad``."""
    for node, leaves, gradients in found:
        given = [(k, g) for k, g in enumerate(gradients) if g is not None]
        edges = [GradientEdge(node, k) for k, _ in given]
        if edges:
            torch.autograd.backward(edges, [g for _, g in given], inputs=leaves)
