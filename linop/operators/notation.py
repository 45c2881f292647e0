"""Operators in the paper's notation, as Unicode text or as LaTeX.

Each class of operators has a method `symbol`, or writes itself with a `Write`. An expression that
prints in a few symbols prints in full. In a longer one, subexpressions that occur several times,
and long ones, have names, ⟨1⟩, ⟨2⟩, …, and are printed once, below the expression, the nearest
first; after a few lines the rest is elided.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from linop.graph import flattened, postorder, uses

_LATEX = (
    {c: "\\" + c for c in "#$%&_{}"}
    | {"→": r" \to ", "×": r" \times ", "…": r" \dots ", "⁺": "^{+}", "^": r"\hat{}"}
    | {"⊗": r" \otimes ", "⊕": r" \oplus ", "⟨": r"\langle ", "⟩": r"\rangle "}
    | {"\\": r"\backslash ", "~": r"\sim ", " ": r"\ "}
)
"""Characters of names that LaTeX writes otherwise in mathematics."""
FEW = 24
"""Occurrences of operators up to which an expression prints without names."""
LONG = 160
"""Characters up to which a subexpression that occurs once is printed where it occurs."""
LINES = 8
"""Most definitions that are printed below an expression."""


class Symbolic(Protocol):
    """Interface of an object with a symbol, such as a `LinearOperator`.

    Attributes:
        loose: True if the symbol needs parentheses inside a product.
    """

    loose: bool

    def symbol(self, latex: bool = False) -> str: ...


class Write:
    """The texts of the nodes of an expression, each written once, operands first."""

    def __init__(self, root: Any, latex: bool) -> None:
        self.latex = latex
        nodes = postorder(root, _shown)
        self._uses = uses(nodes, _shown)
        self._brief = _occurrences(nodes) <= FEW
        self._texts: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._mentions: dict[int, dict[int, None]] = {}  # ordered: the names in a node's text
        self._current: dict[int, None] = {}
        for node in postorder(root, self._within):
            self._mentions[id(node)] = self._current = {}
            self._texts[id(node)] = _symbol(node, self)
            if node is not root and self._is_named(node):
                number = str(len(self._names) + 1)
                self._names[id(node)] = rf"\langle {number} \rangle" if latex else f"⟨{number}⟩"

    def product(self, parts: Sequence[Any], separator: str, kind: type[Any] | None = None) -> str:
        """The texts of factors, joined; those of nested products of a `kind` that occur once among
        them."""
        return separator.join(self._few(self._joined(parts, kind), self.factor))

    def sum(self, parts: Sequence[Any], kind: type[Any]) -> str:
        """The texts of terms, those of nested sums of a `kind` that occur once among them."""
        terms = self._few(self._joined(parts, kind), self._text)
        return " + ".join(terms).replace("+ -", "- ")

    def factor(self, op: Any) -> str:
        """The text of an operator as a factor of a product, in parentheses if it is `loose`."""
        text = self._text(op)
        if not op.loose or id(op) in self._names:
            return text
        return rf"\left({text}\right)" if self.latex else f"({text})"

    def _text(self, op: Any) -> str:
        if id(op) in self._names:
            self._current[id(op)] = None
            return self._names[id(op)]
        self._current |= self._mentions[id(op)]
        return self._texts[id(op)]

    def whole(self, root: Any) -> str:
        """The text of the expression, and below it the definitions of names, the nearest first."""
        listed, waiting = dict[int, None](), list(self._mentions[id(root)])
        while waiting and len(listed) <= LINES:
            later: dict[int, None] = {}
            for node in waiting:
                if node not in listed:
                    listed[node] = None
                    later |= self._mentions[node]
            waiting = list(later)
        lines = [f"{self._names[node]} = {self._texts[node]}" for node in list(listed)[:LINES]]
        if len(self._names) > len(lines):
            lines.append(f"{_dots(self.latex)} ({len(self._names)} {_words('in all', self.latex)})")
        return _with_definitions(self._texts[id(root)], lines, self.latex)

    def _joined(self, parts: Sequence[Any], kind: type[Any] | None) -> Sequence[Any]:
        def inner(op: Any) -> Sequence[Any] | None:
            once = kind is not None and isinstance(op, kind) and self._uses[id(op)] == 1
            return op.parts if once else None

        return flattened(parts, inner)

    def _few(self, items: Sequence[Any], text: Any) -> list[str]:
        """The texts of items; of more than 16, of the first and last six."""
        return elided(list(map(text, ends_of(items))), len(items), self.latex)

    def _within(self, op: Any) -> Iterable[Any]:
        kind = type(op) if hasattr(op, "parts") else None
        return ends_of(self._joined(list(_shown(op)), kind))

    def _is_named(self, node: Any) -> bool:
        if self._brief or not _shown(node):
            return False
        return self._uses.get(id(node), 0) > 1 or len(self._texts[id(node)]) > LONG


def written(op: Any, latex: bool) -> str:
    """The text of an expression."""
    return Write(op, latex).whole(op)


def ends_of(items: Sequence[Any], most: int = 16) -> Sequence[Any]:
    """The items; of more than `most`, the first and last six."""
    return items if len(items) <= most else [*items[:6], *items[-6:]]


def elided(texts: list[str], many: int, latex: bool) -> list[str]:
    """Texts of the `ends_of` some items, with dots in the middle if these are more."""
    if len(texts) < many:
        texts.insert(len(texts) // 2, r"\cdots" if latex else "⋯")
    return texts


def subscripted(letter: str, text: str, latex: bool = False) -> str:
    """A letter with a subscript, in braces if the subscript is longer than one character."""
    if latex:
        letter, text = in_latex(letter), in_latex(text)
    return f"{letter}_{text}" if len(text) == 1 else f"{letter}_{{{text}}}"


def in_latex(name: str) -> str:
    """A name, of a region or an operator, in LaTeX's mathematics: with special characters escaped,
    and others that are no mathematics, such as accented letters, as text."""
    return "".join(map(_character, name))


def starred(name: str, latex: bool = False) -> str:
    """The symbol of an adjoint."""
    if not latex:
        return name + "*"
    return f"{{{name}}}^{{*}}" if "^" in name or "'" in name else f"{name}^{{*}}"


def _character(c: str) -> str:
    if c in _LATEX:
        return _LATEX[c]
    if (c.isascii() and c.isprintable() and c not in '"`') or "α" <= c <= "ω" or "Α" <= c <= "Ω":
        return c
    return rf"\text{{{c}}}" if c.isprintable() else r"\ "


def _shown(op: Any) -> Iterable[Any]:
    """The operands that the text of an operator shows; none if it prints under a name."""
    return op._operands() if hasattr(op, "_written") and not hasattr(op, "subscript") else ()


def _symbol(op: Any, write: Write) -> str:
    text: str = op._written(write) if hasattr(op, "_written") else op.symbol(write.latex)
    return text


def _occurrences(nodes: Sequence[Any]) -> int:
    """How many operators the expression of the last node is built of, repeated ones repeatedly; not
    counted above `FEW`."""
    count: dict[int, int] = {}
    for node in nodes:
        total = sum(count[id(operand)] for operand in _shown(node))
        count[id(node)] = min(FEW + 1, total) or 1
    return count[id(nodes[-1])]


def _with_definitions(text: str, lines: Sequence[str], latex: bool) -> str:
    if not lines:
        return text
    if latex:
        rows = rf"\\ {_words('where ', True)}".join([text, r",\\ \quad ".join(lines)])
        return rf"\begin{{array}}{{l}}{rows}\end{{array}}"
    return f"{text}\n  where " + ",\n        ".join(lines)


def _dots(latex: bool) -> str:
    return r"\dots" if latex else "…"


def _words(text: str, latex: bool) -> str:
    return rf"\text{{{text}}}" if latex else text
