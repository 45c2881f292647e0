"""Random models of other people under random strategies, beside one process that knows torch alone.

    python adjoint_tests/oracle/models.py --minutes 60 --seed 0

draws a model of `support.models`, a configuration (heads, groups, sizes that need not divide,
dropouts, tied embeddings, outputs that no loss has), a strategy, its workers and a seed; prints
what it drew, and the verdict; and so on until the time is over. It ends with status 1 if a result
was silently wrong. ``--draw K`` repeats the K-th draw of a seed, and nothing else.

Verdicts: "right"; "refused", by an error of linop; "raw", by another error; "wrong". It uses
linop's public names alone, so it can be run with older versions:

    PYTHONPATH=… python adjoint_tests/oracle/models.py
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.models.packages import missing, versions

KINDS = {  # words of a fault, and the kind of mistake that it is of
    "gradients: None": "no gradient, or one of zero",
    "on workers of one model": "random numbers that differ between workers",
    "keys of state_dict": "keys of a state",
    "state_dict": "a state of blocks",
    "read": "a parameter read beside a forward",
    "loss": "another loss",
    "state": "other parameters or buffers",
}


def drawn(seed: int, k: int) -> Any:
    """The k-th case of a seed."""
    from support.models.cases import Case
    from support.models.strategies import STRATEGIES
    from support.models.zoo import ZOO

    random = Random(f"{seed}/{k}")
    names = [name for name in ZOO if name != "torchvision ResNet" or random.random() < 0.2]
    name = random.choice(names)
    # Those of one worker have least to go wrong.
    weights = [1 if "one" in mesh else 4 for _, mesh in STRATEGIES.values()]
    (strategy,) = random.choices([*STRATEGIES], weights)
    mesh = dict(STRATEGIES[strategy][1])
    if len(mesh) == 1:
        mesh = {
            axis: n if axis != "dp" and axis != "tp" else random.choice([2, 2, 3])
            for axis, n in mesh.items()
        }
    family = ZOO[name]
    zero = strategy.startswith(("zero2", "zero3"))
    options = {
        "point": random.choice(family.cuts),
        "seeded": "one" in mesh,
        "cuts": random.choice(["", "attention", "others"]) if "tp" in mesh else "",
        "read": zero and random.random() < 0.5,
        "methods": zero and family.package == "timm" and random.random() < 0.4,
    }
    return Case(
        name,
        family.draw(random),
        strategy,
        mesh,
        seed=random.randrange(1000),
        trains=random.random() < 0.7,
        rows=random.choice([1, 2, 3]),
        micro=random.choice([2, 3]),
        steps=random.choice([1, 2, 3]),
        decay=random.choice([0.0, 0.1]),
        mean="pp" in mesh and "dp" not in mesh and random.random() < 0.4,
        options={key: value for key, value in options.items() if value},
    )


def cases(seed: int, only: str, draw: int | None) -> Iterator[tuple[int, Any]]:
    k = -1 if draw is None else draw - 1
    while draw is None or k < draw:
        k += 1
        case = drawn(seed, k)
        if draw is not None or only in f"{case.model} | {case.strategy}":
            yield k, case


def kinds(text: str) -> list[str]:
    """Kinds of the faults in the text of a verdict."""
    named = [KINDS[words] for one in text.split("; ") for words in KINDS if words in one]
    return list(dict.fromkeys(named))


def judged(case: Any, ranks: bool) -> Any:
    from support.models import running

    return (running.on_ranks if ranks else running.on_threads)(case)


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--minutes", type=float, default=60.0)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--draw", type=int, help="repeat this draw alone")
    options.add_argument("--only", default="", help="draws whose model or strategy has this in it")
    options.add_argument(
        "--ranks", type=int, default=5, help="one draw of so many on ranks; 0: none"
    )
    given = options.parse_args()
    if why := missing():
        raise SystemExit(why)
    warnings.simplefilter("ignore")
    import linop

    print(f"linop in {Path(linop.__file__).parent}; {versions()}; seed {given.seed}")
    counts: Counter[str] = Counter()
    found: Counter[str] = Counter()
    end = time.monotonic() + 60 * given.minutes
    for k, case in cases(given.seed, given.only, given.draw):
        if time.monotonic() > end:
            break
        ranks = bool(given.ranks) and k % given.ranks == 0
        print(f"draw {k} on {'ranks' if ranks else 'threads'}: {case}", flush=True)
        verdict = judged(case, ranks)
        print(f"    {verdict}", flush=True)
        counts[verdict.kind] += 1
        if verdict.kind == "wrong":
            found.update(kinds(verdict.text))
    print(f"{sum(counts.values())} draws: {dict(counts)}")
    for kind, count in found.most_common():
        print(f"wrong, {kind}: {count}")
    return int(bool(counts["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
