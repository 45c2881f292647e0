"""The tables of docs/torch_nn.md: each module of torch.nn, and where it is. `python
docs/torch_nn/table.py` writes them into the page."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import torch

from linop import layers

PAGE = Path(__file__).resolve().parents[1] / "torch_nn.md"
PLAIN = (
    "CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish "
    "ReLU ReLU6 SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Threshold"
).split()
"""Element by element: right on blocks as they are."""
HOLDERS = "Container Module ModuleDict ModuleList ParameterDict ParameterList Sequential".split()
"""Modules that hold others."""

_LAZY = "it learns its channels from a block; write them, with the layer of linop"
_LAZIES = (
    "LazyBatchNorm1d LazyBatchNorm2d LazyBatchNorm3d LazyConv1d LazyConv2d LazyConv3d "
    "LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d LazyInstanceNorm1d "
    "LazyInstanceNorm2d LazyInstanceNorm3d LazyLinear"
).split()
_IN_TURN = (
    "each element of a sequence waits for the one before it, so that a cut sequence leaves workers "
    "idle: cut the batch, with `linop.strategies.DataParallel`, or layers, with a pipeline"
)
_ATTENTION = (
    "it is made of modules whose cuts depend on the model: `MultiheadAttention`, `Linear` and "
    "`LayerNorm` are here; `linop.strategies.ContextParallel` cuts its sequences "
    "([attention.md](attention.md)), [tensor parallelism](tensor_parallel.md) its heads"
)
_MASK = (
    "its mask would be drawn by each worker for itself; `Dropout` and `Dropout1d/2d/3d` have masks "
    "that do not depend on the partition"
)
_PAIRS = (
    "a sum over one dimension: torch's own where that is not cut, else written with `AllReduce`"
)
_NO_LOSS = "not written as a loss over blocks; gather its inputs by `Repartition`"
REFUSED: dict[str, str] = {
    **dict.fromkeys(_LAZIES, _LAZY),
    **dict.fromkeys("GRU GRUCell LSTM LSTMCell RNN RNNBase RNNCell RNNCellBase".split(), _IN_TURN),
    **dict.fromkeys(
        "Transformer TransformerDecoder TransformerDecoderLayer TransformerEncoder "
        "TransformerEncoderLayer".split(),
        _ATTENTION,
    ),
    **dict.fromkeys("AlphaDropout FeatureAlphaDropout".split(), _MASK),
    "RReLU": "when training, each worker would draw its slopes for itself; `torch.nn.LeakyReLU` is "
    "what it is in evaluation",
    **dict.fromkeys(
        "FractionalMaxPool2d FractionalMaxPool3d".split(),
        "regions are drawn at random, by each worker for itself; `AdaptiveMaxPool2d/3d` has equal "
        "ones",
    ),
    **dict.fromkeys(
        "MaxUnpool1d MaxUnpool2d MaxUnpool3d".split(),
        "it wants indices into the whole tensor, which may be of any worker, and `MaxPool` gives "
        "none; `Upsample` or `ConvTranspose` enlarge images",
    ),
    **dict.fromkeys(
        "Fold Unfold".split(),
        "columns of overlapping patches have no blocks of their own; `Conv` and `ConvTranspose` do "
        "what follows or precedes them",
    ),
    "Bilinear": "its weight has three dimensions, of which no partition is written; two `Linear` "
    "and a product do, where the rank is low",
    "EmbeddingBag": "bags have any lengths; `Embedding`, and a sum",
    "SyncBatchNorm": "`BatchNorm1d/2d/3d` is over the global batch",
    "CrossMapLRN2d": "torch's older name; `LocalResponseNorm`",
    "DataParallel": "`linop.strategies.DataParallel`",
    "NLLLoss2d": "torch's older name; `NLLLoss`",
    "AdaptiveLogSoftmaxWithLoss": "which rows are computed depends on data; `CrossEntropyLoss` "
    "takes classes that are split",
    "LinearCrossEntropyLoss": "`Linear`, column-parallel, and `CrossEntropyLoss`",
    **dict.fromkeys("CosineSimilarity PairwiseDistance".split(), _PAIRS),
    **dict.fromkeys(
        "CTCLoss CosineEmbeddingLoss GaussianNLLLoss HingeEmbeddingLoss MarginRankingLoss "
        "MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss PoissonNLLLoss "
        "SoftMarginLoss TripletMarginLoss TripletMarginWithDistanceLoss".split(),
        _NO_LOSS,
    ),
}
"""Reasons, by name. Of names that `linop.layers` has, they do not count."""


def here() -> list[str]:
    """Names of torch.nn that linop.layers has."""
    return [name for name in layers.__all__ if hasattr(torch.nn, name)]


def known() -> set[str]:
    """Names that the tables have."""
    return {*here(), *PLAIN, *HOLDERS, *REFUSED}


def tables() -> str:
    """The tables, in Markdown."""
    there = {name: _first(getattr(layers, name)) for name in here()}
    refused = {name: why for name, why in REFUSED.items() if name not in there}
    return "\n".join(
        [
            f"## In linop.layers: {len(there)}",
            "",
            *_rows(there, "what it is"),
            "",
            f"## torch's own, on blocks: {len(PLAIN) + len(HOLDERS)}",
            "",
            "Element by element, or nothing but holders of modules: "
            + ", ".join(f"`{name}`" for name in sorted(PLAIN + HOLDERS))
            + ".",
            "",
            f"## Refused: {len(refused)}",
            "",
            *_rows(refused, "the reason, and what to take"),
        ]
    )


def _first(kind: type) -> str:
    """First sentence of a docstring."""
    text = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[^.])\.(?:\s|$)", text)[0].split("; see ")[0]


def _rows(texts: dict[str, str], title: str) -> list[str]:
    """A table in which names with one text share a row."""
    groups: dict[str, list[str]] = {}
    for name in sorted(texts):
        groups.setdefault(texts[name], []).append(name)
    rows = [f"| torch.nn | {title} |", "| --- | --- |"]
    return rows + [f"| {_joined(names)} | {text} |" for text, names in groups.items()]


def _joined(names: list[str]) -> str:
    """Names, those that differ in their dimensions in one: `Conv1d/2d/3d`."""
    found: dict[str, list[str]] = {}
    for name in names:
        stem, dims = re.fullmatch(r"(.*?)(\dd)?", name).groups()  # type: ignore[union-attr]
        found.setdefault(stem, []).append(dims or "")
    return ", ".join(f"`{stem}{'/'.join(dims)}`" for stem, dims in found.items())


def page(text: str) -> str:
    """The page with new tables."""
    first, last = "<!-- tables -->\n", "\n<!-- end of tables -->"
    begin, rest = text.split(first)
    return f"{begin}{first}\n{tables()}\n{last}{rest.split(last)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
