"""Differentiable maps whose Jacobians are operators: training, to teach and to verify.

A `Map` is a function between spaces. Its derivative at a point is a `LinearOperator`; that of a
chain is the product of those of its parts, so a gradient is an adjoint, ``(J3 J2 J1).H g``, and no
map has a backward pass. Operators of data movement are maps too: what a strategy of parallel
training sends is a part of the product, and what its gradient sends is that part's adjoint.
Training of torch modules is in `linop.layers`.
"""

from linop.networks.activations import multiply, relu, sigmoid
from linop.networks.chain import chain
from linop.networks.linear import bias, linear
from linop.networks.losses import softmax_cross_entropy, squared_loss
from linop.networks.maps import Map
from linop.networks.program import Program

__all__ = [
    "Map",
    "Program",
    "bias",
    "chain",
    "linear",
    "multiply",
    "relu",
    "sigmoid",
    "softmax_cross_entropy",
    "squared_loss",
]
