"""Helpers that format operators in the paper's notation, as Unicode text or as LaTeX.

Each class of operators has a method `symbol`; helpers that several of these share (subscripts,
parentheses, joined factors) are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_LATEX = str.maketrans(
    {c: "\\" + c for c in "#$%&_{}"}
    | {"→": r" \to ", "×": r" \times ", "…": r" \dots ", "⁺": "^{+}", "^": r"\hat{}"}
)


class Symbolic(Protocol):
    """Interface of an object with a symbol, such as a `LinearOperator`.

    Attributes:
        loose: True if the symbol needs parentheses inside a product.
    """

    loose: bool

    def symbol(self, latex: bool = False) -> str: ...


def joined_symbols(items: Sequence[Symbolic], separator: str, latex: bool) -> str:
    """The symbols of operators, joined by a separator; of more than 16, the first and last six."""
    shown = items if len(items) <= 16 else [*items[:6], *items[-6:]]
    parts = [parenthesised(item, latex) for item in shown]
    if len(shown) < len(items):
        parts.insert(len(parts) // 2, r"\cdots" if latex else "⋯")
    return separator.join(parts)


def parenthesised(op: Symbolic, latex: bool) -> str:
    """The symbol of an operator as a factor of a product, in parentheses if it is `loose`."""
    text = op.symbol(latex)
    if not op.loose:
        return text
    return rf"\left({text}\right)" if latex else f"({text})"


def subscripted(letter: str, text: str, latex: bool = False) -> str:
    """A letter with a subscript, in braces if the subscript is longer than one character."""
    if latex:
        text = text.translate(_LATEX)
    return f"{letter}_{text}" if len(text) == 1 else f"{letter}_{{{text}}}"
