"""Distributed modules: torch.nn's names and arguments, plus partitions. This file holds the public
names alone."""

import linop.backends.autograd  # first: without torch it says what to install
from linop.layers.activation import GLU, LogSoftmax, PReLU, Softmax, Softmax2d, Softmin
from linop.layers.adaptive_pool import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    AdaptiveMaxPool3d,
)
from linop.layers.agreement.input_agreement import fixed_shapes
from linop.layers.conv import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
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
from linop.layers.norm import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
)
from linop.layers.other_norms import GroupNorm, LayerNorm, LocalResponseNorm, RMSNorm
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
from linop.layers.parameters.clipping import clip_grad_norm_
from linop.layers.parameters.initialise import initialize, seeded
from linop.layers.parameters.scaling import GradScaler
from linop.layers.parameters.torch_guards import install
from linop.layers.pool import (
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    LPPool1d,
    LPPool2d,
    LPPool3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
)
from linop.layers.resample import (
    Downsample,
    Upsample,
    UpsamplingBilinear2d,
    UpsamplingNearest2d,
)
from linop.layers.shapes import ChannelShuffle, Flatten, PixelShuffle, PixelUnshuffle, Unflatten
from linop.layers.spectral import SpectralConv
from linop.layers.state.checkpoint import load, save
from linop.layers.state.optimizer_state import gather_optimizer_state, scatter_optimizer_state
from linop.layers.state.state import gather_state, scatter_state

__all__ = [
    "GLU",
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
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
    "ChannelShuffle",
    "CircularPad1d",
    "CircularPad2d",
    "CircularPad3d",
    "ConstantPad1d",
    "ConstantPad2d",
    "ConstantPad3d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "CrossEntropyLoss",
    "Downsample",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "Embedding",
    "Flatten",
    "GradScaler",
    "GroupNorm",
    "HaloExchange",
    "HuberLoss",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "KLDivLoss",
    "L1Loss",
    "LPPool1d",
    "LPPool2d",
    "LPPool3d",
    "Layer",
    "LayerNorm",
    "Linear",
    "LocalResponseNorm",
    "LogSoftmax",
    "Loss",
    "MSELoss",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Movement",
    "NLLLoss",
    "PReLU",
    "PixelShuffle",
    "PixelUnshuffle",
    "RMSNorm",
    "ReduceScatter",
    "ReflectionPad1d",
    "ReflectionPad2d",
    "ReflectionPad3d",
    "Repartition",
    "ReplicationPad1d",
    "ReplicationPad2d",
    "ReplicationPad3d",
    "SmoothL1Loss",
    "Softmax",
    "Softmax2d",
    "Softmin",
    "SpectralConv",
    "SumReduce",
    "Unflatten",
    "Upsample",
    "UpsamplingBilinear2d",
    "UpsamplingNearest2d",
    "ZeroPad1d",
    "ZeroPad2d",
    "ZeroPad3d",
    "clip_grad_norm_",
    "fixed_shapes",
    "gather_optimizer_state",
    "gather_state",
    "initialize",
    "load",
    "save",
    "scatter_optimizer_state",
    "scatter_state",
    "seeded",
    "zero_volume_tensor",
]

install()
del install, linop  # not public names
