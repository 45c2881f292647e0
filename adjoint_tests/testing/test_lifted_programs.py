"""Chains of collectives that really run, drawn: the operators that are lifted from them make, of
whole numbers, exactly what the ranks computed, and a pair is proven exactly if it is one."""

from __future__ import annotations

import importlib.util
import pickle
from collections import Counter

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from linop import LinearOperator
from linop.testing.parallel.lifting.functions import function
from linop.testing.parallel.lifting.places import applied, space_of
from linop.testing.parallel.recording.records import Record
from support.drawn_movements import drawn, of_all_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SEEDS = range(120)


def lifted(ranks: dict[int, Record], backward: bool) -> LinearOperator:
    runs = {r: one for r, record in ranks.items() for one in record.lifted
            if one.backward is backward}  # fmt: skip
    first, last = "yx" if backward else "xy"
    ends = (
        space_of(letter, {r: [getattr(one, side)[0].size] for r, one in runs.items()})
        for letter, side in ((first, "given"), (last, "made"))
    )
    found = function(ranks, runs, [[0]] * len(ranks), [[0]] * len(ranks), *ends)
    assert found.exact
    return pickle.loads(pickle.dumps(found.operator))  # as reports of other processes are read


def test_drawn_functions() -> None:
    verdicts: Counter[bool] = Counter()
    names: Counter[str] = Counter()
    for seed, parts in of_all_ranks(SEEDS).items():
        links, at, fault = drawn(seed)
        about = f"seed {seed}: {links}, {fault} at {at}"
        ranks = {record.rank: record for record, _ in parts}
        x, y, gradient, back = (np.concatenate([a[k] for _, a in parts]) for k in range(4))
        forward, backward = (lifted(ranks, is_back) for is_back in (False, True))
        assert np.array_equal(applied(forward.movement(), x), y), about
        assert np.array_equal(applied(backward.movement(), gradient), back), about
        is_adjoint = y @ gradient == x @ back  # of whole numbers, exactly
        assert forward.H.equals(backward) is bool(is_adjoint), about
        assert is_adjoint or fault, about
        verdicts[bool(is_adjoint)] += 1
        names.update(link.name for link in links)
    assert verdicts[True] > 30 and verdicts[False] > 30, verdicts
    assert len(names) == 14, names
