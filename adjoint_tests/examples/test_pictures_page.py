"""The pictures of docs/pictures.md and of README are those that are drawn."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).resolve().parents[2] / "docs"


def draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("drawn_pages", DOCS / "pictures" / "draw.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_drawn_anew() -> None:
    """`python docs/pictures/draw.py` renews them."""
    module = draw()
    there = {path.stem for path in (DOCS / "pictures").glob("*.svg")}
    assert there == set(module.PICTURES)
    for name, make in module.PICTURES.items():
        path = DOCS / "pictures" / f"{name}.svg"
        assert path.read_text(encoding="utf-8") == str(make()), name


def test_the_page_shows_them() -> None:
    page = (DOCS / "pictures.md").read_text(encoding="utf-8")
    shown = re.findall(r"\(pictures/(\w+)\.svg\)", page)
    assert set(shown) == set(draw().PICTURES)
