"""`linop.testing.check_parallel`: right programs without an alarm, wrong ones with their faults,
programs that do not fit or do not end. `parallel_programs/score.py` runs many more."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

from linop.errors import ArgumentError, BackendError
from linop.testing import assert_parallel, check_parallel
from linop.testing.parallel.recording.failures import failure
from linop.testing.parallel.recording.programs import of_file
from linop.testing.parallel.twins.relations import Kind
from linop.tools.cli import app

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parents[1] / "parallel_programs"

# A program of functions


class AllReduce(torch.autograd.Function):
    """A sum over ranks, forward or backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: bool, backward: bool) -> torch.Tensor:
        ctx.backward_too = backward
        if forward:
            dist.all_reduce(x := x.clone())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        if ctx.backward_too:
            dist.all_reduce(gradient := gradient.clone())
        return gradient, None, None


class Net(nn.Module):
    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.inp, self.up = nn.Linear(4, 5), nn.Linear(5, hidden)
        self.down = nn.Linear(hidden, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(torch.tanh(self.inp(x)))))


class Cut(Net):
    """`up` by its outputs, `down` by its inputs."""

    def __init__(self, into: tuple[bool, bool], out: tuple[bool, bool]) -> None:
        super().__init__(3)
        self.into, self.out = into, out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = AllReduce.apply(torch.tanh(self.inp(x)), *self.into)
        part = torch.relu(self.up(h)) @ self.down.weight.T
        return AllReduce.apply(part, *self.out) + self.down.bias


def shard(name: str, value: Any, rank: int, world: int) -> Any:
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name)
    return value if dim is None else value.chunk(world, dim)[rank]


def cut(into: tuple[bool, bool], out: tuple[bool, bool]) -> Callable[[nn.Module], nn.Module]:
    def model(twin: nn.Module) -> nn.Module:
        net = Cut(into, out)
        values = {n: shard(n, v, dist.get_rank(), 2) for n, v in twin.state_dict().items()}
        net.load_state_dict(values)
        return net

    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 3, generator=generator)


RIGHT = cut((False, True), (True, False))


def report(model: Callable[[nn.Module], nn.Module], **keywords: Any) -> Any:
    return check_parallel(model, Net, batch, F.mse_loss, **keywords)


def test_a_right_program() -> None:
    found = report(RIGHT)
    assert found, found
    assert [pair.proven for pair in found.pairs] == [True, True]
    assert all(one.kind is Kind.EQUAL for one in found.parameters.values())


def test_a_sum_that_is_missing() -> None:
    found = report(cut((False, False), (True, False)))
    (finding,) = found.findings
    assert set(finding.parameters) == {"inp.weight", "inp.bias"}
    assert finding.kind is Kind.UNSUMMED and "0, 1" in finding.detail
    assert finding.place.module == "up" and "self.up(h)" in finding.place.text
    assert "all-reduce" in finding.operator


def test_a_sum_too_many() -> None:
    found = report(cut((False, True), (True, True)))
    (finding,) = found.findings
    assert set(finding.parameters) == {
        "inp.weight", "inp.bias", "up.weight", "up.bias", "down.weight"
    }  # fmt: skip
    assert finding.kind is Kind.FACTOR and finding.detail.startswith("2 ")
    assert "AllReduce.apply(part" in finding.place.text
    assert "too many" in finding.operator
    wrong = [pair for pair in found.pairs if pair.proven is False]
    assert len(wrong) == 1 and wrong[0].spaces == "terms of a sum to replicated"
    assert "is 2 times element 0 of the result's on rank 0" in wrong[0].counterexample
    there, back = wrong[0].operator, wrong[0].adjoint
    assert there is not None and back is not None and back.equals(there.H)
    with pytest.raises(AssertionError, match="a factor: 2 = the number of ranks"):
        assert_parallel(cut((False, True), (True, True)), Net, batch, F.mse_loss)


def test_the_cut_is_found_from_values(assert_parallel: Callable[..., None]) -> None:
    assert_parallel(RIGHT, Net, batch, F.mse_loss)  # the fixture; without shard()


# Programs that do not fit


def test_the_twins_own_tensors() -> None:
    with pytest.raises(ArgumentError, match="needs tensors of its own"):
        report(lambda twin: twin)


def test_other_names() -> None:
    class Other(Net):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(2, 2)

    with pytest.raises(ArgumentError, match=r"'more.bias', 'more.weight'\] that the twin has"):
        report(lambda twin: Other())


def test_a_cut_that_nothing_tells() -> None:
    class Zeros(Net):
        def __init__(self, hidden: int = 6) -> None:
            super().__init__(hidden)
            for one in self.parameters():
                nn.init.zeros_(one)

    with pytest.raises(ArgumentError, match="Say it by a function shard"):
        check_parallel(lambda twin: Zeros(3), Zeros, batch, lambda y, t: y.sum())


def test_a_hang_ends_with_stacks() -> None:
    def model(twin: nn.Module) -> nn.Module:
        net = Net()
        if dist.get_rank():
            dist.all_reduce(torch.zeros(1))
        return net

    with pytest.raises(BackendError, match=r"did not end within 6 s[\s\S]*all_reduce"):
        report(model, seconds=6)


