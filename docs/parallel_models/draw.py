"""Draw the pictures of docs/parallel_models.md: ``python docs/parallel_models/draw.py`` writes
``pictures/*.svg`` beside this file. Each is data: tensors of the ranks in columns, and arrows for
what is computed or sent from one column to the next."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from linop.svg import SOFT, Drawing

FOLDER = Path(__file__).parent / "pictures"
SENT, FAULT = "#4480ad", "#d8414d"
"""Colours that read on light and on dark paper."""
LEFT, WIDE, HIGH, ROW = 74, 138, 28, 44
"""Pixels: of the ranks' names, of a box, and from rank to rank."""
GAPS = {2: 190, 3: 96, 4: 96}
"""Pixels between columns, by their number."""

Arrow = tuple[int, int]
"""From a rank to a rank."""
OWN: tuple[Arrow, ...] = ((0, 0), (1, 1))
"""Nothing is sent."""
OTHERS: tuple[Arrow, ...] = ((0, 1), (1, 0))
ALL = OWN + OTHERS


@dataclass(frozen=True)
class Step:
    """The arrows between two columns.

    Attributes:
        label: above them.
        sent: arrows of the right program.
        missing: those of the right program that the wrong one has not.
        extra: those that only the wrong one has.
    """

    label: str
    sent: tuple[Arrow, ...]
    missing: tuple[Arrow, ...] = ()
    extra: tuple[Arrow, ...] = ()


@dataclass(frozen=True)
class Panel:
    """One direction.

    Attributes:
        title: of the panel; arrows of one that begins with "backward" point to the left.
        columns: for each the tensors, by rank.
        steps: one less than columns.
        down: columns in which rank 0 sends to rank 1, or in a backward panel receives.
        fault: a sentence in red.
    """

    title: str
    columns: tuple[tuple[str, ...], ...]
    steps: tuple[Step, ...]
    down: tuple[int, ...] = ()
    fault: str = ""


@dataclass(frozen=True)
class Picture:
    """Panels below each other, whose columns are the same spaces.

    Attributes:
        spaces: the names of the columns.
        summary: of all, for readers who do not see it.
    """

    spaces: tuple[str, ...]
    panels: tuple[Panel, ...]
    summary: str


