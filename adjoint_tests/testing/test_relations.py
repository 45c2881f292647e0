"""`linop.testing.parallel.twins.relations`: how values of ranks are related to expected ones."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from linop.testing.describing import seeds
from linop.testing.parallel.recording.records import Parameter
from linop.testing.parallel.twins.parameters import Tolerances, _on_own_elements
from linop.testing.parallel.twins.relations import (
    Index,
    Kind,
    Scale,
    blocks,
    partitions,
    related,
    rounded,
)

SCALE = Scale(2.0**-30, 1e-12)
shapes = st.lists(st.integers(2, 5), min_size=1, max_size=3).map(tuple)
worlds = st.sampled_from([2, 3, 4, 6, 8])


def drawn(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@given(seeds, shapes, worlds)
def test_equal_factors_and_nothing(seed: int, shape: tuple[int, ...], world: int) -> None:
    wanted = {r: drawn(seed + r, shape) for r in range(world)}
    assert related(wanted, wanted, SCALE).kind is Kind.EQUAL
    rounded = {r: one * (1 + 1e-13) for r, one in wanted.items()}
    assert related(rounded, wanted, SCALE).kind is Kind.EQUAL
    twice = related({r: 2 * one for r, one in wanted.items()}, wanted, SCALE)
    assert twice.kind is Kind.FACTOR and abs(twice.factor - 2) < 1e-9 and not twice.factors
    each = related({r: (r + 2) * one for r, one in wanted.items()}, wanted, SCALE)
    assert each.kind is Kind.FACTOR
    assert all(abs(each.factors[r] - r - 2) < 1e-9 for r in wanted)
    nothing: dict[int, np.ndarray | None] = dict.fromkeys(wanted)
    assert related(nothing, wanted, SCALE).kind is Kind.NONE
    other = {r: drawn(seed + 99 + r, shape) for r in wanted}
    assert related(other, wanted, SCALE).kind is Kind.OTHER


@given(seeds, shapes, st.sampled_from([4, 6, 8]), st.data(), st.sampled_from([1.0, 2.0, 0.5]))
def test_terms_over_groups(
    seed: int, shape: tuple[int, ...], world: int, data: st.DataObject, factor: float
) -> None:
    groups = data.draw(st.sampled_from([p for p in partitions(range(world)) if len(p[0]) > 1]))
    wanted, terms = {}, {}
    for k, group in enumerate(groups):
        parts = [drawn(seed + 10 * k + r, shape) for r in group]
        for r, part in zip(group, parts, strict=True):
            wanted[r], terms[r] = np.sum(parts, axis=0) / factor, part
    found = related(terms, wanted, SCALE)
    assert found.kind is Kind.UNSUMMED
    assert any(each == groups and abs(k - factor) < 1e-8 for each, k in found.options)


@given(seeds, st.integers(2, 6))
def test_shards_of_others(seed: int, rows: int) -> None:
    wanted = {r: drawn(seed + r, (rows, 3)) for r in range(3)}
    found = related({r: wanted[(r + 1) % 3] for r in wanted}, wanted, SCALE)
    assert found.kind is Kind.SHARD
    assert related({r: one[::-1] for r, one in wanted.items()}, wanted, SCALE).kind is Kind.SHARD


@given(seeds, shapes, st.data())
def test_blocks_are_found(seed: int, shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = drawn(seed, shape)
    part = tuple(data.draw(st.integers(1, n)) for n in shape)
    slices = list(blocks(part, shape)) or [(slice(None),) * len(shape)]
    chosen = data.draw(st.sampled_from(slices))
    if whole[chosen].size < 2:
        return
    found = Index(whole, SCALE).selection(whole[chosen] * (1 + 1e-13))
    assert found is not None
    assert np.array_equal(found, np.arange(whole.size).reshape(shape)[chosen])


@given(seeds, st.integers(4, 40), st.data())
def test_any_selection_is_found(seed: int, size: int, data: st.DataObject) -> None:
    whole = drawn(seed, (size,))
    order = data.draw(st.permutations(range(size)))[: max(2, size // 2)]
    found = Index(whole, SCALE).selection(whole[order].reshape(1, -1))
    assert found is not None and found.ravel().tolist() == list(order)
    assert Index(whole, SCALE).selection(drawn(seed + 1, (3,))) is None


@given(seeds, st.integers(6, 40), st.sampled_from([np.inf, -np.inf, -1e9, 3e38]))
def test_what_masks_fill_in_is_no_scale(seed: int, size: int, fill: float) -> None:
    """Beside an infinity, or a number that stands for one, others are not all alike."""
    whole = drawn(seed, (size,))
    whole[: size // 3] = fill
    assert Index(whole, SCALE).selection(drawn(seed + 1, (3,))) is None
    found = Index(whole, SCALE).selection(whole[1:])
    assert found is not None and np.array_equal(whole[found], whole[1:])
    other = whole.copy()
    other[-1] += 1
    assert SCALE.near(whole, whole)
    assert not np.isinf(fill) or not SCALE.near(other, whole)
    assert not SCALE.near(drawn(seed + 1, (size,)), whole)


@given(st.integers(2, 12))
def test_partitions_are_partitions(n: int) -> None:
    found = list(partitions(range(n)))
    assert len(set(found)) == len(found)
    for partition in found:
        assert sorted(r for group in partition for r in group) == list(range(n))
        assert len({len(group) for group in partition}) == 1


def test_factors_are_fractions_up_to_rounding() -> None:
    half = Scale(2.0**-3, 1e-4)
    assert [rounded(k, half) for k in (1.9947, 0.4981, 1.2523)] == [2, 0.5, 1.25]
    assert rounded(1.9947, SCALE) == 1.9947 and rounded(2 + 1e-12, SCALE) == 2
    rows = np.array([1.0, -1.0])
    wanted, given = dict.fromkeys((0, 1), rows), {0: -0.1 * rows, 1: 2.1 * rows}
    alone = related(given, wanted, SCALE)
    assert alone.kind is Kind.FACTOR
    other = {r: drawn(r, (5,)) for r in (0, 1)}
    both = related(other, dict.fromkeys(other, sum(other.values()) / 2), SCALE)
    assert both.kind is Kind.UNSUMMED and alone.as_terms([both]).kind is Kind.UNSUMMED
    assert alone.as_terms([alone]) is alone


@given(seeds, st.integers(1, 5))
def test_one_element_of_each_rank_is_no_factor(seed: int, size: int) -> None:
    """One number is a multiple of any other, with a factor of its own."""
    wanted = drawn(seed, (2 * size,))
    held = {r: np.arange(r * size, (r + 1) * size) for r in (0, 1)}
    parts = {
        r: Parameter("w", wanted, [], wanted, wanted, False, True, "float64", held=at)
        for r, at in held.items()
    }
    scale, expected = Tolerances(SCALE, SCALE, ""), dict.fromkeys(parts, wanted)
    each = np.repeat([2.0, -3.0], size)
    own = _on_own_elements(parts, dict.fromkeys(parts, each * wanted), expected, scale)
    assert own is None if size == 1 else own is not None and own.factors
    same = _on_own_elements(parts, dict.fromkeys(parts, 2 * wanted), expected, scale)
    assert same is not None and same.kind is Kind.FACTOR and abs(same.factor - 2) < 1e-9
