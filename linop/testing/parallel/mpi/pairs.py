"""A pair of functions ``forward(x, comm)`` and ``adjoint(y, comm)``, checked on the ranks of an MPI
job. Collective.

Small pairs are applied to all unit vectors: their matrices are compared, exactly. Of large ones
inner products of whole numbers are compared, and a wrong entry is found by bisection
(`linop.testing.check_dot_exact`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np

from linop.testing.parallel.findings import groups_text, ranks_text
from linop.testing.parallel.mpi.functions import OWN, REPLICATED, Fault, Pair, Parts, pair_of
from linop.testing.parallel.mpi.products import by_products
from linop.testing.parallel.mpi.report import PairReport, Trial
from linop.testing.parallel.mpi.words import Seen, movements, operators
from linop.testing.parallel.relations import Groups
from linop.testing.report import shown

LARGEST = 600
"""Elements of domain and codomain together of a pair whose matrices are made."""


@dataclass(frozen=True)
class Form:
    """The form of a space.

    Attributes:
        groups: of ranks that hold copies of one vector; empty if each rank has its own.
        text: in words.
        embedding: from the vector to the arrays of all ranks.
        picking: positions of the first copies of its elements.
    """

    groups: Groups
    text: str
    embedding: np.ndarray
    picking: np.ndarray


def forms(pair: Pair, side: int, partitions: Sequence[Groups], stated: str | None) -> list[Form]:
    """The forms that a space may have."""
    sizes, shapes = pair.sizes(side), [shape for shape, _ in pair.sides[side]]
    starts = np.cumsum([0, *sizes])
    total = sum(sizes)
    found = []
    if stated != REPLICATED:
        found.append(Form((), "each rank's own", np.eye(total), np.arange(total)))
    for groups in partitions if stated != OWN else ():
        if any(len({shapes[r] for r in group}) > 1 for group in groups) or not total:
            continue
        columns, picking = [], []
        for group in groups:
            for e in range(sizes[group[0]]):
                column = np.zeros(total)
                column[[int(starts[r]) + e for r in group]] = 1
                columns.append(column)
                picking.append(int(starts[group[0]]) + e)
        text = f"replicated over {groups_text(groups, {})}"
        found.append(Form(groups, text, np.array(columns).T, np.array(picking)))
    return found


def partitions(world: int, seen: Sequence[Sequence[Seen]]) -> list[Groups]:
    """All ranks, and groups of the collectives that cover all ranks."""
    if world < 2:
        return []
    found: list[Groups] = [(tuple(range(world)),)]
    groups = {tuple(sorted(one.ranks)) for calls in seen for one in calls if one.name != "send"}
    for group in sorted(groups):
        alike = [one for one in sorted(groups) if len(one) == len(group) > 1]
        chosen: list[tuple[int, ...]] = [group]
        for one in alike:
            if not set(one) & {r for each in chosen for r in each}:
                chosen.append(one)
        partition = tuple(sorted(chosen))
        if sum(map(len, partition)) == world and partition not in found and len(group) > 1:
            found.append(partition)
    return found


def checked(parts: Parts, comm: Any) -> PairReport:
    """The report of a pair, the same on all ranks. Collective."""
    pair = Pair(parts, comm)
    about: dict[str, Any] = {"program": "", "workers": pair.world}
    try:
        for side in (0, 1):
            numbers = np.random.default_rng(side).integers(-9, 10, sum(pair.sizes(side)))
            pair.apply(side, numbers.astype(float), listen=True)
    except Fault as fault:
        there, back = (pair.plain.allgather(each) for each in pair.seen)
        return PairReport(
            **about,
            passed=False,
            evidence="one application on whole numbers",
            trials=(),
            forward=movements(there),
            adjoint=movements(back),
            faults=(str(fault),),
        )
    there, back = (pair.plain.allgather(each) for each in pair.seen)
    groups = partitions(pair.world, [*there, *back])
    about |= {"forward": movements(there), "adjoint": movements(back)}
    count = sum(pair.sizes(0)) + sum(pair.sizes(1))
    try:
        if count <= LARGEST:
            trials, evidence, why = _by_matrices(pair, groups)
        else:
            trials, evidence = by_products(pair, groups)
            why = ""
    except Fault as fault:
        return PairReport(
            **about, passed=False, evidence="all unit vectors", trials=(), faults=(str(fault),)
        )
    passed = trials[0].passed
    said = []
    if not passed:
        copies = trials[0].codomain != "each rank's own"
        said = operators(there, back, copies, trials[0])
    return PairReport(
        **about,
        passed=passed,
        evidence=evidence,
        trials=tuple(trials),
        operators=tuple(said),
        faults=() if passed or not why else (why,),
        notes=_notes(parts, trials) if passed else (),
    )


def _notes(parts: Parts, trials: Sequence[Trial]) -> tuple[str, ...]:
    if all(parts.forms) or all(one.passed for one in trials):
        return ()
    return (
        "between other spaces it is not the adjoint; if yours are others, say so by DOMAIN and "
        f"CODOMAIN, {OWN!r} or {REPLICATED!r}",
    )


def _combinations(pair: Pair, groups: Sequence[Groups]) -> Iterator[tuple[Form, Form]]:
    stated = pair.parts.forms
    before, after = (forms(pair, side, groups, stated[side]) for side in (0, 1))
    yield from product(before, after)


# Small pairs: matrices


def _by_matrices(pair: Pair, groups: Sequence[Groups]) -> tuple[list[Trial], str, str]:
    F, A = pair.matrix(0), pair.matrix(1)
    if pair.mixed:
        _check_imaginary(pair, F, A)
        F, A = F.real, A.real
    whole = all(np.array_equal(M, np.rint(M)) for M in (F, A))
    allowed = 0.0 if whole else 64 * np.finfo(float).eps * max(np.abs(F).max(initial=0.0), 1.0)
    tried = []
    for ends in _combinations(pair, groups):
        trial, why = _trial(pair, F, A, ends, allowed)
        size = max(1, len(ends[0].picking) * len(ends[1].picking))
        tried.append((not trial.passed, trial.wrong / size, not why, trial, why))
    tried.sort(key=lambda one: one[:3])
    if tried[0][3].passed:  # spaces that these functions cannot have in mind say nothing
        tried = [one for one in tried if one[3].wrong <= F.size]
    if not tried:
        raise Fault("the ranks' arrays have different shapes, and cannot be replicated")
    evidence = (
        f"the matrices of both, {F.shape[0]} by {F.shape[1]} numbers, "
        f"{'exactly' if whole else f'up to rounding ({allowed:.1e})'}"
    )
    return [one[3] for one in tried], evidence, tried[0][4]


def _check_imaginary(pair: Pair, F: np.ndarray, A: np.ndarray) -> None:
    """Check what the function of the complex side makes of imaginary numbers, of which the other
    one's matrix tells; on arrays of each rank's own. Collective.

    Raises:
        Fault: it is something else, and right for real numbers.
    """
    side = 0 if pair.is_complex(0) else 1
    ours, theirs = (F, A) if side == 0 else (A, F)
    if not np.array_equal(ours.real, theirs.real.T):
        return  # which the matrices show
    numbers: Any = 1j * np.random.default_rng(0).integers(-9, 10, ours.shape[1])
    wanted = (theirs.conj().T @ numbers).real
    if np.abs(pair.apply(side, numbers) - wanted).max(initial=0.0) > 1e-9 * np.abs(wanted).sum():
        name = ("forward", "adjoint")[side]
        raise Fault(f"{name}() is adjoint for real numbers, and not for imaginary ones")


def _trial(
    pair: Pair, F: np.ndarray, A: np.ndarray, ends: tuple[Form, Form], allowed: float
) -> tuple[Trial, str]:
    """A pair between two spaces, and in words what is wrong."""
    before, after = ends
    about = before.text, after.text
    many = F.size + 1
    if before.groups and (unused := _unused(pair, F)):
        text = f"forward() does not use the copies of {unused}"
        return Trial(*about, False, many + 1, text), ""
    there, back = F @ before.embedding, A @ after.embedding
    for M, form, side in ((there, after, 1), (back, before, 0)):
        gap = np.abs(M - form.embedding @ M[form.picking])
        if (gap > allowed).any():
            row = int(np.argwhere(gap > allowed)[0][0])
            name = ("adjoint", "forward")[side]
            text = f"{name}() gives other values to the copies, as in {pair.element(side, row)}"
            return Trial(*about, False, many, text), ""
    found, wanted = back[before.picking], there[after.picking].conj().T
    wrong = np.argwhere(np.abs(found - wanted) > allowed)
    if not len(wrong):
        return Trial(*about, True, 0), ""
    i, j = map(int, wrong[0])
    source = pair.element(1, int(after.picking[j]))
    target = pair.element(0, int(before.picking[i]))
    text = (
        f"from {source} to {target}, adjoint() has {_text(found[i, j])} and the {_transpose(F)} of "
        f"forward() {_text(wanted[i, j])}; {len(wrong)} of {found.size} entries are wrong"
    )
    owners = [
        np.searchsorted(np.cumsum(pair.sizes(side)), form.picking, side="right")
        for side, form in enumerate(ends)
    ]
    why = _reason(pair, found, wanted, wrong, ends, owners)
    there, back = (_between(np.abs(M) > allowed, owners) for M in (wanted, found))
    k = _multiple(found, wanted)
    factor = 1.0 if k is None or complex(k).imag else float(complex(k).real)
    return Trial(*about, False, len(wrong), text, there == back, factor), why


def _multiple(found: np.ndarray, wanted: np.ndarray) -> Any:
    """k such that a matrix is k times another one; None if it is no multiple."""
    at = np.abs(wanted) > 0
    if not at.any() or found[~at].any() or len({*np.round(found[at] / wanted[at], 9)}) > 1:
        return None
    return found[at][0] / wanted[at][0]


def _between(matrix: np.ndarray, owners: Sequence[np.ndarray]) -> set[tuple[int, int, int]]:
    """The entries of a matrix by which an element gets something of another rank: it, and both
    ranks."""
    i, j = matrix.nonzero()
    return {
        (int(row), int(a), int(b))
        for row, a, b in zip(i, owners[0][i], owners[1][j], strict=True)
        if a != b
    }


def _text(value: Any) -> str:
    """A number; a complex one without its imaginary part if that is zero."""
    number = complex(value)
    return shown(number if number.imag else number.real)


def _transpose(matrix: np.ndarray) -> str:
    return "conjugate transpose" if matrix.dtype.kind == "c" else "transpose"


def _unused(pair: Pair, F: np.ndarray) -> str:
    """Ranks whose arrays the forward does not look at, though others' it does."""
    ends = np.cumsum([0, *pair.sizes(0)])
    parts = [F[:, a:b] for a, b in pairwise(ends)]
    unused = tuple(r for r, part in enumerate(parts) if part.size and not part.any())
    return ranks_text(unused) if unused and F.any() else ""


