"""Pictures, thumbnails and types as the site's extensions make them: in the page's colours, with a
text for those who do not see them; arrays whose type says no more than that."""

from __future__ import annotations

import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import linop

EXTENSIONS = Path(__file__).resolve().parents[2] / "docs/_ext"


def extension(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    pytest.importorskip("sphinx", reason="Sphinx is not installed")
    monkeypatch.syspath_prepend(str(EXTENSIONS))
    return runpy.run_path(str(EXTENSIONS / f"{name}.py"))


def test_a_picture_is_in_the_colours_of_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = extension("inline_pictures", monkeypatch)
    text = str(linop.halo_exchange(linop.TensorSpace((9,), linop.Partition(3)), widths=1).draw())
    assert pictures["OWN"].match(text) and "prefers-color-scheme" in text
    made = pictures["inlined"](text, 'halos of "x" & y', 3)
    assert "<style>" not in made and "prefers-color-scheme" not in made
    root = ElementTree.fromstring(made)
    assert root.get("aria-label") == 'halos of "x" & y' and root.get("class") == "linop"


def test_a_picture_may_stand_twice_on_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hatches have other names then, and are those that its own elements use."""
    pictures = extension("inline_pictures", monkeypatch)
    plane = linop.TensorSpace((4, 6), linop.Partition((2, 2)))
    text = str(linop.pictures.halos(linop.halo_exchange(plane, widths=1)))
    once, again = (ElementTree.fromstring(pictures["inlined"](text, "", k)) for k in (0, 1))
    names = [{e.get("id") for e in one.iter() if e.get("id")} for one in (once, again)]
    assert names[0] and not names[0] & names[1]
    for one, own in zip((once, again), names, strict=True):
        fills = {str(e.get("fill")) for e in one.iter()}
        assert {fill[5:-1] for fill in fills if fill.startswith("url(#")} <= own


def test_other_pictures_stay_files(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not extension("inline_pictures", monkeypatch)["OWN"].match('<svg width="3"></svg>')


def test_thumbnails_have_the_title_below_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = extension("inline_pictures", monkeypatch)
    from docutils import nodes
    from docutils.utils import new_document

    page = new_document("gallery")
    image, other = nodes.image(uri="a.png", alt=""), nodes.image(uri="b.png", alt="kept")
    title = '<div class="sphx-glr-thumbnail-title">Blur &amp; sharpen</div>'
    page += [other, nodes.raw("", "<div>", format="html"), image]
    page += nodes.raw("", title, format="html")
    pictures["titled"](None, page)
    assert image["alt"] == "Blur & sharpen" and other["alt"] == "kept"


def test_the_type_of_an_array_is_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = extension("linop_reference", monkeypatch)
    from docutils import nodes

    said = ["tuple", "[", "ndarray", "[", "dtype", "[", "Any", "]", "]", ", ", "int", "]"]
    annotation = nodes.inline("", "", *(nodes.Text(one) for one in said))
    cut = {id(node) for node in reference["_in_brackets"](annotation, "ndarray")}
    left = [node.astext() for node in annotation if id(node) not in cut]
    assert left == ["tuple", "[", "ndarray", ", ", "int", "]"]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("Returns:\n    A pair: x and y.", "Returns:\n    :A pair: x and y."),
        ("Sets S_{a→b} K_b.", r"Sets S\ :sub:`a→b`\  K\ :sub:`b`\ ."),
        ("`P_x` and P_x", "`P_x` and P_x"),
    ],
)
def test_docstrings_before_napoleon(text: str, read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = text.split("\n")
    reference = extension("linop_reference", monkeypatch)
    reference["as_napoleon_reads"](None, "function", "f", None, None, lines)
    assert "\n".join(lines) == read
