"""Torch programs that communicate by mpi4py beside their twins: right ones pass, and of wrong ones
the parameters, the place and the operator are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from linop.errors import BackendError
from linop.testing.parallel.findings import ParallelReport
from linop.testing.parallel.mpi.check import check_mpi
from linop.testing.parallel.twins.relations import Kind
from support import mpi_programs
from support.checked_programs import reports
from support.requirements import needs_mpi

pytest.importorskip("torch")
pytestmark = [needs_mpi, pytest.mark.timeout(400)]
FOLDER = Path(mpi_programs.__file__).parent
INPUT = {"inp.weight", "inp.bias"}
BEFORE = INPUT | {"fc1.weight", "fc1.bias", "fc2.weight"}
EVERYTHING = BEFORE | {"out.weight", "out.bias"}
WRONG = {
    "MissingAllReduce": (INPUT, Kind.UNSUMMED, "over ranks 0, 1", "all-reduce over ranks 0, 1"),
    "TooManyAllReduces": (BEFORE, Kind.FACTOR, "2 = the number of ranks", "is too many"),
    "OverwrittenArgument": (EVERYTHING, Kind.OTHER, "InPlace overwrites", "a copy of the argument"),
    "BroadcastWithoutSum": ({"fc1.weight"}, Kind.UNSUMMED, "Broadcast.apply", "sum-reduce"),
    "ForgottenParameter": ({"out.bias"}, Kind.UNSUMMED, "module out", "all-reduce of its gradient"),
    "RootsDiffer": ({"fc1.weight"}, Kind.NONE, "comm.Bcast(net.fc1.weight.grad", ""),
    "HaloDoesNotAdd": ({"lift.weight", "lift.bias"}, Kind.OTHER, "Halo.apply", "adjoint of Halo"),
    "SlicedGather": (INPUT, Kind.OTHER, "Gathered.apply", "in the backward pass of Gathered"),
    "SwappedParts": (INPUT, Kind.SHARD, "Turned.apply", "the adjoint of Turned"),
    "WrongCommunicator": (INPUT, Kind.OTHER, "Copy.apply", "all-reduce over ranks 0, 2"),
    "Stages": (BEFORE, Kind.FACTOR, "Message.apply", "is 1/2 times element 0 of the result"),
    "NumpyInManyWays": (INPUT, Kind.OTHER, "ManyWays.apply", "the adjoint of ManyWays"),
    "PickledSum": (BEFORE, Kind.FACTOR, "Pickled.apply", "is too many"),
    "SumOfGathered": (BEFORE, Kind.FACTOR, "TensorsGathered.apply", "is too many"),
    "FlatBuffer": (EVERYTHING, Kind.FACTOR, "one.grad.copy_(torch.from_numpy(part))", "divided"),
    "UnseenArrays": (BEFORE, Kind.FACTOR, "Unseen.apply", ""),
}
"""By program: the wrong parameters, their kind, and words of place and operator."""
RANKS = {"WrongCommunicator": 4}
UNPROVEN = {"UnseenArrays"}
EXCHANGES = {
    "HaloDoesNotAdd", "SlicedGather", "SwappedParts", "Stages", "NumpyInManyWays",
}  # fmt: skip


def target(name: str) -> str:
    return f"{FOLDER / ('exchanges.py' if name in EXCHANGES else 'steps.py')}:{name}"


def passes(name: str, found: ParallelReport) -> None:
    assert found, found
    assert not found.notes
    proven = [one.proven for one in found.pairs]
    assert proven == [True] * len(proven) or name in UNPROVEN, found


def is_named(name: str, found: ParallelReport) -> None:
    parameters, kind, place, operator = WRONG[name]
    assert not found
    differ = {one for one, verdict in found.parameters.items() if verdict.kind is not Kind.EQUAL}
    assert differ == parameters
    assert {found.parameters[one].kind for one in differ} == {kind}, found
    assert len(found.findings) == 1
    for words in (place, operator, ".py:"):
        assert words in str(found.findings[0]), found
    assert found.as_dict()["passed"] is False


@pytest.mark.parametrize("ranks", [2, 4])
def test_right_programs_pass_and_wrong_ones_are_named(ranks: int, tmp_path: Path) -> None:
    names = [name for name in WRONG if RANKS.get(name, 2) == ranks]
    found = reports([target(name) for name in names], ranks, tmp_path)
    for name in names:
        passes(name, found[name, "right"])
        is_named(name, found[name, "wrong"])


def test_a_program_that_is_started_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASE", "wrong")
    found = check_mpi(target("MissingAllReduce"), 2, seconds=150)
    assert isinstance(found, ParallelReport)
    is_named("MissingAllReduce", found)


def test_a_step_that_waits_ends_with_all_stacks(tmp_path: Path) -> None:
    file = tmp_path / "waits.py"
    file.write_text(
        f"import sys\nsys.path.insert(0, {str(FOLDER)!r})\n"
        "from steps import ForgottenParameter, comm\n"
        "class Waits(ForgottenParameter):\n"
        "    def step(self, net, mine):\n"
        "        if comm.rank:\n"
        "            comm.Barrier()\n"
        "        return super().step(net, mine)\n"
    )
    with pytest.raises(BackendError, match=r"(?s)rank 0:.*rank 1:.*waits.py.* in step"):
        check_mpi(f"{file}:Waits", 2, seconds=25)
