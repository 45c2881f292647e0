"""Anchors of the classes that stand in tables of the page on errors.

The note under a traceback leads to ``errors.html#`` and the class in small letters. Of a class with
a section of its own that is the heading's anchor; here, of the others, that of the row. A class of
the reference that has neither, and derives from `LinopError`, is a warning. The page of a class in
the reference leads there, too, by a label.
"""

from __future__ import annotations

import re
from pkgutil import resolve_name

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

from linop.errors import LinopError

PAGE = "errors"
LABEL = "error-"
"""Before an anchor, makes it a label of the whole site."""
NAME = re.compile(r"[A-Z]\w+Error")


def anchors(doctree: nodes.document) -> set[str]:
    """Give rows whose first cell is the name of a class, as code, the class's anchor; the anchors
    that the page has then."""
    for row in doctree.findall(nodes.row):
        for code in row[0].findall(nodes.literal):
            if NAME.fullmatch(name := code.astext()):
                row["ids"].append(name.lower())
    kinds = nodes.section, nodes.row
    return {one for node in doctree.findall() if isinstance(node, kinds) for one in node["ids"]}


def anchored(kind: type) -> str:
    """The place that explains a class, as the text of a page in the reference refers to it."""
    if not issubclass(kind, LinopError):
        return f":doc:`/{PAGE}`"
    return f":ref:`{kind.__name__} <{LABEL}{kind.__name__.lower()}>`"


def on_page(app: Sphinx, doctree: nodes.document) -> None:
    """Make the anchors, and look for those of all classes of the reference."""
    if app.env.docname != PAGE:
        return
    there = anchors(doctree)
    app.env.get_domain("std").anonlabels.update({LABEL + one: (PAGE, one) for one in there})
    pages = app.config.autosummary_context["pages"]
    found = [name for name in pages if NAME.fullmatch(name.rpartition(".")[2])]
    names = {kind.__name__ for kind in map(resolve_name, found) if issubclass(kind, LinopError)}
    lost = sorted(name for name in names if name.lower() not in there)
    if lost:
        logging.getLogger(__name__).warning(f"no anchor for {', '.join(lost)}", location=PAGE)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", on_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
