"""Pictures of linop inside their pages, in the ink of the page, and texts for those without one.

An image that is a file knows the system's choice of light or dark, and not that of the site's
switch. So the text of a picture that linop drew becomes part of its page, where the site's style
(`_static/linop.css`) has its colours. Other images stay files.
"""

from __future__ import annotations

import re
from html import escape, unescape
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

OWN = re.compile(r'<svg [^>]*class="linop"')
"""The beginning of a picture that linop drew."""
STYLE = re.compile(r"<style>.*?</style>\s*", re.DOTALL)
NAME = re.compile(r"\blinop-[0-9a-f]{8}(?=-)")
"""Of a hatch, in one picture."""


def inlined(svg: str, said: str, number: int) -> str:
    """A picture's file as an element of a page.

    Args:
        said: what it shows, for readers who do not see it.
        number: of the picture on the page, on which hatches of all pictures have other names.
    """
    text = NAME.sub(lambda found: f"{found[0]}-{number}", STYLE.sub("", svg))
    return re.sub(r'aria-label="[^"]*"', lambda _: f'aria-label="{escape(said)}"', text, count=1)


def in_pages(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Put the texts of linop's pictures in the place of their images."""
    if app.builder.format != "html":
        return
    for number, image in enumerate(list(doctree.findall(nodes.image))):
        file = Path(app.srcdir, image["uri"])
        if file.suffix == ".svg" and file.is_file():
            svg = file.read_text(encoding="utf-8")
            if OWN.match(svg):
                text = inlined(svg, image.get("alt", ""), number)
                image.replace_self(nodes.raw("", text, format="html"))


def titled(app: Sphinx, doctree: nodes.document) -> None:
    """Give thumbnails of the gallery the title below them as their text."""
    thumbnail: nodes.Element | None = None
    for node in doctree.findall():
        if isinstance(node, nodes.image):
            thumbnail = node
        if isinstance(node, nodes.raw) and thumbnail is not None:
            title = re.search(r'class="sphx-glr-thumbnail-title">([^<]*)<', node.astext())
            if title:
                thumbnail["alt"] = unescape(title[1])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", titled)
    app.connect("doctree-resolved", in_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
