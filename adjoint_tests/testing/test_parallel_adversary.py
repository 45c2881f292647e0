"""Parallel programs whose faults were named wrongly once: each of another mechanism."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import linop.layers  # noqa: F401  # it guards functions of torch: its lines are no place
from linop.testing import check_parallel
from linop.testing.parallel.recording.programs import of_file, world_of
from linop.testing.parallel.twins.relations import Kind

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parents[1] / "parallel_programs"


def found(name: str, version: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CASE", version)
    path = str(FOLDER / f"{name}.py")
    return check_parallel(of_file(path), workers=world_of(path))


@pytest.mark.parametrize(
    ("name", "kind", "place", "said"),
    [
        # A scaling before the sum, of another number on each rank.
        ("clip_before_mean", Kind.OTHER, "clip_grad_norm_", "before they are summed"),
        # `apply` was taken before anything was recorded.
        ("taken_apply", Kind.UNSUMMED, "gathered(self.out(h", "The input of out is replicated"),
        # Two sums over one axis of a mesh, none over the other.
        ("summed_twice", Kind.WRONG_RANKS, "GROUPS[second]", "over ranks 0, 1 and 2, 3 twice"),
        # A broadcast is a message, too, and its detach no fault.
        ("heads_of_ranks", Kind.OTHER, "dist.recv(grad", "rank 1 and rank 2 compute"),
        # Functional collectives: their backward, one that is too many, a result that is dropped,
        # and a broadcast, which autograd takes for the identity.
        ("functional_gather", Kind.OTHER, "Gather.apply", "Forward: all-gather over ranks 0, 1"),
        ("functional_again", Kind.FACTOR, "funcol.all_reduce", "its adjoint is the identity"),
        ("functional_dropped", Kind.UNSUMMED, "funcol.all_reduce(norm", "leaves its argument"),
        ("functional_broadcast", Kind.OTHER, "funcol.broadcast", "gives each rank a copy"),
        # Placements of DTensors, of tensors and of gradients.
        ("dtensor_terms", Kind.OTHER, "from_local(super().hidden", "hold terms of a sum here"),
        ("dtensor_input_terms", Kind.UNSUMMED, "from_local(x", "is told to leave them"),
        ("dtensor_mesh_terms", Kind.WRONG_RANKS, "p.to_local", "instead of ranks 0, 2 and 1, 3"),
        ("dtensor_shared_expert", Kind.OTHER, "from_local(h", "has summed them already"),
        # A local function, run alone.
        ("function_norm", Kind.OTHER, "Fused.apply", "not the adjoint of its derivative"),
        # A sum of a copy in a backward; nothing else is accused.
        ("overlap_copy", Kind.UNSUMMED, "LinearAsync.apply", "it is of a copy"),
        # Gradients in flat buckets, of which one is not divided.
        ("bucket_scale", Kind.FACTOR, "part /= WORLD", "goes through this line"),
        # Data parallelism of torch: what is no unit, hooks, switches, divisors.
        ("fsdp_root", Kind.UNSUMMED, "self.emb(ids)", "their sum times 1/2"),
        ("ddp_hook_sum", Kind.FACTOR, "dist.all_reduce(buf", "3 = the number of ranks"),
        ("hsdp_switched_off", Kind.NONE, "set_requires_all_reduce", "that this line switches off"),
        ("fsdp_divide_factor", Kind.FACTOR, "set_gradient_divide_factor", "All gradients are 2"),
        # A sum of a forward pass over those that have other tokens.
        ("norm_group", Kind.WRONG_RANKS, "var = Red.apply", "instead of ranks 0, 1 and 2, 3"),
        ("halo_overwrites", Kind.OTHER, "Halo.apply", "has to be added to them"),
        # A mean of which the loss is no linear function.
        ("penalty_mean", Kind.STATISTICS, "g.norm(dim=1).mean()", "no linear function of it"),
        # What a program does with gradients that it takes away.
        ("zero_divided", Kind.FACTOR, "part /= world", "one over the number of ranks"),
        ("main_grad_lost", Kind.OTHER, "module 0", "only that of pass 2 is in it"),
        # Two functions at the ends of one message.
        ("interleaved_halved", Kind.FACTOR, "Recv.apply", "message from rank 1 to rank 0"),
        # A result that nothing uses, the last state, is no place at which forward passes part.
        ("states_padded", Kind.FACTOR, "loss(model(ids), tags)", "7/13 on rank 0"),
    ],
)
def test_a_fault(
    name: str, kind: Kind, place: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = found(name, "wrong", monkeypatch)
    first = report.findings[0]
    assert first.kind is kind, report
    assert place in str(first.place), report
    assert said in f"{first.detail} {first.explanation}", report


def test_what_follows_from_a_fault_behind_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a function that is run again have no gradients that are seen; those of its result
    tell that its parameters' follow from the fault before it."""
    first, then = found("checkpoint_reentrant", "wrong", monkeypatch).findings
    assert first.parameters == ("layers.1.norm.weight", "layers.1.norm.bias")
    assert "layers.0.up.weight" in then.parameters and "inp.weight" in then.parameters
    assert "come through the place of fault 1" in then.explanation


def test_pairs_are_judged_by_gradients_not_by_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    report = found("sync_buffers", "wrong", monkeypatch)
    assert not report and report.buffers == ("bn.running_mean", "bn.running_var")
    assert report.pairs and all(one.proven for one in report.pairs)


@pytest.mark.parametrize(
    "name", ["taken_apply", "summed_twice", "functional_broadcast", "dtensor_mesh_terms",
             "function_surrogate"])  # fmt: skip
def test_a_right_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = found(name, "right", monkeypatch)
    assert report, report
