"""A small call of each layer of `linop.layers`, for torch's compiler and its export: contracts for
ranks, and the table of docs/torch_nn/graphs.py. Needs torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from linop import Partition, layers
from linop.backends.engine.base import Backend
from linop.errors import BackendError
from support.contracts.plans import mine

WIDE = torch.float64


@dataclass(frozen=True)
class Example:
    """A call of a layer.

    Args:
        layer: its name in linop.layers.
        grid: its partition, by the number of workers; ``n`` stands for that.
        shape: of each worker's block.
        arguments, options: those after the partition.
        others: kinds of the inputs after the first: "real", "unit" (from 0 to 1), "sign", "count",
            "classes".
        unit: the first input is from 0 to 1.
        words: classes of targets, or rows of a table; the first input is of them if `indices`.
        note: options that the title has.
    """

    layer: str
    grid: tuple[Any, ...]
    shape: tuple[int, ...]
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    unit: bool = False
    words: int = 0
    indices: bool = False
    note: str = ""

    @property
    def title(self) -> str:
        """Name of the layer, and its options."""
        return f"{self.layer}{f' ({self.note})' if self.note else ''}"

    def partition(self, workers: int) -> Partition:
        """The grid of so many workers."""
        return Partition(tuple(workers if k == "n" else k for k in self.grid))

    def make(self, backend: Backend) -> Any:
        """The layer. Collective."""
        torch.manual_seed(0)
        P = self.partition(backend.workers or 1)
        arguments = [P if one == "P" else one for one in self.arguments]
        options = {name: P if one == "P" else one for name, one in self.options.items()}
        made = getattr(layers, self.layer)(P, *arguments, **options)
        return made.to(WIDE) if self.layer != "SpectralConv" else made.to(torch.complex128)

    def inputs(self, backend: Backend) -> list[Any]:
        """This worker's blocks."""
        drawn = torch.Generator().manual_seed(5 + mine(backend))
        same = torch.Generator().manual_seed(3)  # of what workers of one block share
        x: Any = torch.randn(self.shape, generator=drawn, dtype=WIDE)
        if self.unit:
            x = torch.rand(self.shape, generator=drawn, dtype=WIDE)
        if self.indices:
            x = torch.randint(self.words, self.shape, generator=drawn)
        given = [x if self.indices else x.requires_grad_()]
        for kind in self.others:
            given.append(self._other(kind, drawn, same))
        return given

    def _other(self, kind: str, drawn: Any, same: Any) -> Any:
        rows = self.shape[:1]
        if kind == "real":
            return torch.randn(self.shape, generator=drawn, dtype=WIDE).requires_grad_()
        if kind == "unit":
            return torch.rand(self.shape, generator=drawn, dtype=WIDE)
        if kind == "sign":
            return torch.randint(2, self.shape, generator=drawn).to(WIDE) * 2 - 1
        if kind == "row signs":
            return torch.randint(2, rows, generator=same).to(WIDE) * 2 - 1
        if kind == "classes":  # dimension 1 is that of classes
            shape = (*self.shape[:1], *self.shape[2:])
            cut = len(self.grid) > 1 and self.grid[1] == "n"
            return torch.randint(self.words, shape, generator=same if cut else drawn)
        if kind == "listed":
            return torch.randint(-1, self.words, self.shape, generator=drawn)
        if kind == "labels":
            return torch.randint(1, self.words, (self.shape[1], 3), generator=drawn)
        assert kind in ("steps", "lengths"), kind
        return torch.full((self.shape[1],), self.shape[0] if kind == "steps" else 3)


def _dims(name: str, shapes: Sequence[tuple[int, ...]], **options: Any) -> list[Example]:
    """Examples of layers of one to three dimensions, whose last one is cut."""
    return [
        Example(f"{name}{len(s)}d", (1, 1, *[1] * (len(s) - 1), "n"), (2, 4, *s), **options)
        for s in shapes
    ]


def _norms() -> list[Example]:
    found = []
    for name, shape in ("1d", (3, 4, 4)), ("2d", (3, 4, 2, 4)), ("3d", (3, 4, 2, 2, 2)):
        for grid in ("n",), (1, "n"), (1, *[1] * (len(shape) - 2), "n"):
            cut = "batch" if len(grid) == 1 else "channels" if len(grid) == 2 else "space"
            width = 4 if cut != "channels" else 8
            found.append(Example(f"BatchNorm{name}", grid, shape, (width,), note=cut))
            tracked = {"track_running_stats": True, "affine": True}
            found.append(Example(f"InstanceNorm{name}", grid, shape, (width,), tracked, note=cut))
    momentum = {"momentum": None}
    found += [
        Example("BatchNorm1d", ("n",), (3, 4), (4,), momentum, note="momentum=None"),
        Example("InstanceNorm1d", ("n",), (3, 4, 4), (4,), note="nothing tracked"),
    ]
    for grid, width in ((("n",), 4), ((1, "n"), 8), ((1, 1, "n"), 4)):
        cut = ("batch", "channels", "space")[len(grid) - 1]
        found.append(Example("GroupNorm", grid, (2, 4, 4), (2, width), note=cut))
    for name in "LayerNorm", "RMSNorm":
        found += [
            Example(name, ("n",), (3, 4), (4,), note="batch"),
            Example(name, (1, "n"), (3, 4), (8,), note="features"),
        ]
    found.append(Example("LocalResponseNorm", (1, "n"), (2, 4, 3), (3,)))
    return found


