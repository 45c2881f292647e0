"""The reference: a page for each name that the pages of docs/api list.

autosummary makes the pages, of docs/_templates. This extension keeps them out of the sidebar, which
every page has as a whole: with 420 entries more, it took nine tenths of a build. Instead, each page
links to the one that lists it. And it lets Sphinx read docstrings as this project writes them:
several errors in a sentence, and lists of arguments of several lines.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, get_origin

from api_lists import file_names, listed
from docutils import nodes
from error_anchors import anchored
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.ext.autosummary import autosummary_toc, import_by_name
from sphinx.util.nodes import make_refnode


@cache
def classes(names: tuple[str, ...]) -> frozenset[type]:
    """The classes of the given names."""
    return frozenset(filter(inspect.isclass, (import_by_name(name)[1] for name in names)))


def stops(names: Iterable[str]) -> set[str]:
    """Classes whose methods are not listed on the pages of their subclasses: those of other
    projects, those that have a page, what these are derived from, and bases of layers."""
    paged = classes(tuple(names))
    found = set()
    for one in paged:
        above = one.__mro__[1:]
        found |= {base for base in above if not base.__module__.startswith("linop.")}
        found |= {base for base in above if base.__module__.startswith("linop.layers.")}
        found |= {base for one in above if one in paged for base in one.__mro__}
    return {one.__name__ for one in found}


def settings(folder: Path) -> dict[str, Any]:
    """Of autosummary: what templates know, and names of files."""
    pages = listed(folder)
    known = {"pages": pages, "stops": ", ".join(sorted(stops(pages)))}
    return {"autosummary_context": known, "autosummary_filename_map": file_names(list(pages))}


def cleared(app: Sphinx, doctree: nodes.document) -> None:
    """Remove the pages of names from the sidebar, lines of bases and values that say nothing, and
    what types of attributes say of an array beside that it is one."""
    unwanted: list[nodes.Node] = list(doctree.findall(autosummary_toc))
    unwanted += [one for one in doctree.findall(nodes.paragraph) if one.astext() == "Bases: object"]
    for said in doctree.findall(addnodes.desc_annotation):
        unwanted += [said] if "<class" in said.astext() else _in_brackets(said, "ndarray")
    for node in unwanted:
        node.parent.remove(node)
    for label in doctree.findall(nodes.field_name):
        if label.astext() == "Variables":  # as Sphinx calls what docstrings call attributes
            label[0] = nodes.Text("Attributes")


def _in_brackets(annotation: nodes.Element, name: str) -> list[nodes.Node]:
    """The nodes from the bracket behind a type's name to the one that closes it."""
    found: list[nodes.Node] = []
    depth = 0
    for before, node in pairwise(annotation):
        opens = node.astext() == "[" and (depth > 0 or before.astext().endswith(name))
        depth += opens
        found += [node] if depth else []
        depth -= depth > 0 and node.astext() == "]"
    return found


NAMES = r"\*{0,2}\w+(?:, \*{0,2}\w+)*"
SEVERAL_LINES = re.compile(rf"(?m)^(    {NAMES},)\n {{8}}(?={NAMES}(?:,\n|: ))")
"""A line of names of arguments that goes on in the next one."""
TOGETHER = re.compile(r"(?m)^    (\w+(?:, \w+)+): (.*(?:\n {5,}.*)*)")
PAGE = re.compile(r"\bdocs/(\w+)\.md\b")
"""A page that a docstring names by its file."""
ERROR = re.compile(r"(?<=[.;]) (?=[A-Z]\w*Error(?:, [A-Z]\w*Error)*: )")
SYMBOL = re.compile(r"(?<![`\w])([ACDKMS])_(?:\{([^{}]+)\}|([ab])\b)(\*?)")
"""The paper's operators of memory, of region a, or from a to b."""


