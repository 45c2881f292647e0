"""The work of ``linop explain``: sections of docs/errors.md, which is installed beside this module,
as what a terminal shows. The command is in `linop.tools.cli`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from importlib import resources

from rich.markdown import Markdown
from rich.table import Table

from linop.errors import ArgumentError, site

_CODE = re.compile(r"(?ms)^```.*?^```\n*")
"""Blocks of code: they are tests of the page, and use names from its beginning."""
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)(?:(\w+)\.md)?(#[\w-]+)?\)")
_ROW = re.compile(r"(?m)^\| (?:\[(\w+)\]\(#\w+\)|`(\w+Error)`) \| (.*) \|$")
"""A class and what is said of it in one line, of those with sections and of others."""


def page() -> str:
    """The text of docs/errors.md, to which a link leads in a clone."""
    return resources.files(__package__).joinpath("errors.md").read_text(encoding="utf-8")


def sections() -> dict[str, str]:
    """The sections of classes, by the class that is their title, in the order of the page."""
    parts = re.split(r"(?m)^## (.*)\n+", page())
    titled = zip(parts[1::2], parts[2::2], strict=True)
    return {title: text for title, text in titled if title.endswith("Error")}


def classes() -> Iterator[tuple[str, str, str]]:
    """All classes: name, title of the section, and what is said of it in one line. Those without a
    section of their own stand in a table of their base class's."""
    lines = {own: said for own, _, said in _ROW.findall(page()) if own}
    for title, text in sections().items():
        yield title, title, lines[title]
        for _, name, said in _ROW.findall(text):
            yield name, title, said


def table() -> Table:
    """All classes, those without a section of their own below their base class."""
    shown = Table("class", "in one line")
    for name, title, said in classes():
        shown.add_row(name if name == title else f"  {name}", said)
    return shown


def explanation(name: str) -> Markdown:
    """The section of a class.

    Args:
        name: of a class, in any case; or the line of a traceback that begins with it.

    Raises:
        ArgumentError: there is no such class; the text names those that are spelled alike.
    """
    return Markdown(text_of(name), hyperlinks=False)


def text_of(name: str) -> str:
    """The section of a class, in Markdown; see `explanation`."""
    asked = re.match(r"[\w.]*", name.strip())
    last = asked[0].rpartition(".")[2] if asked else ""
    known = {one.lower(): (one, title, said) for one, title, said in classes()}
    if last.lower() not in known:
        close = [known[one][0] for one in get_close_matches(last.lower(), known)]
        meant = f"; did you mean {' or '.join(close)}?" if close else "."
        raise ArgumentError(f"{name!r} is no error of linop{meant}")
    found, title, said = known[last.lower()]
    text = _CODE.sub("", sections()[title])
    if found != title:
        text = f"{said}. It is a {title}.\n\n{text}"
    more = f"\n\n{site()}/errors.html#{found.lower()}" if site() else ""
    return f"## {found}\n\n{_LINK.sub(_linked, text)}{more}"


def _linked(link: re.Match[str]) -> str:
    """A link to another page: to that of the site, or its words alone if there is none."""
    words, file, heading = link.groups()
    address = f"{site()}/{file or 'errors'}.html{heading or ''}"
    return f"[{words}]({address})" if site() else words