def _losses() -> list[Example]:
    two = (1, "n")
    found = []
    for name in "MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "PoissonNLLLoss":
        found.append(Example(name, two, (3, 4), others=("unit",)))
    found += [
        Example("KLDivLoss", two, (3, 4), others=("unit",), options={"reduction": "batchmean"}),
        Example("BCELoss", two, (3, 4), others=("unit",), unit=True),
        Example("BCEWithLogitsLoss", two, (3, 4), others=("unit",)),
        Example("SoftMarginLoss", two, (3, 4), others=("sign",)),
        Example("HingeEmbeddingLoss", two, (3, 4), others=("sign",)),
        Example("MarginRankingLoss", two, (3, 4), others=("real", "sign")),
        Example("GaussianNLLLoss", two, (3, 4), others=("real", "unit")),
        Example(
            "MSELoss",
            two,
            (3, 4),
            others=("real",),
            options={"reduction": "none"},
            note="no reduction",
        ),
        Example(
            "BCELoss",
            two,
            (3, 4),
            others=("unit",),
            unit=True,
            options={"reduction": "none"},
            note="no reduction",
        ),
        Example("CosineEmbeddingLoss", two, (3, 4), others=("real", "row signs")),
        Example("TripletMarginLoss", two, (3, 4), others=("real", "real")),
        Example("TripletMarginWithDistanceLoss", two, (3, 4), others=("real", "real")),
        Example("MultiMarginLoss", two, (3, 4), others=("classes",), words=8),
        Example("MultiLabelMarginLoss", two, (3, 4), others=("listed",), words=8),
        Example("MultiLabelSoftMarginLoss", two, (3, 4), others=("unit",)),
        Example("CTCLoss", (1, "n", 1), (6, 2, 5), others=("labels", "steps", "lengths"), words=5),
    ]
    for name in "NLLLoss", "CrossEntropyLoss":
        found += [
            Example(name, ("n",), (3, 4), others=("classes",), words=4, note="batch"),
            Example(name, two, (3, 4), others=("classes",), words=8, note="classes"),
        ]
    none = {"reduction": "none"}
    found.append(
        Example(
            "CrossEntropyLoss",
            two,
            (3, 4),
            others=("classes",),
            words=8,
            options=none,
            note="no reduction",
        )
    )
    return found


def _pads() -> list[Example]:
    shapes = [(4,), (2, 4), (2, 3, 4)]
    found = []
    for kind in "Circular", "Reflection", "Replication", "Zero":
        found += _dims(f"{kind}Pad", shapes, arguments=(1,))
    return found + _dims("ConstantPad", shapes, arguments=(1, 2.5))


def _sliding() -> list[Example]:
    shapes = [(8,), (4, 8), (4, 4, 8)]
    found = []
    found += _dims("Conv", shapes, arguments=(4, 2, 3), options={"padding": 1})
    found += _dims("ConvTranspose", shapes, arguments=(4, 2, 3), options={"padding": 1})
    for kind in "AvgPool", "MaxPool":
        found += _dims(kind, shapes, arguments=(2,))
    found += _dims("LPPool", shapes, arguments=(2, 2))
    found += _dims("AdaptiveAvgPool", shapes, arguments=(4,))
    return found + _dims("AdaptiveMaxPool", shapes, arguments=(4,))


def _reductions() -> list[Example]:
    found = []
    for name in "Sum", "Mean", "Prod", "Amax", "Amin", "LogSumExp", "Var", "Std":
        found.append(Example(name, (1, "n"), (3, 4), options={"dim": 1}))
    found += [
        Example("Norm", (1, "n"), (3, 4), options={"dim": 1}),
        Example("Norm", (1, "n"), (3, 4), options={"ord": 3.0}, note="all, order 3"),
        Example("Mean", ("n",), (3, 4), note="all"),
    ]
    return found


