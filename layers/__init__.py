"""Distributed modules: torch.nn's names and arguments, plus partitions. This file holds the public
names alone."""

import linop.backends.autograd  # first: without torch it says what to install
from linop.layers.activation import GLU, LogSoftmax, PReLU, Softmax, Softmax2d, Softmin
from linop.layers.agreement.input_agreement import fixed_shapes
from linop.layers.attention.attention import scaled_dot_product_attention
from linop.layers.attention.multihead import MultiheadAttention
from linop.layers.convolutions.conv import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from linop.layers.dropout import Dropout, Dropout1d, Dropout2d, Dropout3d
from linop.layers.embedding import Embedding
from linop.layers.experts.mixture import MixtureOfExperts
from linop.layers.layer import Layer
from linop.layers.linear import Linear
from linop.layers.losses.cross_entropy import CrossEntropyLoss, NLLLoss
from linop.layers.losses.ctc import CTCLoss
from linop.layers.losses.distances import (
    CosineEmbeddingLoss,
    TripletMarginLoss,
    TripletMarginWithDistanceLoss,
)
from linop.layers.losses.elementwise import (
    BCELoss,
    BCEWithLogitsLoss,
    GaussianNLLLoss,
    HingeEmbeddingLoss,
    HuberLoss,
    KLDivLoss,
    L1Loss,
    MarginRankingLoss,
    MSELoss,
    PoissonNLLLoss,
    SmoothL1Loss,
    SoftMarginLoss,
)
from linop.layers.losses.loss import Loss
from linop.layers.losses.margins import (
    MultiLabelMarginLoss,
    MultiLabelSoftMarginLoss,
    MultiMarginLoss,
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
from linop.layers.norms.channels import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LocalResponseNorm,
)
from linop.layers.norms.last_dimensions import LayerNorm, RMSNorm
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
from linop.layers.pools.adaptive_pool import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    AdaptiveMaxPool3d,
)
from linop.layers.pools.pool import (
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
from linop.layers.reductions import (
    Amax,
    Amin,
    LogSumExp,
    Mean,
    Norm,
    Prod,
    Reduction,
    Std,
    Sum,
    Var,
)
from linop.layers.resample import (
    Downsample,
    Upsample,
    UpsamplingBilinear2d,
    UpsamplingNearest2d,
)
from linop.layers.shapes import ChannelShuffle, Flatten, PixelShuffle, PixelUnshuffle, Unflatten
from linop.layers.spectral import SpectralConv
from linop.layers.state.checkpoint import Saving, load, save, save_async
from linop.layers.state.optimizer_state import gather_optimizer_state, scatter_optimizer_state
from linop.layers.state.state import gather_state, scatter_state
from linop.layers.zero_volume import zero_volume_tensor

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
    "Amax",
    "Amin",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "BCELoss",
    "BCEWithLogitsLoss",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Broadcast",
    "CTCLoss",
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
    "CosineEmbeddingLoss",
    "CrossEntropyLoss",
    "Downsample",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "Embedding",
    "Flatten",
    "GaussianNLLLoss",
    "GradScaler",
    "GroupNorm",
    "HaloExchange",
    "HingeEmbeddingLoss",
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
    "LogSumExp",
    "Loss",
    "MSELoss",
    "MarginRankingLoss",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Mean",
    "MixtureOfExperts",
    "Movement",
    "MultiLabelMarginLoss",
    "MultiLabelSoftMarginLoss",
    "MultiMarginLoss",
    "MultiheadAttention",
    "NLLLoss",
    "Norm",
    "PReLU",
    "PixelShuffle",
    "PixelUnshuffle",
    "PoissonNLLLoss",
    "Prod",
    "RMSNorm",
    "ReduceScatter",
    "Reduction",
    "ReflectionPad1d",
    "ReflectionPad2d",
    "ReflectionPad3d",
    "Repartition",
    "ReplicationPad1d",
    "ReplicationPad2d",
    "ReplicationPad3d",
    "Saving",
    "SmoothL1Loss",
    "SoftMarginLoss",
    "Softmax",
    "Softmax2d",
    "Softmin",
    "SpectralConv",
    "Std",
    "Sum",
    "SumReduce",
    "TripletMarginLoss",
    "TripletMarginWithDistanceLoss",
    "Unflatten",
    "Upsample",
    "UpsamplingBilinear2d",
    "UpsamplingNearest2d",
    "Var",
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
    "save_async",
    "scaled_dot_product_attention",
    "scatter_optimizer_state",
    "scatter_state",
    "seeded",
    "zero_volume_tensor",
]

install()
del install, linop  # not public names
