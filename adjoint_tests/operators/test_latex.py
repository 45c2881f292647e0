"""Operators in LaTeX: whatever their names are, what notebooks get is mathematics that renders."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Region, Space
from linop.local_operators import diagonal
from linop.operators.algebra import Named

NAMES = st.text(
    st.sampled_from("ab_^{}\\$%&#~ 'é日→×…⊗⊕⟨⟩⁺\n\t\"`<@*") | st.characters(),
    min_size=1,
    max_size=6,
)


def balanced(text: str) -> bool:
    """True if braces, those that are escaped apart, close in order, and nothing special is bare."""
    plain = re.sub(r"\\[\\#$%&_{} ]", "", text)
    depth = 0
    for c in plain:
        depth += (c == "{") - (c == "}")
        if depth < 0:
            return False
    return depth == 0 and not re.search(r"[#$%&~\n]", plain)


def renders(text: str) -> bool:
    """True if a parser of LaTeX's mathematics accepts it; of tables, which it does not know, and of
    ampersands, which it takes bare, the rest."""
    mathtext = pytest.importorskip("matplotlib.mathtext")
    text = re.sub(r"\\(begin|end)\{array\}(\{l\})?", "", text)
    for part in text.replace(r"\\", "\n").replace(r"\&", "&").split("\n"):
        mathtext.MathTextParser("path").parse(f"${part or ' '}$")
    return True


def operators(name: str) -> list[LinearOperator]:
    """Operators whose symbols have a name in every place where one can be."""
    a, b = Region(name, 2), Region(name + "'", 2, 1)
    space = Space(a)
    copied, scaled = linop.copy(space, a, b), diagonal(np.ones(2), space, name=name)
    listed = Named(name, name, scaled)
    ops = [copied, linop.clear(space, a[:1]), scaled, listed, copied @ scaled + copied, 2 * listed]
    ops += [linop.direct_sum(scaled, linop.identity(Space(b))), linop.kron(scaled, scaled)]
    return [*ops, *(op.H for op in ops)]


@pytest.mark.filterwarnings("ignore:.*(Glyph|Font|font)")
@given(NAMES)
@example("x_1")
@example("{")
@example("\\")
@example("a'*")
@example("x^")
@example("\ud800")
def test_names_of_every_kind(name: str) -> None:
    for op in operators(name):
        latex = op._repr_latex_()
        assert latex.startswith("$")
        assert latex.endswith("$")
        assert balanced(latex[1:-1]), latex
        assert renders(latex[1:-1]), latex


def test_samples_of_all_operators_and_long_expressions() -> None:
    from linop.tools.samples import samples

    ops = [op for _, op in samples(3)]
    long = linop.shift(linop.TensorSpace((6,), linop.Partition((3,))), 1)
    for _ in range(6):
        long = long @ long + long
    for op in (*ops, *(op.H for op in ops), long):
        latex = op._repr_latex_()[1:-1]
        assert balanced(latex), latex
        assert renders(latex), latex


def test_the_checks_of_this_file_notice() -> None:
    assert not balanced("A_{x")
    assert not balanced("}{")
    assert not balanced("a%b")
    assert balanced(r"a\%b\{")
    with pytest.raises(ValueError, match="x"):
        renders("x_{")


@pytest.mark.parametrize(
    ("name", "latex"),
    [
        ("x_1", r"x\_1"),
        ("α", "α"),
        ("mémoire", r"m\text{é}moire"),
        ("{a}", r"\{a\}"),
        ("my map", r"my\ map"),
        ("A ⊗ B", r"A\  \otimes \ B"),
    ],
)
def test_names_are_written_so(name: str, latex: str) -> None:
    op = diagonal(np.ones(2), name=name)
    assert op._repr_latex_() == f"${latex}$"
    assert op.H._repr_latex_() == f"${latex}^{{*}}$"