def _moves() -> list[Example]:
    one = Partition((1, 1))
    return [
        Example("Repartition", ("n", 1), (2, 4), (Partition((1, 2)),)),
        Example("Repartition", ("n", 1), (2, 4), (one,), note="to one worker"),
        Example("AllReduce", ("n", 1), (2, 4), ((0,),)),
        Example("AllGather", ("n", 1), (2, 4), ((0,),)),
        Example("ReduceScatter", ("n", 1), (2, 4), ((0,),)),
        Example("HaloExchange", (1, 1, "n"), (2, 4, 4), (3,), {"padding": 1}),
        Example("SumReduce", ("n", 1), (2, 4), (one,)),
        Example("Broadcast", ("n", 1), (2, 4), ("P",)),
    ]


def examples() -> list[Example]:
    """A call of each layer, and of some in several cuts."""
    last = (1, 1, "n")
    attention = {"batch_first": True}
    found = [
        Example("Linear", ("n", 1), (3, 4), (4, 5), note="batch"),
        Example("Linear", (1, "n"), (3, 4), (8, 6), note="features"),
        Example("PReLU", (1, "n"), (3, 4), (8,)),
        Example("GLU", (1, "n"), (3, 4)),
        Example("Softmax", (1, "n"), (3, 4), (1,)),
        Example("Softmin", (1, "n"), (3, 4), (1,)),
        Example("LogSoftmax", (1, "n"), (3, 4), (1,)),
        Example("Softmax2d", (1, "n"), (2, 4, 3, 3)),
        Example("Flatten", (1, "n"), (2, 4, 3)),
        Example("Unflatten", (1, "n"), (2, 4, 3), (1, (2, 4))),
        Example("ChannelShuffle", (1, "n"), (2, 4, 2, 2), (2,)),
        Example("PixelShuffle", (1, "n"), (2, 4, 2, 2), (2,)),
        Example("PixelUnshuffle", (1, 1, 1, "n"), (2, 2, 4, 4), (2,)),
        Example("Upsample", last, (2, 3, 4), options={"scale_factor": 2, "mode": "linear"}),
        Example("UpsamplingBilinear2d", (1, 1, 1, "n"), (2, 3, 4, 4), (), {"scale_factor": 2}),
        Example("UpsamplingNearest2d", (1, 1, 1, "n"), (2, 3, 4, 4), (), {"scale_factor": 2}),
        Example("Downsample", last, (2, 3, 4), (2,)),
        Example("SpectralConv", last, (2, 2, 8), (2, 3, (4,))),
        Example(
            "SpectralConv",
            (1, 1, "n", 1),
            (2, 2, 4, 8),
            (2, 3, (4, 3)),
            {"real": True},
            note="real",
        ),
        Example("Dropout", ("n",), (3, 4)),
        Example("Dropout", (1, "n"), (3, 4), options={"inplace": True}, note="in place"),
        Example("Dropout1d", (1, "n"), (3, 4, 2)),
        Example("Dropout2d", (1, "n"), (3, 4, 2, 2)),
        Example("Dropout3d", (1, "n"), (3, 4, 2, 2, 2)),
        Example("Embedding", ("n",), (3, 4), (10, 4), words=10, indices=True),
        Example(
            "Embedding",
            ("n",),
            (3, 4),
            (10, 4),
            {"padding_idx": 7, "scale_grad_by_freq": True},
            words=10,
            indices=True,
            note="padding, frequencies",
        ),
        Example(
            "Embedding",
            ("n",),
            (3, 4),
            (10, 4),
            {"max_norm": 1.0},
            words=10,
            indices=True,
            note="largest norm",
        ),
        Example(
            "Embedding",
            ("n",),
            (3, 4),
            (10, 4),
            {"sparse": True, "padding_idx": 7},
            words=10,
            indices=True,
            note="sparse gradients, padding",
        ),
        Example(
            "Embedding",
            ("n",),
            (3, 4),
            (10, 4),
            {"sparse": True, "max_norm": 1.0, "padding_idx": 2},
            words=10,
            indices=True,
            note="sparse gradients, largest norm, padding",
        ),
        Example(
            "MultiheadAttention",
            (1, 1, "n"),
            (2, 5, 4),
            (8, 4),
            attention,
            ("real", "real"),
            note="heads",
        ),
        Example(
            "MultiheadAttention",
            (1, "n"),
            (2, 5, 8),
            (8, 4),
            attention,
            ("real", "real"),
            note="ring",
        ),
        Example(
            "MultiheadAttention",
            (1, "n"),
            (2, 5, 8),
            (8, 4),
            attention | {"method": "ulysses"},
            ("real", "real"),
            note="Ulysses",
        ),
        Example(
            "MultiheadAttention",
            (1, "n"),
            (2, 5, 8),
            (8, 4),
            attention | {"dropout": 0.4},
            ("real", "real"),
            note="ring, dropout",
        ),
        Example("MixtureOfExperts", ("n",), (4, 6), (6, 5, 4)),
    ]
    return [*found, *_norms(), *_losses(), *_pads(), *_sliding(), *_reductions(), *_moves()]


