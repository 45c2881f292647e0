"""Long names in tables are broken into lines, so that tables fit on narrow screens.

A browser breaks code between words alone, and `linop.local_operators.restriction` is one. In cells
of tables it may break behind dots, underscores, dashes, commas, slashes and opening brackets, and
before capitals, too; what is copied from there stays as it is.
"""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx

BREAK = re.compile(r"(?<=[._,=(\[/])(?=\w)|(?<=\w-)(?=\w)|(?<=[a-z\d])(?=[A-Z][a-z])")


def broken(text: str) -> list[nodes.Node]:
    """The text in pieces, and between them where a browser may begin a new line."""
    found: list[nodes.Node] = []
    for piece in BREAK.split(text):
        found += [nodes.raw("", "<wbr>", format="html"), nodes.Text(piece)]
    return found[1:]


def in_tables(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Make the code in all cells of a page breakable."""
    if app.builder.format != "html":
        return
    cells = list(doctree.findall(nodes.entry))
    for literal in [one for cell in cells for one in cell.findall(nodes.literal)]:
        for text in list(literal.findall(nodes.Text)):
            if BREAK.search(text) and text.parent is not None:
                text.parent.replace(text, broken(str(text)))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-resolved", in_tables)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
