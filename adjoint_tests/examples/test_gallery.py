"""The form of the gallery's pages. They run, with their assertions, while the site is built
(`tox run -e docs`), and not here for a second time."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "examples" / "gallery").rglob("*.py"))
LONGEST = 140
"""Lines of a page, text and picture included."""


def test_there_are_twenty_pages() -> None:
    assert len(PAGES) >= 20
    assert len({page.name for page in PAGES}) == len(PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_a_title_a_picture_and_assertions(page: Path) -> None:
    assert page.name.startswith("plot_"), "sphinx-gallery runs no other files"
    assert (page.parent / "GALLERY_HEADER.rst").is_file()
    text = page.read_text()
    tree = ast.parse(text)
    title, line, *_ = (ast.get_docstring(tree) or "").splitlines()
    assert set(line) == {"="} and len(line) == len(title)
    assert "plt.show()" in text
    assert any(isinstance(node, ast.Assert) for node in tree.body), (
        "no assertion outside of functions"
    )
    assert len(text.splitlines()) <= LONGEST


@pytest.mark.parametrize("folder", sorted({page.parent for page in PAGES}), ids=lambda f: f.name)
def test_the_site_has_the_folder(folder: Path) -> None:
    assert f'"{folder.name}"' in (ROOT / "docs" / "conf.py").read_text()
