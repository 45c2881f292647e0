"""Convolutions and pools beside torch's. Needs torch.

Ranks import this module, and no test.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from support.layers.cases import Case, grids

MODES = ("zeros", "reflect", "replicate", "circular")


@st.composite
def convolutions(draw: Any, most: int) -> Case:
    """Any convolution, on grids of at most so many workers."""
    ndim = draw(st.integers(1, 3))
    P_x, P_y = draw(grids(most, ndim + 2)), draw(grids(most, ndim + 2))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    work: Any = draw(st.none() | grids(most, ndim + draw(st.sampled_from([2, 3]))))
    channels = [groups * draw(st.integers(1, 3)) for _ in "xy"]
    size = [draw(st.integers(1, 3)) for _ in range(ndim)]
    dilation = [draw(st.integers(1, 2)) for _ in range(ndim)]
    reach = [d * (k - 1) + 1 for k, d in zip(size, dilation, strict=True)]
    mode = draw(st.sampled_from(MODES))
    padding: Any = [draw(st.integers(0, 2)) for _ in range(ndim)]
    stride: Any = [draw(st.integers(1, 3)) for _ in range(ndim)]
    if draw(st.booleans()):
        padding, stride = draw(st.sampled_from(["same", "valid"])), 1
    space = [r + 2 + draw(st.integers(0, 5)) for r in reach]
    return Case(
        f"Conv{ndim}d",
        (P_x,),
        (draw(st.integers(1, 3)), channels[0], *space),
        (channels[0], channels[1], tuple(size)),
        {
            "stride": stride,
            "padding": padding,
            "dilation": tuple(dilation),
            "groups": groups,
            "bias": draw(st.booleans()),
            "padding_mode": mode,
        },
        {"P_y": P_y, "P_W": work},
        P_y,
        seed=draw(st.integers(0, 99)),
    )


@st.composite
def transposed(draw: Any, most: int) -> Case:
    """Any transposed convolution, on grids of at most so many workers, perhaps with a size of the
    output."""
    ndim = draw(st.integers(1, 3))
    P_x, P_y = draw(grids(most, ndim + 2)), draw(grids(most, ndim + 2))
    work: Any = draw(st.none() | grids(most, ndim + draw(st.sampled_from([2, 3]))))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    channels = [groups * draw(st.integers(1, 3)) for _ in "xy"]
    rows = []
    for _ in range(ndim):
        n, k, s, d = (draw(st.integers(1, most)) for most in (6, 4, 3, 2))
        more = draw(st.integers(0, max(s, d) - 1))
        last = (n - 1) * s + d * (k - 1) + more  # of the output, without padding
        rows.append((n, k, s, draw(st.integers(0, min(3, last // 2))), more, d))
    space, size, stride, padding, more, dilation = zip(*rows, strict=True)
    options = {
        "stride": stride,
        "padding": padding,
        "output_padding": more,
        "groups": groups,
        "bias": draw(st.booleans()),
        "dilation": dilation,
    }
    batch = draw(st.integers(1, 3))
    call: dict[str, Any] = {}
    if draw(st.booleans()):
        least = [(n - 1) * s + d * (k - 1) - 2 * p + 1 for n, k, s, p, _, d in rows]
        most = [m + s - 1 for m, s in zip(least, stride, strict=True)]
        if min(most) > 0:
            pairs = zip(least, most, strict=True)
            extents = [draw(st.integers(max(1, m), n)) for m, n in pairs]
            call["output_size"] = [*draw(st.sampled_from([[], [batch, channels[1]]])), *extents]
    return Case(
        f"ConvTranspose{ndim}d",
        (P_x,),
        (batch, channels[0], *space),
        (channels[0], channels[1], size),
        options,
        {"P_y": P_y, "P_W": work},
        P_y,
        seed=draw(st.integers(0, 99)),
        call=call,
    )


@st.composite
def adaptive(draw: Any, most: int) -> Case:
    """Any adaptive pooling, on grids of at most so many workers."""
    ndim, kind = draw(st.integers(1, 3)), draw(st.sampled_from(["Max", "Avg"]))
    space = [draw(st.integers(1, 9)) for _ in range(ndim)]
    extent = st.integers(1, 7)
    one = extent | st.none() if ndim > 1 else extent  # torch has no None in 1-D
    size: Any = draw(st.tuples(*[one] * ndim) | extent)
    P_x = draw(grids(most, ndim + 2))
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 3)), *space
    seed = draw(st.integers(0, 99))
    return Case(f"Adaptive{kind}Pool{ndim}d", (P_x,), shape, (size,), kept=2, seed=seed)


@st.composite
def poolings(draw: Any, most: int) -> Case:
    """Any pooling, on grids of at most so many workers."""
    ndim, kind = draw(st.integers(1, 3)), draw(st.sampled_from(["Max", "Avg", "LP"]))
    size = [draw(st.integers(1, 4)) for _ in range(ndim)]
    options: dict[str, Any] = {
        "stride": draw(st.none() | st.integers(1, 4)),
        "padding": tuple(draw(st.integers(0, k // 2)) for k in size),
        "ceil_mode": draw(st.booleans()),
    }
    dilation = 1
    before: tuple[Any, ...] = ()
    if kind == "Max":
        dilation = options["dilation"] = draw(st.integers(1, 2))
    elif kind == "LP":
        del options["padding"]
        before = (draw(st.sampled_from([1, 2.0])),)
    else:
        options["count_include_pad"] = draw(st.booleans())
        if ndim > 1:
            options["divisor_override"] = draw(st.none() | st.integers(1, 5))
    space = [dilation * (k - 1) + 1 + draw(st.integers(0, 6)) for k in size]
    P_x = draw(grids(most, ndim + 2))
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 3)), *space
    seed = draw(st.integers(0, 99))
    arguments = (*before, size[0] if kind == "LP" and ndim == 1 else tuple(size))
    return Case(f"{kind}Pool{ndim}d", (P_x,), shape, arguments, options, kept=2, seed=seed)