def as_napoleon_reads(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Docstrings before sphinx.ext.napoleon: each error begins a line of its own, and the names of
    arguments that are described together are on one line. Of errors the page says where on the page
    of errors their class is."""
    if what in ("attribute", "data", "property") and lines and ":" in lines[0]:
        lines[0] = f":{lines[0]}"  # else, what is before the first colon were a type
    text = PAGE.sub(r":doc:`/\1`", SEVERAL_LINES.sub(r"\1 ", "\n".join(lines)))
    text = SYMBOL.sub(_subscript, text)
    text = re.sub(r"(?m)^Returns:\n    (?=\S.*:)", "Returns:\n    :", text)  # else it were a type
    if what == "exception":
        text += f"\nWhy it is raised, and what to do: {anchored(obj)}.\n"
    before, raises, after = text.partition("\nRaises:\n")
    if raises:
        own, blank, rest = after.partition("\n\n")
        one_line = re.sub(r"\n {5,}", " ", own)
        text = before + raises + ERROR.sub("\n    ", one_line) + blank + rest
    before, attributes, after = text.partition("\nAttributes:\n")
    if attributes:
        own, blank, rest = after.partition("\n\n")
        text = before + attributes + TOGETHER.sub(_each, own) + blank + rest
    lines[:] = text.split("\n")


def _subscript(found: re.Match[str]) -> str:
    """An operator's symbol with its regions below; a star, of its adjoint, is no emphasis."""
    return rf"{found[1]}\ :sub:`{found[2] or found[3]}`\ {re.escape(found[4])}"


def _each(found: re.Match[str]) -> str:
    """An entry for each of several attributes that are described together."""
    names, said = found[1].split(", "), found[2]
    return "\n".join(f"    {name}: {said}" for name in names)


_ARRAY = re.compile(
    r"(~?numpy\.ndarray)\[~?tuple\[~?typing\.Any, \.\.\.\], ~?numpy\.dtype\[[\w.~]+\]\]"
)
"""An array of any shape, as types have it."""


def plain_types(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returned: str
) -> tuple[str, str]:
    """Signatures with the names of types that readers know."""

    def plain(text: str | None) -> Any:
        text = text and re.sub(r"TypeAliasForwardRef\('([\w.]+)'\)", r"\1", text)
        text = text and re.sub(r"\bnpt\.(?=[A-Z])", "numpy.typing.", text)
        text = text and re.sub(r"\bnp\.(?=\w+)", "numpy.", text)
        return text and _ARRAY.sub(r"\1", text)

    signature = signature and signature.replace("<factory>", "...")  # of fields of dataclasses
    types = re.compile(r": [^=]*")  # defaults stay as they are written
    return types.sub(lambda m: plain(m[0]), signature) if signature else signature, plain(returned)


def no_aliases(
    app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
    """Fields of named tuples have no text of their own: the class says what they are."""
    text = getattr(obj, "__doc__", None) or ""
    return True if text.startswith("Alias for field number") else None


def public_bases(app: Sphinx, name: str, obj: Any, options: Any, bases: list[Any]) -> None:
    """Of the classes that a class is derived from: those that readers may know."""
    known = classes(tuple(app.config.autosummary_context["pages"]))
    found: dict[Any, None] = {}
    for base in bases:
        for one in getattr(base, "__mro__", (base,)):
            own = one.__module__.startswith("linop.")
            if one in known if own else one.__module__ != "abc":
                found[one] = None
                break
    said_by_name = object, Generic
    bases[:] = [b for b in found if get_origin(b) is not Generic and b not in said_by_name]
    bases[:] = bases or [object]


def found_elsewhere(app: Sphinx, env: Any, node: nodes.Element, text: nodes.Node) -> Any:
    """Names that are not those of the reference: a class of linop, or a method of one, by its name
    alone; and one of another project by that of the module that defines it."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py":
        return None
    objects = env.get_domain("py").objects
    if re.fullmatch(r"[A-Z]\w+(\.\w+)?", target):
        same = [name for name in objects if name.endswith(f".{target}")]
        same = [name for name in same if name.count(".") == target.count(".") + 1] or same
        if len(same) == 1:
            entry = objects[same[0]]
            where = node["refdoc"], entry.docname, entry.node_id
            return make_refnode(app.builder, *where, text, same[0])
    package, _, name = target.partition(".")
    inventories = env.intersphinx_named_inventory.values()
    names = {one for kinds in inventories for kind in kinds.values() for one in kind}
    if package in ("numpy", "scipy", "torch") and target not in names:
        last = name.rpartition(".")[2]
        same = [one for one in names if one.startswith(package) and one.endswith(f".{last}")]
        if len(same) == 1:
            node["reftarget"] = same[0]  # intersphinx is asked next
    return None


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", cleared, priority=100)
    app.connect("autodoc-process-docstring", as_napoleon_reads, priority=100)
    app.connect("autodoc-process-signature", plain_types)
    app.connect("autodoc-process-bases", public_bases)
    app.connect("autodoc-skip-member", no_aliases)
    app.connect("missing-reference", found_elsewhere, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
