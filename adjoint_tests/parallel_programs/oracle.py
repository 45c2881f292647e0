"""Run parallel programs in both versions and hold each against its sequential twin.

    python oracle.py [FILE ...]         the default is every program beside this one
    python oracle.py --seeds 0:50       right programs, drawn by right.py

It is the answer that `linop verify` is compared with, and knows nothing of linop. A version runs in
`WORLD` processes of gloo, which take one step each; every rank also takes the twin's, and compares
loss, gradients, and parameters and buffers after one step of SGD (lr=0.1). Gradients of DTensors
are compared block by block, in the placements of their parameters. The right version has to be
equal; the wrong one has to differ as its FAULT says: on those parameters alone, in that way.

Keys of FAULT beside those of the programs' interface: `place` (modules or source text where one
would look, any of them), `kinds` (parameters of another kind than `kind`), `accept` (kinds that are
as good an answer), `state` (names that differ only after the optimizer's step), `report` (a public
report of the mechanism, or None), `operator` (words of the operator that a report should name, any
of them), `says` (words of its explanation)."""

import argparse
import ast
import glob
import importlib.util
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from itertools import permutations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

HERE = os.path.dirname(os.path.abspath(__file__))
SAME, FAR, LIMIT = 1e-12, 1e-6, 60  # equal; surely different; seconds for a version
NOISE = 1e-14  # of the largest gradient of all: as good as zero (an attention's key bias)
NOT_PROGRAMS = {"oracle.py", "right.py", "score.py"}
CLASSES = ("missing sum over", "no gradient", "gradient of another shard")


def _target(node):
    return node.targets[0] if isinstance(node, ast.Assign) else None


def constants(path):
    """`WORLD` and `FAULT` (or None), read without running the file."""
    with open(path) as file:
        tree = ast.parse(file.read())
    found = {"FAULT": None}
    for node in tree.body:
        name = getattr(_target(node), "id", None)
        if name in ("WORLD", "FAULT"):
            found[name] = ast.literal_eval(node.value)
    return found["WORLD"], found["FAULT"]


def stripped(path):
    """The program's text without its docstring and FAULT: what a checker under test may see."""
    with open(path) as file:
        text = file.read()
    lines, hidden = text.splitlines(keepends=True), set()
    for node in ast.parse(text).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_docstring or getattr(_target(node), "id", None) == "FAULT":
            hidden.update(range(node.lineno - 1, node.end_lineno))
    return "".join("\n" if i in hidden else line for i, line in enumerate(lines))  # same numbers


def kinds(fault, name):
    """The kinds of the closed list that are right answers for the parameter `name`."""
    return [fault.get("kinds", {}).get(name, fault["kind"]), *fault.get("accept", [])]


def lines_of(path, place):
    """The lines of a program that `place` means: those with this text, or all of what it names."""
    text = stripped(path)
    name = re.fullmatch(r"[\w.]+", place)  # then a whole word; a number means modules alone
    pattern = rf"(?<![\w.]){place}(?!\w)|\.{place}(?!\w)" if name else re.escape(place)
    lines = [] if re.fullmatch(r"[\d.]+", place) else text.splitlines()
    found = {i for i, line in enumerate(lines, 1) if re.search(pattern, line)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == place:
            found.update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, ast.stmt) and not hasattr(node, "body"):
            span = range(node.lineno, node.end_lineno + 1)
            found.update(span if found.intersection(span) else ())
    return found


def placed(path, fault, module=None, line=None):
    """Is the place that a report names, a module or a line of the program, one that FAULT has?"""
    if module is not None:
        name = plain(module)
        if any(name == p or name.startswith(p + ".") for p in fault["place"]):
            return True
    return line is not None and any(line in lines_of(path, p) for p in fault["place"])


