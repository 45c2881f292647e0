"""The functions that may be given a tensor that is cut, by what they mean: what each makes of the
cut. A function that is not here is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from linop.strategies.tensor.following import along as by_dims
from linop.strategies.tensor.following import parts, products, shapes
from linop.strategies.tensor.following.along import along, last, only
from linop.strategies.tensor.following.cuts import Refused
from linop.strategies.tensor.following.elementwise import elementwise, names
from linop.strategies.tensor.following.function_call import FunctionCall

Rule = Callable[[FunctionCall], Any]


def _named(text: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(text.split(), rule)


def _where(call: FunctionCall) -> Any:
    if len(call.args) + len(call.kwargs) < 3:
        raise Refused("with a condition alone: positions in this worker's part")
    return elementwise(call)


def _evaluated(call: FunctionCall) -> Any:
    """batch_norm: with statistics that it is given."""
    if call.given(5, "training", default=False):
        raise Refused("of samples that are split, or with statistics of this worker's channels")
    return only(0)(call)


def _samples(count: int) -> Rule:
    """Convolutions over so many dimensions: samples do not know of each other."""

    def rule(call: FunctionCall) -> Any:
        x, cut = call.cut_of()
        if x.ndim != count + 2:
            by_dims.refuse_along(cut, x.ndim)
        return only(0)(call)

    return rule


def _one_hot(call: FunctionCall) -> Any:
    """One dimension more, the last."""
    if call.given(1, "num_classes", default=-1) < 0:
        raise Refused("without num_classes=: classes of this worker's part would be counted")
    return call.cut_of()[1]


_LOSSES = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div poisson_nll_loss"
    " binary_cross_entropy_with_logits"
)

RULES: Mapping[str, Rule] = {
    **_named(
        "sum mean prod amax amin any all argmax argmin nansum nanmean count_nonzero logsumexp std"
        " var std_mean var_mean median nanmedian aminmax special_logsumexp",
        along(1),
    ),
    **_named("max min", by_dims.extremum),
    **_named("norm linalg_norm linalg_vector_norm", along(2)),
    **_named("softmax log_softmax softmin special_softmax special_log_softmax", along(1)),
    **_named("cumsum cumprod cummax cummin logcumsumexp", along(1)),
    **_named("sort argsort msort glu", along(1, -1)),
    "flip": along(1, None, many=True),
    "roll": along(2),
    **_named("topk diff kthvalue", along(2, -1)),
    "normalize": along(2, 1),
    **_named("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft", along(2, -1)),
    "cosine_similarity": by_dims.compared(2, 1),
    "pairwise_distance": by_dims.compared(9, -1),
    **_named("layer_norm rms_norm native_layer_norm", by_dims.normalised),
    "group_norm": only(0),
    "batch_norm": _evaluated,
    **{f"{name}{n}d": _samples(n) for name in ("conv", "conv_transpose") for n in (1, 2, 3)},
    **_named("avg_pool1d max_pool1d lp_pool1d adaptive_avg_pool1d adaptive_max_pool1d", last(1)),
    **_named("avg_pool2d max_pool2d lp_pool2d adaptive_avg_pool2d adaptive_max_pool2d", last(2)),
    **_named("avg_pool3d max_pool3d adaptive_avg_pool3d adaptive_max_pool3d", last(3)),
    **_named("interpolate upsample pixel_shuffle pixel_unshuffle", only(0)),
    **_named("tril triu", last(2)),
    "view_as_complex": last(1),
    "view_as_real": last(0),
    "one_hot": _one_hot,
    "embedding": by_dims.embedded,
    "pad": by_dims.padded,
    **_named(_LOSSES, by_dims.unreduced),
    "where": _where,
    **_named(
        "transpose swapaxes swapdims permute movedim moveaxis T t H mT mH adjoint numpy_T",
        shapes.moved,
    ),
    "unsqueeze": shapes.unsqueezed,
    "squeeze": shapes.squeezed,
    **_named("view reshape _unsafe_view", shapes.viewed),
    **_named("view_as reshape_as", shapes.viewed_as),
    "flatten": shapes.flattened,
    "unflatten": shapes.unflattened,
    **_named("expand broadcast_to", shapes.expanded),
    **_named("repeat tile", shapes.repeated),
    "repeat_interleave": shapes.repeated_each,
    **_named("ones zeros full empty new_ones new_zeros new_full new_empty", shapes.filled),
    **_named(
        "chunk split split_with_sizes tensor_split unsafe_chunk unsafe_split", parts.divided(2, 0)
    ),
    "narrow": parts.divided(1, 0),
    "select": parts.divided(1, 0, loses=True),
    "unbind": parts.divided(1, 0, loses=True),
    "__iter__": parts.iterated,
    "__getitem__": parts.indexed,
    "__setitem__": parts.assigned,
    **_named("cat concat concatenate", parts.joined),
    "stack": parts.stacked,
    "index_select": parts.selected,
    **_named("index_copy index_add", parts.put),
    **_named("gather scatter scatter_add take_along_dim scatter_reduce", parts.gathered),
    **_named("matmul mm bmm mv __matmul__ __rmatmul__ linalg_matmul", products.multiplied),
    **_named("addmm baddbmm addbmm addmv", products.added),
    "linear": products.linear,
    "einsum": products.einsum,
    **_named("scaled_dot_product_attention attention_of_parts", products.attended),
    **_named(
        "dropout dropout1d dropout2d dropout3d feature_dropout alpha_dropout feature_alpha_dropout"
        " rrelu",
        elementwise,
    ),
}
"""By the names of functions and methods, without the underscore of those in place."""

SIZE_AWARE = frozenset(
    "view reshape expand broadcast_to repeat tile repeat_interleave ones zeros full empty new_ones"
    " new_zeros new_full new_empty rand randn unflatten __getitem__ __setitem__".split()
)
"""Functions whose rules know numbers that differ between workers."""

SAFE = frozenset(
    "shape size dim ndim dtype device layout requires_grad is_leaf grad_fn stride is_contiguous"
    " is_floating_point is_complex is_cuda is_cpu is_meta is_sparse is_quantized is_mps is_xla"
    " element_size itemsize data_ptr storage_offset nelement numel __hash__"
    " _version name names has_names get_device retain_grad is_tensor"
    " is_nested is_inference is_mkldnn is_neg is_conj is_signed can_cast result_type is_storage"
    " untyped_storage _is_view ndimension retains_grad is_shared output_nr grad is_vulkan is_ipu"
    " is_maia is_xpu is_mtia is_hpu is_ort nbytes dim_order _typed_storage ".split()
)
"""Questions about a tensor: no rule is needed."""


@cache
def rule_of(name: str) -> Rule | None:
    """The rule of a function; None if it has none."""
    for one in (name, name if name.startswith("__") else name.rstrip("_")):
        if one in RULES:
            return RULES[one]
        if one in names_of_elementwise():
            return elementwise
    return None


@cache
def is_elementwise(name: str) -> bool:
    """True for a function that is computed element by element."""
    return rule_of(name) is elementwise


@cache
def names_of_elementwise() -> frozenset[str]:
    return names()
