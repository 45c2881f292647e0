"""Distributed modules: torch.nn's names and arguments, plus partitions."""

from linop.layers.checkpoint import load, save
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
from linop.layers.optimizer_state import gather_optimizer_state, scatter_optimizer_state
from linop.layers.padding import (
    CircularPad1d,
    CircularPad2d,
    CircularPad3d,
    ConstantPad1d,
    ConstantPad2d,
    ConstantPad3d,
    ReflectionPad1d,
    ReflectionPad2d,
    ReflectionPad3d,
    ReplicationPad1d,
    ReplicationPad2d,
    ReplicationPad3d,
    ZeroPad1d,
    ZeroPad2d,
    ZeroPad3d,
)
from linop.layers.pool import AvgPool1d, AvgPool2d, AvgPool3d, MaxPool1d, MaxPool2d, MaxPool3d
from linop.layers.resample import (
    Downsample,
    Upsample,
    UpsamplingBilinear2d,
    UpsamplingNearest2d,
)
from linop.layers.state import gather_state, scatter_state

__all__ = [
    "AllGather",
    "AllReduce",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "Broadcast",
    "CircularPad1d",
    "CircularPad2d",
    "CircularPad3d",
    "ConstantPad1d",
    "ConstantPad2d",
    "ConstantPad3d",
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
    "ReflectionPad1d",
    "ReflectionPad2d",
    "ReflectionPad3d",
    "Repartition",
    "ReplicationPad1d",
    "ReplicationPad2d",
    "ReplicationPad3d",
    "SumReduce",
    "Upsample",
    "UpsamplingBilinear2d",
    "UpsamplingNearest2d",
    "ZeroPad1d",
    "ZeroPad2d",
    "ZeroPad3d",
    "gather_optimizer_state",
    "gather_state",
    "load",
    "save",
    "scatter_optimizer_state",
    "scatter_state",
    "zero_volume_tensor",
]
