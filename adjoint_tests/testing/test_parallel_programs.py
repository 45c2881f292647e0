"""The corpus of parallel programs is as its oracle says, and the oracle refuses what is not so.

A few programs are run here; `python adjoint_tests/parallel_programs/oracle.py` runs all of them."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "parallel_programs"
PROGRAMS = sorted(
    p for p in FOLDER.glob("*.py") if p.name not in ("oracle.py", "right.py", "score.py")
)

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"parallel_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "oracle.py"), "--quiet", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_every_fault_is_described() -> None:
    oracle = module("oracle")
    assert len(PROGRAMS) >= 50
    for path in PROGRAMS:
        _, fault = oracle.constants(path)
        assert {"parameter", "kind", "factor", "loss", "note", "place", "report"} <= set(fault)
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring and "CASE" not in docstring, path
        left = oracle.stripped(path)
        assert "FAULT" not in left and docstring not in left, path


def test_places_are_modules_or_lines() -> None:
    oracle = module("oracle")
    for path in PROGRAMS:
        _, fault = oracle.constants(path)
        assert any(oracle.lines_of(path, place) for place in fault["place"]), path
        assert not oracle.placed(path, fault, module="nowhere", line=1)
    path = FOLDER / "gpt_qkv.py"
    _, fault = oracle.constants(path)
    assert oracle.placed(path, fault, module="module.attn.c_attn")
    assert not oracle.placed(path, fault, module="c_fc")


def test_some_programs_are_as_they_say() -> None:
    files = [FOLDER / f"{name}.py" for name in ("lora_sequence", "fsdp_ignored", "codebook")]
    done = run(*files, "--seeds", "8:9")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 programs, 0 versions not as they should be" in done.stdout


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("missing sum over 2 ranks", "factor 2", "is ('missing sum over 2 ranks'"),
        ("p.sequence_parallel = not WRONG", "p.sequence_parallel = False", "FAILS"),
    ],
)
def test_another_fault_is_refused(tmp_path: Path, before: str, after: str, said: str) -> None:
    text = (FOLDER / "lora_sequence.py").read_text()
    assert before in text
    changed = tmp_path / "changed.py"
    changed.write_text(text.replace(before, after, 1))
    done = run(changed)
    assert done.returncode == 1 and said in done.stdout, done.stdout + done.stderr


def test_the_same_seed_draws_the_same_program() -> None:
    right = module("right")
    again = module("right")
    texts = [right.program(seed) for seed in range(2 * len(right.STRATEGIES))]
    assert texts == [again.program(seed) for seed in range(len(texts))]
    assert len(set(texts)) == len(texts)
    for text in texts:
        assert "FAULT" not in text and "CASE" not in text
        compile(text, "drawn", "exec")