def load(path):
    spec = importlib.util.spec_from_file_location("case_" + os.path.basename(path)[:-3], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain(name):
    """A parameter's name without the wrappers of DDP and compilation."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


def local(tensor, like=None):
    """The rank's own block; that of a gradient in the placements of its parameter `like`."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    if like is not None and tensor.placements != like.placements:
        tensor = tensor.redistribute(like.device_mesh, like.placements)
    return tensor.detach().to_local().clone()


def cut(case, name, value, held, rank, world):
    """The block of the twin's `value` that the rank should have, where `held` is what it has."""
    if isinstance(held, DTensor):
        block = distribute_tensor(value, held.device_mesh, held.placements, src_data_rank=None)
        return block.to_local().clone()
    if hasattr(case, "shard"):
        value = case.shard(name, value, rank, world)
    return value.detach().clone()


def parallel_step(case, twin, rank, world):
    net = case.model(twin)
    part = case.mine(case.batch(), rank, world) if hasattr(case, "mine") else case.batch()
    if hasattr(case, "step"):
        value = case.step(net, part)
    else:
        x, t = part
        value = case.loss(net(x), t)
        value.backward()
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return net, float(value)


def twins_step(case, net):
    assert all(p.grad is None for p in net.parameters()), "the model shares the twin's tensors"
    x, t = case.batch()
    value = case.loss(net(x), t)
    value.backward()
    return value.item()


def tensors(net):
    yield from net.named_parameters()
    yield from net.named_buffers()


def number(value):
    return value.double() if not value.is_complex() else torch.view_as_real(value).double()


def measure(case, rank, world):
    """This rank's loss, gradients and state, and those that it should have."""
    twin = case.twin()
    net, value = parallel_step(case, twin, rank, world)
    expected_value = twins_step(case, twin)
    full = dict(twin.named_parameters(remove_duplicate=False))
    grads = {}
    for name, p in net.named_parameters():
        q = full[plain(name)]
        wanted = torch.zeros_like(q) if q.grad is None else q.grad
        own = torch.zeros_like(p) if p.grad is None else p.grad
        grads[plain(name)] = (
            number(local(own, p)),
            number(cut(case, plain(name), wanted, p, rank, world)),
            None if p.grad is None else True,
        )
    for module in (net, twin):
        torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1).step()
    full = {**full, **dict(twin.named_buffers(remove_duplicate=False))}
    state = {}
    for name, held in tensors(net):
        if plain(name) in full:
            wanted = cut(case, plain(name), full[plain(name)], held, rank, world)
            state[plain(name)] = distance(number(local(held)), number(wanted))
    return value, expected_value, grads, state, sorted(n for n, _ in twin.named_parameters())


