"""How operators are written: the paper's notation as text and as LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_LATEX = str.maketrans(
    {c: "\\" + c for c in "#$%&_{}"}
    | {"→": r" \to ", "×": r" \times ", "…": r" \dots ", "⁺": "^{+}", "^": r"\hat{}"}
)


class Symbolic(Protocol):
    """What has a symbol: every operator."""

    loose: bool

    def symbol(self, latex: bool = False) -> str: ...


def joined_symbols(items: Sequence[Symbolic], separator: str, latex: bool) -> str:
    """The symbols of operators in a row; both ends of a long one."""
    shown = items if len(items) <= 16 else [*items[:6], *items[-6:]]
    parts = [parenthesised(item, latex) for item in shown]
    if len(shown) < len(items):
        parts.insert(len(parts) // 2, r"\cdots" if latex else "⋯")
    return separator.join(parts)


def parenthesised(op: Symbolic, latex: bool) -> str:
    """The symbol of an operator inside a product."""
    text = op.symbol(latex)
    if not op.loose:
        return text
    return rf"\left({text}\right)" if latex else f"({text})"


def subscripted(letter: str, text: str, latex: bool = False) -> str:
    """A letter with a subscript, braced where it is longer than one character."""
    if latex:
        text = text.translate(_LATEX)
    return f"{letter}_{text}" if len(text) == 1 else f"{letter}_{{{text}}}"