PICTURES = {
    "inplace_all_reduce": Picture(
        ("a term on each rank", "the mean: a copy each"),
        (
            Panel("forward", (("m₀", "m₁"), ("m₀ + m₁", "m₀ + m₁")), (Step("all-reduce", ALL),)),
            Panel(
                "backward",
                (("g₀ + g₁", "g₀ + g₁"), ("g₀", "g₁")),
                (Step("all-reduce", OWN, OTHERS),),
                fault="in place: each rank's gradient goes back to this rank alone",
            ),
        ),
        "Forward an all-reduce, backward an all-reduce of the gradients; the wrong program leaves "
        "out what other ranks send.",
    ),
    "f_and_g": Picture(
        ("replicated", "a copy each", "terms of a sum", "replicated"),
        (
            Panel(
                "forward",
                (("x", "x"), ("x", "x"), ("y₀", "y₁"), ("y₀ + y₁", "y₀ + y₁")),
                (Step("f: nothing", OWN), Step("split layers", OWN), Step("g: all-reduce", ALL)),
            ),
            Panel(
                "backward",
                (("g₀ + g₁", "g₀ + g₁"), ("g₀", "g₁"), ("g", "g"), ("g", "g")),
                (
                    Step("f: all-reduce", OWN, OTHERS),
                    Step("split layers", OWN),
                    Step("g: nothing", OWN, extra=OTHERS),
                ),
                fault="the backward passes of f and g are swapped",
            ),
        ),
        "Forward f moves nothing and g is an all-reduce; backward f is an all-reduce and g moves "
        "nothing. The wrong program has it the other way round.",
    ),
    "row_bias": Picture(
        ("terms of a sum", "replicated", "replicated"),
        (
            Panel(
                "forward",
                (("h₀ W₀", "h₁ W₁"), ("y", "y"), ("y + b", "y + b")),
                (Step("all-reduce", ALL), Step("+ b", OWN)),
                fault="h₀ W₀ + b and h₁ W₁ + b before the sum: y + 2 b",
            ),
            Panel(
                "backward",
                (("g", "g"), ("g", "g"), ("g", "g")),
                (Step("nothing", OWN), Step("b gets g", OWN)),
            ),
        ),
        "The bias is added once, behind the all-reduce.",
    ),
    "sequence_norm": Picture(
        ("weight of the norm, replicated", "normalised tokens, blocks"),
        (
            Panel("forward", (("w", "w"), ("tokens 0–2", "tokens 3–5")), (Step("used", OWN),)),
            Panel(
                "backward, and after it",
                (("d₀ + d₁", "d₀ + d₁"), ("d₀", "d₁")),
                (Step("all-reduce", OWN, OTHERS),),
                fault="each rank keeps the gradient of its own tokens",
            ),
        ),
        "Each rank uses the weight for its own tokens; the gradient is the sum over the ranks.",
    ),
    "broadcast_weight": Picture(
        ("weight of rank 0", "a copy each"),
        (
            Panel("forward", (("w", "—"), ("w", "w")), (Step("broadcast", ((0, 0), (0, 1))),)),
            Panel(
                "backward",
                (("g₀ + g₁", "—"), ("g₀", "g₁")),
                (Step("sum-reduce", ((0, 0),), ((1, 0),)),),
                fault="rank 0 gets the gradient of its own copy alone",
            ),
        ),
        "Forward a broadcast from rank 0, backward a sum-reduce to it.",
    ),
    "vocabulary": Picture(
        ("tokens, replicated", "terms of a sum", "rows, replicated"),
        (
            Panel(
                "forward",
                (("ids", "ids"), ("rows 0–4, else 0", "rows 5–9, else 0"), ("rows", "rows")),
                (Step("look up", OWN), Step("all-reduce", ALL)),
                fault="no zeros: a row is added to tokens that another rank has",
            ),
            Panel(
                "backward",
                (("", ""), ("g at ids 0–4", "g at ids 5–9"), ("g", "g")),
                (Step("", ()), Step("nothing", OWN)),
            ),
        ),
        "Each rank looks up the tokens whose rows it has, zeros for others, and these are summed.",
    ),
    "tied_stages": Picture(
        ("table, a copy each", "stages"),
        (
            Panel(
                "forward",
                (("T", "T"), ("T, first: h", "second, Tᵀ: logits")),
                (Step("used", OWN),),
                down=(1,),
            ),
            Panel(
                "backward, and after it",
                (("d₀ + d₁", "d₀ + d₁"), ("d₀ as embedding", "d₁ as output")),
                (Step("all-reduce", OWN, OTHERS),),
                down=(1,),
                fault="each stage keeps the gradient of its own use of the table",
            ),
        ),
        "Both stages use the table; its gradient is the sum of both.",
    ),
    "unequal_batches": Picture(
        ("tokens of each rank", "loss, replicated"),
        (
            Panel(
                "forward",
                (("4 tokens, sum s₀", "2 tokens, sum s₁"), ("(s₀ + s₁) / 6", "(s₀ + s₁) / 6")),
                (Step("all-reduce", ALL),),
                fault="the mean of means is (s₀ / 4 + s₁ / 2) / 2",
            ),
            Panel("backward", (("g / 6", "g / 6"), ("g", "g")), (Step("nothing", OWN),)),
        ),
        "Sums and counts are summed over ranks before one is divided by the other.",
    ),
    "mesh_axis": Picture(
        ("terms of a sum", "summed"),
        (
            Panel(
                "forward: y, over tp",
                (("y₀₀", "y₀₁", "y₁₀", "y₁₁"), ("y₀", "y₀", "y₁", "y₁")),
                (
                    Step(
                        "all-reduce",
                        ((0, 0), (0, 1), (1, 0), (1, 1), (2, 2), (2, 3), (3, 2), (3, 3)),
                    ),
                ),
            ),
            Panel(
                "after the backward pass: gradients, over dp",
                (("d₀₀", "d₀₁", "d₁₀", "d₁₁"), ("d₀₀ + d₁₀", "d₀₁ + d₁₁") * 2),
                (
                    Step(
                        "all-reduce",
                        ((0, 0), (1, 1), (2, 2), (3, 3)),
                        ((0, 2), (2, 0), (1, 3), (3, 1)),
                        ((0, 1), (1, 0), (2, 3), (3, 2)),
                    ),
                ),
                fault="the sum runs over tp, where ranks hold gradients of different shards",
            ),
        ),
        "Ranks 0 and 2, 1 and 3 hold terms of the same gradient; the wrong program sums over ranks "
        "0 and 1, 2 and 3.",
    ),
    "clip_norm": Picture(
        ("squares of own shards, terms", "norm, replicated"),
        (
            Panel(
                "after the backward pass",
                (("s₀ = |d₀|²", "s₁ = |d₁|²"), ("√(s₀ + s₁)", "√(s₀ + s₁)")),
                (Step("all-reduce", OWN, OTHERS),),
                fault="√s₀ on rank 0 and √s₁ on rank 1: each scales by another factor",
            ),
        ),
        "The squares of all shards are summed over ranks before the root is taken.",
    ),
    "detached_gather": Picture(
        ("features, blocks", "all features, a copy each"),
        (
            Panel("forward", (("z₀", "z₁"), ("z₀, z₁", "z₀, z₁")), (Step("all-gather", ALL),)),
            Panel(
                "backward",
                (("g₀₀ + g₁₀", "g₀₁ + g₁₁"), ("g₀₀, g₀₁", "g₁₀, g₁₁")),
                (Step("reduce-scatter", OWN, OTHERS),),
                fault="the gradients of other ranks' copies stay there",
            ),
        ),
        "Forward an all-gather, backward a reduce-scatter.",
    ),
    "ulysses": Picture(
        ("tokens split: [tokens / 2, heads]", "heads split: [tokens, heads / 2]"),
        (
            Panel(
                "forward",
                (("0A 0B", "1A 1B"), ("0A, 1A", "0B, 1B")),
                (Step("all-to-all", ALL),),
            ),
            Panel(
                "backward",
                (("0A 0B", "1A 1B"), ("0A, 1A", "0B, 1B")),
                (Step("all-to-all", ALL),),
                fault="blocks of heads are left below each other, not put side by side",
            ),
        ),
        "Forward an all-to-all, backward the all-to-all with splitting and joining exchanged.",
    ),
    "batch_statistics": Picture(
        ("samples, blocks", "sums, terms", "mean, variance: a copy each"),
        (
            Panel(
                "forward",
                (("x₀", "x₁"), ("s₀, n₀", "s₁, n₁"), ("s / n", "s / n")),
                (Step("sum", OWN), Step("all-reduce", OWN, OTHERS)),
                fault="each rank divides its own sum by its own count",
            ),
            Panel(
                "backward",
                (("dx₀", "dx₁"), ("g₀ + g₁", "g₀ + g₁"), ("g₀", "g₁")),
                (Step("sum", OWN), Step("all-reduce", OWN, OTHERS)),
            ),
        ),
        "Forward an all-reduce of sums and counts, backward an all-reduce of their gradients.",
    ),
    "expert_routing": Picture(
        ("tokens x, gates p", "at their expert", "results, at home"),
        (
            Panel(
                "forward",
                (("x₀, p₀", "x₁, p₁"), ("p E₀(x)", "p E₁(x)"), ("y₀", "y₁")),
                (Step("all-to-all", ALL), Step("all-to-all", ALL)),
            ),
            Panel(
                "backward",
                (("dx₀, dp₀", "dx₁, dp₁"), ("dx, dp", "dx, dp"), ("g₀", "g₁")),
                (Step("all-to-all", ALL), Step("all-to-all", ALL)),
                fault="dx comes back; dp does not, so that the router gets no gradient",
            ),
        ),
        "Tokens and gates go to their experts by an all-to-all, results come back by another; "
        "backward the same ways are gone in the other order.",
    ),
}