def worker(path, version, rank, world, folder):
    os.environ.update(CASE=version, RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        case = load(path)
        store = "file://" + os.path.join(folder, "store")
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        torch.save(measure(case, rank, world), os.path.join(folder, f"{rank}.pt"))
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def run(path, version, world):
    """Each rank's measures, or "hang" or "error"."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(path, version, rank, world, folder) for rank in range(world)]
        processes = [context.Process(target=worker, args=a) for a in arguments]
        for p in processes:
            p.start()
        end = time.monotonic() + LIMIT
        for p in processes:
            p.join(max(0.1, end - time.monotonic()))
        late = [p for p in processes if p.is_alive()]
        for p in late:
            p.kill()
            p.join()
        if late:
            return "hang"
        if any(p.exitcode for p in processes):
            return "error"
        return [torch.load(os.path.join(folder, f"{r}.pt")) for r in range(world)]


def distance(a, b, floor=0.0):
    """Largest difference, relative to the largest entry of b; none where it is below `floor`."""
    if a.shape != b.shape:
        return float("inf")
    if not a.numel() or (a - b).abs().max() <= floor:
        return 0.0
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-12)).item()


def partitions(ranks):
    """Ways to part the ranks into groups of equal size, two or more each."""
    ranks = list(ranks)
    if len(ranks) == 4:
        a, rest = ranks[0], ranks[1:]
        for b in rest:
            yield [[a, b], [r for r in rest if r != b]]
    yield [ranks]


def ratio(a, b):
    """The c nearest to a = c b, and the distance that is left."""
    c = ((a * b).sum() / (b**2).sum()).item()
    return c, distance(a, c * b)


def summed(grads, expected):
    """A part of the ranks whose gradients sum to a multiple of what each should have."""
    found = None
    for groups in partitions(sorted(grads)):
        if any(len(g) < 2 for g in groups):
            continue
        if any(distance(expected[r], expected[g[0]]) > SAME for g in groups for r in g):
            continue
        fits = [ratio(sum(grads[r] for r in g), expected[g[0]]) for g in groups]
        factors = {round(c, 9) for c, gap in fits if gap <= 1e-10}
        if len(factors) == 1 and all(gap <= 1e-10 for _, gap in fits):
            (c,) = factors
            times = "" if c == 1 else f", times {c:g}"
            one = f"missing sum over {len(groups[0])} ranks", f"groups {groups}{times}"
            if c == 1:
                return one
            found = found or one
    return found


def another(grads, expected):
    """Ranks whose blocks' gradients they hold, where these are others than their own."""
    ranks = sorted(grads)
    for order in permutations(ranks):
        if all(a != b for a, b in zip(ranks, order, strict=True)) and all(
            distance(grads[a], expected[b]) <= SAME for a, b in zip(ranks, order, strict=True)
        ):
            return "gradient of another shard", f"of ranks {list(order)}"
    return None


def classify(grads, expected, given, floor):
    """The class of a parameter's gradients on the ranks, and a detail."""
    ranks = sorted(grads)
    gaps = {r: distance(grads[r], expected[r], floor) for r in ranks}
    if all(gap <= SAME for gap in gaps.values()):
        return "equal", ""
    if max(gaps.values()) < FAR:
        return "blurred", "differs by less than 1e-6"
    if all(not grads[r].any() for r in ranks):
        return "no gradient", "" if any(given.values()) else "None"
    found = another(grads, expected)
    if found:
        return found
    fits = {r: ratio(grads[r], expected[r]) for r in ranks if expected[r].any()}
    if len(fits) == len(ranks) and all(gap <= 1e-10 for _, gap in fits.values()):
        k = {r: c for r, (c, _) in fits.items()}
        if max(k.values()) - min(k.values()) < 1e-9:
            return "factor", f"{k[ranks[0]]:.6g}"
        return "factor per rank", ", ".join(f"{k[r]:.4g}" for r in ranks)
    right = [r for r in ranks if gaps[r] <= SAME]
    return summed(grads, expected) or ("other", f"right on ranks {right}" if right else "")


def compare(results):
    """("equal" or "differs", name -> class and detail, names whose state differs, worst gap)."""
    names = sorted({n for r in results for n in r[2]})
    left_out = set(results[0][4]) - set(names)
    assert not left_out, f"no rank holds {left_out}"
    gap = max(abs(r[0] - r[1]) / max(1.0, abs(r[1])) for r in results)
    loss = "equal" if gap <= SAME else "differs" if gap > FAR else "blurred"
    wanted = [e for r in results for _, e, _ in r[2].values() if e.numel()]
    floor = NOISE * max(e.abs().max().item() for e in wanted)
    table, worst = {}, gap
    for n in names:
        held = {i: r[2][n] for i, r in enumerate(results) if n in r[2]}
        grads, expected, given = ({i: h[j] for i, h in held.items()} for j in range(3))
        table[n] = classify(grads, expected, given, floor)
        worst = max([worst] + [distance(grads[i], expected[i], floor) for i in held])
    state = sorted({n for r in results for n, d in r[3].items() if d > SAME})
    return loss, table, state, worst


def kind_is(kind, found):
    """Could gradients of the class `found` be called `kind`?"""
    name, detail = found
    if kind.startswith("factor "):
        return name == "factor" and abs(float(detail) - float(kind.split()[1])) < 1e-6
    if kind.startswith(CLASSES):
        return name == kind
    return name not in ("equal", "blurred")


def verdict(fault, loss, table, state):
    """Differences of the wrong run from FAULT; empty when there is none."""
    wrong = {n: c for n, c in table.items() if c[0] != "equal"}
    out = []
    if set(wrong) != set(fault["parameter"]):
        out.append(f"parameters {sorted(wrong)}")
    if loss != fault["loss"]:
        out.append(f"loss {loss}")
    out += [f"{n} is {c}" for n, c in wrong.items() if not kind_is(kinds(fault, n)[0], c)]
    if wrong and not fault.get("accept") and not fault["kind"].startswith(("factor ", *CLASSES)):
        if all(c[0] != "other" for n, c in wrong.items() if n not in fault.get("kinds", {})):
            out.append("no parameter of class other")
    if set(state) != set(fault["parameter"]) | set(fault.get("state", ())):
        out.append(f"state {state}")
    missing = [k for k in ("factor", "note", "place") if k not in fault]
    return out + [f"no key {k}" for k in missing]


def judge(path, version, world, fault, quiet=False):
    """Print a version's line; True where it is as it should be."""
    label, begin = os.path.basename(path)[:-3], time.monotonic()
    results = run(os.path.abspath(path), version, world)
    took = f"{time.monotonic() - begin:4.1f} s"
    if isinstance(results, str):
        print(f"{label:26} {version:5} {took} {results.upper()}", flush=True)
        return False
    loss, table, state, worst = compare(results)
    if version == "right":
        fails = [n for n, c in table.items() if c[0] != "equal"] + state
        fails += ["loss"] if loss != "equal" else []
        says = f"FAILS {fails}" if fails else "ok"
        size = f"{world} ranks, {len(table)} parameters, worst {worst:.1e}"
        print(f"{label:26} right {took} {says} ({size})", flush=True)
        return not fails
    fails = verdict(fault, loss, table, state)
    says = f"NOT AS FAULT SAYS {fails}" if fails else "as FAULT says"
    print(f"{label:26} wrong {took} {says}; loss {loss}; {fault['kind']}", flush=True)
    for n, (c, detail) in table.items():
        if not quiet and c != "equal":
            print(f"    {n:34} {c} {detail}")
    return not fails


def drawn(seeds, folder):
    """Files of right programs of these seeds, in `folder`."""
    right = load(os.path.join(HERE, "right.py"))
    for seed in seeds:
        path = os.path.join(folder, f"right_{seed:03d}.py")
        with open(path, "w") as file:
            file.write(right.program(seed))
        yield path


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="*")
    parser.add_argument("--seeds", help="first:end of the right programs to draw")
    parser.add_argument("--quiet", action="store_true", help="a line for a version, no more")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        paths = options.files
        if options.seeds:
            paths = paths + list(drawn(range(*map(int, options.seeds.split(":"))), folder))
        if not paths:
            here = sorted(glob.glob(os.path.join(HERE, "*.py")))
            paths = [p for p in here if os.path.basename(p) not in NOT_PROGRAMS]
        bad = 0
        for path in paths:
            world, fault = constants(path)
            for version in ("right", "wrong") if fault else ("right",):
                bad += not judge(path, version, world, fault, options.quiet)
    print(f"{len(paths)} programs, {bad} versions not as they should be")
    return bool(bad or not paths)


if __name__ == "__main__":
    sys.exit(main())
