"""Pictures of operators, halos and timelines as SVG, without Matplotlib: ``op.draw()`` and
``X.draw()`` draw an operator and a tensor space; here are those that are functions. Each returns a
`Picture`, which a notebook shows, ``str`` gives as text, and `Picture.save` writes to a file."""

from __future__ import annotations

from pathlib import Path

from linop import trace_events
from linop.pictures.halos import halos
from linop.planning.prediction.trace_picture import trace_picture
from linop.svg import Picture

__all__ = ["Picture", "halos", "trace"]


def trace(path: str | Path) -> Picture:
    """The picture of a trace that ``backend.trace`` recorded, or a simulation wrote: a row for each
    worker, a box for each event, arrows between sends and waits where the trace has them.

    Raises:
        ArgumentError: the file cannot be read, or is no trace.

    Example:
        >>> import pathlib, tempfile
        >>> X = linop.TensorSpace((4,), linop.Partition(2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "run.json")
        ...     text = linop.planning.timeline(linop.shift(X, 1)).to_trace(path)
        ...     print(linop.pictures.trace(path).summary)
        run.json: events of 2 workers over time
    """
    return trace_picture(trace_events.recorded(path), Path(path).name)