def svg(picture: Picture) -> str:
    """The text of a picture."""
    ranks = len(picture.panels[0].columns[0])
    count = len(picture.spaces)
    high = 46 + ranks * ROW
    drawn = Drawing()
    for k, space in enumerate(picture.spaces):
        drawn.text(_x(k, count) + WIDE / 2, 20, space, anchor="middle", opacity=SOFT)
    top = 34
    for panel in picture.panels:
        _panel(drawn, panel, top)
        top += high + (18 if panel.fault else 0)
    _legend(drawn, top + 12, picture)
    return str(drawn.picture(picture.summary))


def _x(column: int, columns: int) -> float:
    return LEFT + column * (WIDE + GAPS[columns])


def _panel(drawn: Drawing, panel: Panel, top: float) -> None:
    drawn.text(8, top + 14, panel.title, weight="bold")
    back = panel.title.startswith("backward")
    first = top + 42
    count = len(panel.columns)

    def y(rank: int) -> float:
        return first + rank * ROW

    for rank in range(len(panel.columns[0])):
        drawn.text(8, y(rank) + 18, f"rank {rank}")
    for k, column in enumerate(panel.columns):
        for rank, text in enumerate(column):
            if text:
                _box(drawn, _x(k, count), y(rank), text)
    for k, step in enumerate(panel.steps):
        near, far = _x(k, count) + WIDE + 3, _x(k + 1, count) - 3
        drawn.text((near + far) / 2, first - 4, step.label, anchor="middle")
        for arrows, colour, dashed in (
            (step.sent, SENT, False),
            (step.missing, FAULT, True),
            (step.extra, FAULT, False),
        ):
            for source, target in arrows:
                begin, end = (near, far) if not back else (far, near)
                ends = (begin, y(source) + HIGH / 2), (end, y(target) + HIGH / 2)
                drawn.straight(*ends, line=colour, thick=1.5, dashes="5 4" if dashed else "")
    for k in panel.down:
        ends = (y(0) + HIGH + 1, y(1) - 1)
        begin, end = ends[::-1] if back else ends
        middle = _x(k, count) + WIDE / 2
        drawn.straight((middle, begin), (middle, end), line=SENT, thick=1.5)
    if panel.fault:
        below = y(len(panel.columns[0])) + 2
        drawn.text(LEFT, below, f"wrong: {panel.fault}", fill=FAULT)


def _legend(drawn: Drawing, y: float, picture: Picture) -> None:
    steps = [step for panel in picture.panels for step in panel.steps]
    entries = [(SENT, "", "computed or sent")]
    if any(step.missing for step in steps):
        entries.append((FAULT, "5 4", "missing in the wrong program"))
    if any(step.extra for step in steps):
        entries.append((FAULT, "", "too many in it"))
    x = 8.0
    for colour, dashes, text in entries:
        drawn.straight((x, y - 4), (x + 28, y - 4), line=colour, thick=1.5, dashes=dashes)
        drawn.text(x + 34, y, text, opacity=SOFT)
        x += 50 + 6.2 * len(text)


def _box(drawn: Drawing, x: float, y: float, text: str) -> None:
    drawn.rect(x, y, WIDE, HIGH, fill=SENT, opacity=0.1, line=SENT, round=4)
    drawn.text(x + WIDE / 2, y + 18, text, anchor="middle")


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, picture in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(svg(picture), encoding="utf-8")


if __name__ == "__main__":
    main()