# Runs

Call = Callable[..., Any]


def results(module: Any, call: Call, example: Example, backend: Backend, steps: int = 2) -> Any:
    """Of some calls: results, gradients, and buffers afterwards."""
    found: list[Any] = []
    for step in range(steps):
        torch.manual_seed(step)
        given = example.inputs(backend)
        module.zero_grad()
        # Layers that write into their input are given a copy.
        y = call(*(x * 1 if x.is_floating_point() else x for x in given))
        y = y[0] if isinstance(y, tuple) else y
        found.append(y.detach().clone())
        if y.requires_grad:
            (y * y).sum().abs().backward()
        found += [x.grad for x in given if x.is_floating_point()]
        found += [p.grad for p in module.parameters()]
        found += [p.detach().clone() for p in module.parameters()]
        found += [b.clone() for b in module.buffers()]
        found.append(torch.randint(99, (1,)))  # torch's generator, afterwards
    return found


def compiled(example: Example, backend: Backend) -> tuple[Any, Any]:
    """Results of the layer, and of the one that is compiled."""
    eager, other = example.make(backend), example.make(backend)
    call = torch.compile(other, fullgraph=True, backend="aot_eager")
    return results(eager, eager, example, backend), results(other, call, example, backend)


def exported(example: Example, backend: Backend) -> tuple[Any, Any]:
    """Results of the layer, and of the one that is exported."""
    eager, other = example.make(backend), example.make(backend)
    given = [x.detach() for x in example.inputs(backend)]
    program = torch.export.export(other, tuple(given)).module()
    return results(eager, eager, example, backend), results(program, program, example, backend)


def difference(one: Any, other: Any) -> float:
    """The largest of results, by the largest of these."""
    assert len(one) == len(other), (len(one), len(other))
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        if a is None or b is None:
            assert a is None and b is None, "a gradient is missing"
            continue
        forms = [(x.shape, x.dtype, x.layout) for x in (a, b)]
        assert forms[0] == forms[1], forms
        if a.layout is torch.sparse_coo:
            a, b = a.coalesce(), b.coalesce()
            assert torch.equal(a.indices(), b.indices()), (a, b)  # others have no gradients
            a, b = a.values(), b.values()
        if a.numel() and not torch.equal(a, b):
            scale = max(1.0, a.abs().max().item())
            worst = max(worst, (a - b).abs().max().item() / scale)
    return worst


# Contracts

ROUNDED = ("Prod",)


def are_graphs(backend: Backend, part: int, parts: int) -> None:
    """Examples, each `parts`-th of them, compiled and exported, have the bits of eager calls; those
    of `ROUNDED`, whose derivative torch takes apart in graphs, are rounded otherwise."""
    for example in examples()[part::parts]:
        for way in compiled, exported:
            torch.compiler.reset()
            worst = difference(*way(example, backend))
            most = 1e-12 if example.layer in ROUNDED else 0
            assert worst <= most, (example.title, way.__name__, worst)


class Counted(layers.Layer):
    """A layer of somebody, whose work depends on values."""

    untraceable = "how often it works depends on values"

    def bind(self, X: Any) -> Any:
        del X
        return lambda x: x * int(x.sum())


def says_why(backend: Backend) -> None:
    """The error of a layer that is no part of graphs has its reason."""
    net, x = Counted([Partition((backend.workers or 1,))], None), torch.ones(2)
    assert torch.equal(torch.compile(net, backend="aot_eager")(x), net(x))
    torch.compiler.reset()
    for way in (
        lambda: torch.compile(net, fullgraph=True, backend="aot_eager")(x),
        lambda: torch.export.export(net, (x,)),
    ):
        try:
            way()
        except (torch._dynamo.exc.Unsupported, BackendError) as error:
            assert "Counted is not part of graphs: how often" in str(error), str(error)
        else:
            raise AssertionError(way)


def told(backend: Backend, numbers: Sequence[int], path: str) -> None:
    """Appends what becomes of examples to a file: a line for each, with its number, and a text for
    each way. It stops at the first that fails, where workers may have come apart."""
    for number in numbers:
        example, words = examples()[number], []
        failed = False
        for way in compiled, exported:
            torch.compiler.reset()
            try:
                words.append(f"{difference(*way(example, backend)):.1e}")
            except Exception as error:
                words.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
                failed = True
                break
        if mine(backend) == 0:
            with Path(path).open("a") as file:
                file.write(json.dumps([number, *words]) + "\n")
        assert not failed, words
