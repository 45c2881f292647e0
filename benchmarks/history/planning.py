"""Exact proofs and plans, in one process, of `benchmarks.planning`."""

from __future__ import annotations

from benchmarks.planning import growth, proofs


class Once:
    """One call a process: what is built is kept, so a second call would find it."""

    number = 1
    repeat = 1
    rounds = 3
    warmup_time = 0
    timeout = 300


class Proofs(Once):
    """Normal forms of large operators: built, composed and compared."""

    params = (list(proofs.CASES),)
    param_names = ("proof",)

    def time_proof(self, name: str) -> None:
        assert proofs.CASES[name]()


class Growth(Once):
    """Questions about operators over many workers; the operators are built beforehand."""

    params = (list(growth.CASES), [64, 1024])
    param_names = ("question", "workers")

    def setup(self, name: str, workers: int) -> None:
        most, case = growth.CASES[name]
        if workers > most:
            raise NotImplementedError("too long")  # asv leaves it out
        self.question = case(workers)

    def time_question(self, name: str, workers: int) -> None:
        assert self.question()

    def peakmem_question(self, name: str, workers: int) -> None:
        assert self.question()
