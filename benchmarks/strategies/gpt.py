"""examples/gpt.py under all its strategies: losses beside those of one process, and the bytes that
a worker holds beside the formulas of ZeRO and of Megatron.

    python benchmarks/strategies/gpt.py                                  # 500 steps, float32
    python benchmarks/strategies/gpt.py --double --steps 100 --batch 8   # losses to 1e-10

runs what the folder `--kept` does not have, on threads, and writes results/gpt.md, or, with
--double, results/gpt-float64.md. A run that was ended goes on where it was, at most 25 steps
before; `--only dp` makes that run alone, and no page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "adjoint_tests")]

import gpt  # noqa: E402

import linop  # noqa: E402
from benchmarks.harness.report import markdown  # noqa: E402
from support.strategies.memory.saved_memory import between_passes  # noqa: E402

RESULTS = Path(__file__).with_name("results")
Record = Mapping[str, Any]


class Setting(NamedTuple):
    """Of all runs.

    Args:
        batch: rows of a step.
        double: float64, else float32.
    """

    size: gpt.Size
    steps: int
    batch: int
    double: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32


ROUNDED = "rounded"
"""One process whose first parameters are one unit in the last place larger."""
RUNS = {**gpt.STRATEGIES, ROUNDED: 1}
TWINS = {"dp": "accumulated", "zero3": "accumulated", "stored": "stored", "reversible": "stored"}
"""Runs that add in the same order, or compute the same otherwise; `sequential` for others."""
EVERY = 25
"""Steps after which a run is saved."""


class Saved:
    """Files of a run that is not over, one a worker: values, and the optimizer's state.

    Args:
        stem: folder and name of the run.
    """

    def __init__(self, stem: Path, backend: Any) -> None:
        self._stem, self._workers, self._me = stem, backend.workers or 1, backend.worker or 0
        self.losses: list[float] = []

    def _file(self, step: int, worker: int) -> Path:
        return self._stem.with_name(f"{self._stem.name}-step{step}-{worker}.pt")

    def _steps(self) -> list[int]:
        """Steps of which all workers have saved."""
        found = self._stem.parent.glob(f"{self._stem.name}-step*-0.pt")
        steps = sorted(int(file.stem.rsplit("-", 2)[1][4:]) for file in found)
        return [s for s in steps if all(self._file(s, w).exists() for w in range(self._workers))]

    def load(self, run: gpt.Run, adam: torch.optim.Optimizer) -> int:
        """Go on where the run was; the number of steps."""
        steps = self._steps()
        if not steps:
            return 0
        known = torch.load(self._file(steps[-1], self._me))
        with torch.no_grad():
            for p, value in zip(run.net.parameters(), known["parameters"], strict=True):
                p.copy_(value)
        adam.load_state_dict(known["adam"])
        self.losses += known["losses"]
        return steps[-1]

    def save(self, run: gpt.Run, adam: torch.optim.Optimizer) -> None:
        """Save after every so many steps, and forget those before the last two."""
        step = len(self.losses)
        if step % EVERY:
            return
        values = [p.detach() for p in run.net.parameters()]
        known = {"parameters": values, "adam": adam.state_dict(), "losses": self.losses}
        part = self._file(step, self._me).with_suffix(".part")
        torch.save(known, part)
        part.replace(self._file(step, self._me))
        self._file(step - 2 * EVERY, self._me).unlink(missing_ok=True)


def rounded(run: gpt.Run, adam: torch.optim.Optimizer) -> int:
    """Change parameters by a rounding; no steps were made."""
    del adam
    with torch.no_grad():
        for p in run.net.parameters():
            p.mul_(1 + torch.finfo(p.dtype).eps)
    return 0


def trained(strategy: str, setting: Setting, stem: Path) -> Record:
    """Losses, and the bytes on worker 0. Collective.

    Args:
        stem: where the run is saved meanwhile.
    """
    name = "sequential" if strategy == ROUNDED else strategy

    def program(backend: Any) -> Record:
        saved = Saved(stem, backend)
        losses = saved.losses

        def begin(run: gpt.Run, adam: torch.optim.Optimizer) -> int:
            return saved.load(run, adam) or (rounded(run, adam) if strategy == ROUNDED else 0)

        for run, adam, loss in gpt.train(name, backend, *setting[:3], setting.dtype, begin):
            last = run, adam
            losses.append(loss)
            saved.save(run, adam)
            if backend.worker == 0 and len(losses) % 20 == 0:
                print(f"{strategy}: {len(losses)} steps, loss {loss:.4f}", flush=True)
        run, adam = last
        parameters = list(run.net.parameters())
        draw = torch.Generator().manual_seed(0)
        shape = setting.batch, setting.size.length + 1
        states = [v for state in adam.state.values() for v in state.values() if v.ndim]
        held = {
            "parameters": total(parameters),
            "gradients": total([p.grad for p in parameters if p.grad is not None]),
            "Adam": total(states),
        }
        text = torch.randint(gpt.BYTES, shape, generator=draw)
        return {"losses": losses, **held, "activations": between_passes(run, text)}

    torch.set_num_threads(1)
    return linop.launch(program, RUNS[strategy], "threads")[0]


def total(tensors: Sequence[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def kept_or_trained(strategy: str, setting: Setting, folder: Path) -> Record:
    """A run, from the folder if it has it."""
    file = folder / f"{strategy}-{setting.steps}-{setting.batch}-{setting.dtype}.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        stem = file.with_suffix("")
        file.write_text(json.dumps(trained(strategy, setting, stem)))
        for part in folder.glob(f"{stem.name}-step*"):
            part.unlink()
    found: Record = json.loads(file.read_text())
    return found


def formulas(strategy: str, setting: Setting) -> tuple[float, float, str]:
    """Bytes of states (parameters, gradients, Adam's two moments), of activations in the blocks,
    and the formulas.

    ZeRO (Rajbhandari et al. 2020), with numbers of one width e in place of 2, 2 and K = 12: 4 e Ψ,
    over N workers in stage 3. Megatron (Korthikanti et al. 2022), sbh(34 + 5as/h) bytes a layer of
    16-bit numbers: without dropout's masks (2 sbh) and without the matrix of attention, which is
    not stored here, 16 e sbh; over t with the sequence split.
    """
    size, e = setting.size, setting.dtype.itemsize
    net = gpt.GPT(size)
    count = sum(p.numel() for p in net.parameters())
    once = sum(p.numel() for n, p in net.named_parameters() if "norm" in n or "positions" in n)
    once += size.blocks * 2 * size.width  # biases after a sum: the first worker's
    sbh = size.length * setting.batch * size.width
    states, layers = 4 * e * count, 16 * e * sbh * size.blocks
    known = {
        "accumulated": (states, layers / 4, "4eΨ; 16e·sbh/M of M micro-batches"),
        "dp": (states, layers / 4, "4eΨ; 16e·sbh/N"),
        "zero3": (states / 4, layers / 4, "4eΨ/N; 16e·sbh/N"),
        "tp": (
            4 * e * ((count - once) / 2 + once),
            layers / 4,
            "4e((Ψ−Ψ₁)/t + Ψ₁), Ψ₁ whole on each; 16e·sbh/(dp·t)",
        ),
        "checkpoint": (states, e * sbh * size.blocks, "4eΨ; e·sbh a block"),
        "reversible": (states, 2 * e * sbh, "4eΨ; 2e·sbh, whatever the depth"),
    }
    return known.get(strategy, (states, layers, "4eΨ; 16e·sbh a block"))


def page(found: Mapping[str, Record], setting: Setting) -> str:
    """Means of losses and their distance from one process's, and bytes beside formulas."""
    every = max(1, setting.steps // 5)
    ends = range(every, setting.steps + 1, every)
    losses, memory = [], []
    for strategy, record in found.items():
        own = record["losses"]
        twin = TWINS.get(strategy, "sequential")
        alone = "stored" if twin == "stored" else "sequential"
        far = [
            max(abs(a - b) for a, b in zip(own, found[other]["losses"], strict=True))
            for other in (alone, twin)
        ]
        means = [f"{sum(own[end - every : end]) / every:.4f}" for end in ends]
        workers = str(RUNS[strategy])
        losses.append([strategy, workers, *means, f"{far[0]:.1e}", f"{far[1]:.1e}, {twin}"])
        if strategy == ROUNDED:
            continue
        wanted, blocks, text = formulas(strategy, setting)
        parts = [record[key] for key in ("parameters", "gradients", "Adam")]
        cells = [mib(sum(parts)), mib(wanted), mib(record["activations"]), mib(blocks), text]
        memory.append([strategy, workers, *map(mib, parts), *cells])
    header = [
        "strategy",
        "workers",
        *(f"{end - every + 1}–{end}" for end in ends),
        "from one process",
        "from the twin",
    ]
    states = ["strategy", "workers", "parameters", "gradients", "Adam", "sum", "its formula"]
    states += ["activations", "in blocks, by formula", "formulas"]
    size, more = setting.size, " --double" if setting.double else ""
    count = sum(p.numel() for p in gpt.GPT(size).parameters())
    return (
        f"# A GPT under strategies of parallel training\n\n"
        f"`python benchmarks/strategies/gpt.py --steps {setting.steps} --batch {setting.batch}"
        f"{more}`: {count:,} parameters, {setting.batch} rows of {size.length} bytes a step, "
        f"{setting.dtype}, workers as threads. Mean losses in nats a byte, and the largest "
        f"distance of any step's loss from that of one process (`reversible`: from `stored`), and "
        f"from the twin, which is named: `accumulated` is one process that adds the gradients of "
        f"four micro-batches, in the order in which `dp` and `zero3` add those of the workers; "
        f"`rounded` is one process whose first parameters are one unit in the last place "
        f"larger.\n\n"
        f"{markdown(header, losses)}\n"
        f"## MiB that worker 0 holds\n\n"
        f"Between steps, and, of activations, between forward and backward, counted by storage. "
        f"`dp`, `zero3`: N = 4; `tp`: dp = 2, t = 2, sequence parallel. The activations outside "
        f"of blocks, some 3 e·sbh with the scores, are counted, and not in the formula.\n\n"
        f"{markdown(states, memory)}"
    )


def mib(size: float) -> str:
    return f"{size / 2**20:.2f}"


def main(
    steps: Annotated[int, typer.Option(min=1)] = 500,
    batch: Annotated[int, typer.Option(min=4, help="Rows of a step.")] = 16,
    double: Annotated[bool, typer.Option("--double", help="In float64.")] = False,
    kept: Annotated[Path, typer.Option(help="Of runs.")] = Path("gpt-runs"),
    write: Annotated[bool, typer.Option(help="Write the page, or print it.")] = True,
    only: Annotated[str | None, typer.Option(help="One run, and no page.")] = None,
) -> None:
    """Train under every strategy."""
    setting = Setting(gpt.Size(), steps, batch, double)
    if only is not None:
        kept_or_trained(only, setting, kept)
        return
    found = {name: kept_or_trained(name, setting, kept) for name in RUNS}
    text = page(found, setting)
    if not write:
        print(text)
        return
    (RESULTS / f"gpt{'-float64' if double else ''}.md").write_text(text)


if __name__ == "__main__":
    typer.run(main)
