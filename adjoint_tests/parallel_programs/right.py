"""Draw right parallel programs: from a seed a small model, a batch and a strategy, as one file.

    python right.py SEED [SEED ...]     prints them; `oracle.py --seeds 0:60` runs them

`program(seed)` gives the text of a file with the interface of the programs beside this one, without
CASE and FAULT: each is right, so whoever checks it may not raise an alarm. Strategy and seed go
round: any `len(STRATEGIES)` seeds in a row have all of them. What is drawn besides is meant to
tempt: unequal batches, parameters that are frozen, unused or tied, gradients that are zero (the
bias of an attention's keys), buffers that change, dropout with the same masks on all ranks,
bfloat16 with whole numbers, and collectives that only watch."""

import os
import random
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
from drawn import data, pieces
from drawn.models import MODELS

WATCH = {
    "nothing": "",
    "barrier": "    dist.barrier()\n",
    "norm": (
        "    grads = [p.grad for p in model.parameters() if p.grad is not None]\n"
        "    grads = [g.to_local() if hasattr(g, 'to_local') else g for g in grads]\n"
        "    squares = sum((g.square().sum() for g in grads), torch.zeros(()))\n"
        "    dist.all_reduce(squares := squares.detach().clone())  # for the log\n"
    ),
    "slowest": (
        "    dist.all_reduce(slowest := torch.tensor(0.25), op=dist.ReduceOp.MAX)  # seconds\n"
    ),
}
LOOK = {
    "nothing": "",
    "evaluate": "    with torch.no_grad():\n        model(mine[0])\n",
    "agree": "    dist.all_gather([torch.zeros(()) for _ in range(WORLD)], torch.ones(()))\n",
}
STRATEGIES = [*data.STRATEGIES, *pieces.STRATEGIES]


def program(seed: int) -> str:
    """The text of the program of this seed; the same for the same seed, always."""
    draw = random.Random(seed)
    strategy = STRATEGIES[seed % len(STRATEGIES)]
    choice = {"seed": seed, "world": draw.choice((2, 2, 4))}
    if strategy in data.STRATEGIES:
        fitting = [m for m in MODELS if m.__name__ in data.FITS.get(strategy.__name__, ALL)]
        choice["model"] = draw.choice(fitting)(draw)
        while "accumulate" in strategy.__name__ and "steps" in choice["model"]["net"]:
            choice["model"] = draw.choice(fitting)(draw)  # one that does not count forward passes
    watch, look = draw.choice(list(WATCH)), draw.choice(list(LOOK))
    if strategy.__name__ in data.QUIET or "steps" in choice.get("model", {}).get("net", ""):
        look = "nothing"
    if strategy.__name__ in data.QUIET:
        watch = "nothing"
    return strategy(draw, choice).replace("#WATCH\n", WATCH[watch]).replace("#LOOK\n", LOOK[look])


ALL = {m.__name__ for m in MODELS}

if __name__ == "__main__":
    for number in sys.argv[1:]:
        print(program(int(number)))
