"""Distributed modules: torch.nn's names and arguments, plus partitions."""

from linop.layers.conv import Conv1d, Conv2d, Conv3d
from linop.layers.cross_entropy import CrossEntropyLoss, NLLLoss
from linop.layers.dropout import Dropout, Dropout1d, Dropout2d, Dropout3d
from linop.layers.embedding import Embedding
from linop.layers.layer import Layer, zero_volume_tensor
from linop.layers.linear import Linear
from linop.layers.loss import (
    BCELoss,
    BCEWithLogitsLoss,
    HuberLoss,
    KLDivLoss,
    L1Loss,
    Loss,
    MSELoss,
    SmoothL1Loss,
)
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
from linop.layers.norm import BatchNorm1d, BatchNorm2d, BatchNorm3d, LayerNorm
from linop.layers.pool import AvgPool1d, AvgPool2d, AvgPool3d, MaxPool1d, MaxPool2d, MaxPool3d

__all__ = [
    "AllGather",
    "AllReduce",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "BCELoss",
    "BCEWithLogitsLoss",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Broadcast",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "CrossEntropyLoss",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "Embedding",
    "HaloExchange",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "Layer",
    "LayerNorm",
    "Linear",
    "Loss",
    "MSELoss",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Movement",
    "NLLLoss",
    "ReduceScatter",
    "Repartition",
    "SmoothL1Loss",
    "SumReduce",
    "zero_volume_tensor",
]
