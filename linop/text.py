"""Plain text: the encoding of users' files, and formatting of tables."""

from __future__ import annotations

import codecs
import io
from collections.abc import Sequence
from pathlib import Path

_MARKS = {  # of UTF-32 first: it begins as UTF-16 does
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def read_text(path: str | Path) -> str:
    """The text of a file in UTF-8, or in the encoding that its byte-order mark says; the mark is no
    part of it, and lines end in a line feed.

    Raises:
        OSError: the file cannot be read. UnicodeDecodeError: it is no text. TypeError: `path` is
            none.
    """
    data = Path(path).read_bytes()  # once: it may be a pipe
    encoding = next((name for mark, name in _MARKS.items() if data.startswith(mark)), "utf-8-sig")
    return io.TextIOWrapper(io.BytesIO(data), encoding).read()


def aligned(rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Lines of a table, from rows of equal length: the first `left` columns are left-aligned, the
    others right-aligned, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if k < left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
