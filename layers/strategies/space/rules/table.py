"""The table: a rule for each function of torch.

`RULES` are those of functions that torch writes in C++; `PYTHON` those of functions that it writes
in Python, which otherwise run as they are written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from linop.strategies.space.rules import (
    elementwise,
    losses,
    norms,
    parts,
    products,
    properties,
    random,
    reductions,
    resampling,
    sliding,
    views,
    windows,
)
from linop.strategies.space.rules.along import along, channels
from linop.strategies.tensor.following.elementwise import names

Rule = Callable[..., Any]


def _named(text: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(text.split(), rule)


RULES: dict[str, Rule] = {
    **_named("conv1d conv2d conv3d", sliding.conv),
    **_named("conv_transpose1d conv_transpose2d conv_transpose3d", sliding.conv_transpose),
    **_named("max_pool1d max_pool2d max_pool3d", sliding.max_pool),
    **_named("avg_pool1d avg_pool2d avg_pool3d", sliding.avg_pool),
    **_named("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", sliding.adaptive_pool),
    "batch_norm": norms.batch_norm,
    "group_norm": norms.group_norm,
    "instance_norm": norms.instance_norm,
    "layer_norm": norms.layer_norm,
    "rms_norm": norms.rms_norm,
    "sum": reductions.total,
    "mean": reductions.mean,
    **_named("var std var_mean std_mean", reductions.variance),
    **_named("amax amin logsumexp any all", reductions.extreme),
    **_named("max min", reductions.most),
    **_named("linalg_vector_norm vector_norm", reductions.norm),
    **_named("view reshape", views.view),
    **_named("view_as reshape_as", views.view_as),
    "flatten": views.flatten,
    "unflatten": views.unflatten,
    "squeeze": views.squeeze,
    "unsqueeze": views.unsqueeze,
    "permute": views.permute,
    **_named("transpose swapaxes swapdims", views.transpose),
    **_named("movedim moveaxis", views.movedim),
    **_named("T mT H mH t adjoint", views.turned),
    "view_as_real": views.parts,
    "view_as_complex": views.of_parts,
    "expand": views.expand,
    **_named("repeat tile", views.repeat),
    "select": parts.select,
    "narrow": parts.narrow,
    **_named("split split_with_sizes", parts.split),
    "chunk": parts.chunk,
    "unbind": parts.unbind,
    "__getitem__": parts.getitem,
    "__setitem__": parts.setitem,
    **_named("cat concat concatenate", parts.cat),
    "stack": parts.stack,
    "pad": parts.pad,
    "roll": parts.roll,
    "pixel_shuffle": parts.pixel_shuffle,
    "pixel_unshuffle": parts.pixel_unshuffle,
    "repeat_interleave": parts.repeat_interleave,
    **_named("channel_shuffle native_channel_shuffle", channels(1)),
    "prelu": elementwise.prelu,
    "einsum": products.einsum,
    **_named("matmul mm bmm __matmul__ __rmatmul__", products.matmul),
    **_named("baddbmm addmm", products.baddbmm),
    "linear": products.linear,
    "scaled_dot_product_attention": products.attention,
    **_named("dropout dropout_ feature_dropout feature_dropout_", random.dropout),
    **_named("rand_like randn_like randint_like bernoulli", random.rand_like),
    **_named("softmax log_softmax softmin", along(1, None)),
    **_named("cumsum cumprod logcumsumexp argmax argmin", along(1, None)),
    **_named("sort argsort glu", along(1, -1)),
    "topk": along(2, -1),
    **_named("index_select", along(1, None)),
    **_named("flip fliplr flipud", windows.flip),
    "unfold": windows.unfold,
    "im2col": windows.im2col,
    "col2im": windows.col2im,
    **_named("grid_sampler grid_sampler_2d grid_sampler_3d", windows.grid_sample),
    **_named("_cdist cdist", products.cdist),
    **_named(
        "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss"
        " binary_cross_entropy_with_logits poisson_nll_loss",
        losses.loss,
    ),
    **_named("cross_entropy_loss nll_loss nll_loss_nd nll_loss2d", losses.cross_entropy),
    **_named(
        "shape size dim ndim dtype device layout numel nelement stride is_floating_point"
        " is_complex is_cuda is_sparse is_quantized is_meta is_mkldnn names itemsize nbytes"
        " element_size is_signed get_device is_conj is_neg is_inference __dlpack_device__ is_nested"
        " is_mps is_xpu is_cpu type_dim sparse_dim is_shared is_pinned is_vulkan is_same_size"
        " result_type can_cast storage_offset _is_zerotensor",
        properties.of_whole,
    ),
    **_named("requires_grad grad_fn is_leaf is_contiguous _version", properties.of_block),
    "__len__": properties.length,
    **_named("zeros_like ones_like full_like empty_like", properties.filled),
    **_named("new_zeros new_ones new_empty new_full new_tensor", properties.made),
    "backward": properties.backward,
    "grad": properties.gradient,
    **_named("requires_grad_ retain_grad", properties.keep),
    **_named("item tolist __bool__ __float__ __int__ __index__ __complex__", properties.numbers),
}

PYTHON: dict[str, Rule] = {
    **_named("max_pool1d max_pool2d max_pool3d", sliding.max_pool),
    **_named("adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d", sliding.adaptive_pool),
    "interpolate": resampling.interpolate,
    "local_response_norm": norms.local_response_norm,
    "__len__": properties.length,
    "backward": properties.backward,
    "grad": properties.gradients,
    "norm": reductions.torch_norm,
    "rms_norm": norms.rms_norm,
}

QUIET = frozenset("numpy __array__ nonzero equal allclose __repr__ __format__ __contains__".split())
"""Functions that are of whole tensors by their meaning, without a warning."""

_NO_MEMORY = (
    "of a tensor that is cut: there is no memory that has all of it; x.block is this worker's, "
    "x.whole() all of it"
)
_MEMORY = "data_ptr untyped_storage storage _typed_storage set_ share_memory_".split()

REFUSED = dict.fromkeys(_MEMORY, _NO_MEMORY) | {
    "register_hook": "of a tensor that is cut: a hook would see this worker's gradient; give it to "
    "a whole tensor",
}


@cache
def _elementwise() -> frozenset[str]:
    return names() | frozenset(
        "where clamp clip clamp_min clamp_max relu relu6 elu selu silu mish gelu hardsigmoid"
        " softplus leaky_relu logit erf lerp addcmul addcdiv masked_fill maximum minimum"
        " isnan isinf isfinite complex polar __iadd__ __isub__ __imul__ __itruediv__ to cpu"
        " type_as".split()
    )


def pointwise(name: str) -> bool:
    """True for a function element by element."""
    plain = name.rstrip("_") if not name.startswith("__") else name
    return (name in _elementwise() or plain in _elementwise()) and name not in _OTHERS


_OTHERS = frozenset(("bernoulli", "max", "min", "copy", "requires_grad_", "data"))
