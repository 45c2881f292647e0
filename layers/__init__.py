"""Distributed modules: torch.nn's names and arguments, plus partitions."""

from linop.layers.conv import Conv1d, Conv2d, Conv3d
from linop.layers.layer import Layer, zero_volume_tensor
from linop.layers.linear import Linear
from linop.layers.movement import (
    AllGather,
    AllReduce,
    Broadcast,
    HaloExchange,
    Movement,
    ReduceScatter,
    Repartition,
    SumReduce,
)
from linop.layers.pool import AvgPool1d, AvgPool2d, AvgPool3d, MaxPool1d, MaxPool2d, MaxPool3d
from linop.layers.resample import (
    Downsample,
    Upsample,
    UpsamplingBilinear2d,
    UpsamplingNearest2d,
)

__all__ = [
    "AllGather",
    "AllReduce",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "Broadcast",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "Downsample",
    "HaloExchange",
    "Layer",
    "Linear",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Movement",
    "ReduceScatter",
    "Repartition",
    "SumReduce",
    "Upsample",
    "UpsamplingBilinear2d",
    "UpsamplingNearest2d",
    "zero_volume_tensor",
]