def test_a_part_of_a_batch_that_is_no_pair() -> None:
    with pytest.raises(ArgumentError, match=r"mine\(\) returned a Tensor, a tuple"):
        report(RIGHT, mine=lambda batch, rank, world: batch[0])


def test_other_values_than_the_twins_are_one_fault() -> None:
    def model(twin: nn.Module) -> nn.Module:
        (net := Net()).load_state_dict(twin.state_dict())
        with torch.no_grad():
            net.get_parameter("up.bias").mul_(1.01)
        return net

    (finding,) = report(model).findings
    assert finding.parameters == ("up.bias",) and finding.place.module == "up"
    assert "differ before the step" in finding.explanation
    assert "inp.weight" in finding.explanation


def test_an_exception_of_the_program() -> None:
    def model(twin: nn.Module) -> nn.Module:
        raise RuntimeError("no such thing")

    with pytest.raises(BackendError, match="no such thing"):
        report(model)


def test_a_step_of_an_optimizer_in_step() -> None:
    def step(model: nn.Module, mine: Any) -> torch.Tensor:
        (value := F.mse_loss(model(mine[0]), mine[1])).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return value

    (finding,) = report(RIGHT, step=step).findings
    assert "step() has changed them already" in finding.explanation


def test_a_sum_that_is_taken_again() -> None:
    def step(model: nn.Module, mine: Any) -> torch.Tensor:
        x, target = (part.chunk(2)[dist.get_rank()] for part in mine)
        (value := F.mse_loss(model(x), target) / 2).backward()
        for one in (*model.parameters(), model.get_parameter("down.bias")):
            dist.all_reduce(one.grad)
        return value

    def model(twin: nn.Module) -> nn.Module:
        (net := Net()).load_state_dict(twin.state_dict())
        return net

    (finding,) = report(model, step=step).findings
    assert finding.parameters == ("down.bias",) and finding.kind is Kind.FACTOR
    assert finding.operator == "the all-reduce over ranks 0, 1 is too many"
    assert "all_reduce(one.grad)" in finding.place.text


def test_one_rank_that_fails(tmp_path: Path) -> None:
    (tmp_path / "1.error").write_text("Traceback: no such thing")
    assert str(failure(tmp_path, 2, 5.0)).startswith("rank 1 of the program failed:")


def test_arguments() -> None:
    with pytest.raises(ArgumentError, match="dtype: 'single' given"):
        report(RIGHT, dtype="single")
    with pytest.raises(ArgumentError, match="twin: NoneType given, a function expected"):
        check_parallel(RIGHT)
    with pytest.raises(ArgumentError, match="no file 'nowhere"):
        check_parallel("nowhere.py")
    with pytest.raises(ArgumentError, match="given beside a file"):
        check_parallel(str(FOLDER / "gather_sum.py"), Net)


# The command


@pytest.mark.parametrize("version", ["right", "wrong"])
def test_the_command(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASE", version)
    files = tmp_path / "report.json", tmp_path / "report.xml"
    options = ["--json", str(files[0]), "--junit", str(files[1])]
    done = CliRunner().invoke(app, ["verify", "--torch", str(FOLDER / "tied_dp.py"), *options])
    assert done.exit_code == (version == "wrong"), done.output
    data = json.loads(files[0].read_text())
    assert data["passed"] == (version == "right")
    xml = files[1].read_text()
    assert ("<failure" in xml) == (version == "wrong") and 'name="loss"' in xml
    if version == "wrong":
        assert data["findings"][0]["parameters"] and data["findings"][0]["place"]["line"]


def test_movements_are_in_all_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASE", "wrong")
    files = tmp_path / "report.json", tmp_path / "report.xml"
    options = ["--json", str(files[0]), "--junit", str(files[1])]
    target = str(FOLDER / "feature_centre.py")
    done = CliRunner().invoke(app, ["verify", "--torch", target, *options])
    words = "its adjoint is the all-reduce over ranks 0, 1, what ran was the identity"
    assert words in done.output and words in files[1].read_text()
    (pair,) = json.loads(files[0].read_text())["pairs"]
    assert pair["wanted"] == pair["forward"] == "all-reduce over ranks 0, 1"
    assert pair["backward"] == "identity" and "R_{2→1}" in pair["operator"]


PROGRAMS = (
    "dtensor_row_bias", "expert_slice", "fsdp_ignored", "gather_sum", "mesh_forgotten_sum",
    "pipe_branches", "ring_attention",
)  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = FOLDER / f"{name}.py"
    tree = ast.parse(path.read_text())
    (fault,) = [n.value for n in tree.body if isinstance(n, ast.Assign)
                and getattr(n.targets[0], "id", "") == "FAULT"]  # fmt: skip
    named = set(ast.literal_eval(fault)["parameter"])
    for version in ("right", "wrong"):
        monkeypatch.setenv("CASE", version)
        found = check_parallel(of_file(str(path)))
        assert found is not None
        wrong = {n for n, one in found.parameters.items() if one.kind is not Kind.EQUAL}
        assert bool(found) == (version == "right"), found
        assert wrong == (named if version == "wrong" else set()), found
