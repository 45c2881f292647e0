"""Code in tables of the site: where a browser may break it into lines, and what is copied of it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[2] / "docs/_ext/breakable.py"


def extension() -> dict[str, Any]:
    pytest.importorskip("sphinx", reason="Sphinx is not installed")
    return runpy.run_path(str(FILE))


@pytest.mark.parametrize(
    ("code", "pieces"),
    [
        ("linop.local_operators.matrix(M)", ["linop.", "local_", "operators.", "matrix(", "M)"]),
        ("ReflectionPad1d", ["Reflection", "Pad1d"]),
        ("LINOP_WAIT_LIMIT", ["LINOP_", "WAIT_", "LIMIT"]),
        ("--ranks-per-machine", ["--ranks-", "per-", "machine"]),
        ("A @ B", ["A @ B"]),
    ],
)
def test_pieces(code: str, pieces: list[str]) -> None:
    found = extension()["broken"](code)
    assert [one.astext() for one in found[::2]] == pieces
    assert {one.astext() for one in found[1::2]} <= {"<wbr>"}
    assert re.sub("<wbr>", "", "".join(one.astext() for one in found)) == code