def _reason(
    pair: Pair,
    found: np.ndarray,
    wanted: np.ndarray,
    wrong: np.ndarray,
    ends: tuple[Form, Form],
    owners: Sequence[np.ndarray],
) -> str:
    """The common trait of the wrong entries, in words; empty if nothing."""
    if not found.any():
        return "adjoint() is zero"
    if (k := _multiple(found, wanted)) is not None:
        return f"adjoint() is {_text(k)} times the {_transpose(wanted)} of forward()"
    i, j = wrong.T
    local = owners[0][i] == owners[1][j]
    lost = (found[i, j] == 0) & (wanted[i, j] != 0)
    one = pair.element(0, int(ends[0].picking[i[0]]))
    if lost.all() and local.all():
        return (
            f"the own term of a rank is lost, as in {one}: what arrives from other ranks has to be "
            f"added to it, and replaces it"
        )
    if lost.all() and not local.any():
        return f"terms of other ranks are lost, as in {one}: they have to be sent back and added"
    if sorted(map(tuple, found)) == sorted(map(tuple, wanted)):
        return f"the elements arrive in other places than they came from, as in {one}"
    if not (lost | (wanted[i, j] != 0)).any():
        return f"terms are added that do not belong there, as in {one}"
    return ""


__all__ = ["checked", "pair_of"]
