"""Checkpoints that are damaged, crafted, or killed while they are written. Needs torch.

Ranks import this module, and no test. As a script it is a process that has imported what is needed,
and forks for every save that is to be killed.
"""

from __future__ import annotations

import os
import pickle
import random
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from linop import LinopError, Partition, launch, layers
from linop.layers.agreement.input_agreement import agreement_of

BIG = 1 << 18
"""Elements of a weight that is too big for the disk."""


def linear(columns: int = 8) -> Any:
    """A linear layer, with its weight cut in two along its columns."""
    one = Partition((1, 1))
    return layers.Linear(one, columns, 2, P_W=Partition((1, 2))).double()


def filled(value: float, columns: int = 8) -> Any:
    model = linear(columns)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def adam(model: Any, value: float) -> Any:
    """With a state of that value."""
    optimizer = torch.optim.Adam([{"params": list(model.parameters())}], lr=value)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    return optimizer


def value_of(model: Any) -> float:
    """The one value of all elements; NaN where there are several."""
    state = layers.gather_state(model)
    assert state is not None
    values = np.unique(np.concatenate([np.asarray(whole).ravel() for whole in state.values()]))
    return float(values[0]) if len(values) == 1 else float("nan")


def value_in(path: str | Path, columns: int = 8) -> float:
    """The one value in a checkpoint, read by two workers."""

    def main(_: Any) -> float:
        model = filled(-1, columns)
        layers.load(model, path)
        return value_of(model)

    first, second = launch(main, 2)
    assert first == second
    return first


def save_value(path: str | Path, value: float, sharded: bool, columns: int = 8) -> None:
    launch(lambda _: layers.save(filled(value, columns), path, sharded=sharded), 2)


def loads_or_refuses(path: str | Path, value: float, optimizer: bool = False) -> str:
    """Load on two workers: what is in it, exactly; or one error for both, and nothing changed."""

    def main(_: Any) -> str:
        model = filled(-1)
        given = adam(model, 0.5) if optimizer else None
        model = filled_again(model, -1)
        before = None if given is None else repr((given.state, given.param_groups))
        try:
            layers.load(model, path, given)
        except LinopError as error:
            assert value_of(model) == -1
            assert given is None or repr((given.state, given.param_groups)) == before
            return str(error)
        assert value_of(model) == value
        return ""

    first, second = launch(main, 2)
    assert first == second
    return first


def filled_again(model: Any, value: float) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def files_of(path: Path) -> list[Path]:
    """The files of a checkpoint."""
    return sorted(path.iterdir()) if path.is_dir() else [path]


def torch_alone(path: Path, **more: Any) -> None:
    """A folder that torch writes without linop, of the value 3."""
    state = {key: torch.full_like(x, 3) for key, x in twin().state_dict().items()}
    import torch.distributed.checkpoint as dcp  # takes a second, and ranks have no need of it

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = {"model": state, **more} if more else state
        dcp.save(whole, checkpoint_id=path, no_dist=True)


def twin() -> Any:
    return torch.nn.Linear(8, 2).double()


def edited(path: Path, change: Callable[[Any], Any]) -> None:
    """Change torch's index in a folder."""
    index = pickle.loads((path / ".metadata").read_bytes())
    changed = change(index)
    (path / ".metadata").write_bytes(pickle.dumps(index if changed is None else changed))


def saves(backend: Any, path: str, value: float, sharded: bool, columns: int = 8) -> None:
    layers.save(filled(value, columns), path, sharded=sharded)


def has(backend: Any, path: str, *values: float, columns: int = 8) -> None:
    model = filled(-1, columns)
    layers.load(model, path)
    assert value_of(model) in values


def refuses(backend: Any, path: str, words: str) -> None:
    """The same error on all, and the model as it was."""
    model = filled(-1)
    try:
        layers.load(model, path)
    except LinopError as error:
        assert words in str(error), error
        assert len(set(agreement_of(backend).gather_objects(str(error)))) == 1
    else:
        raise AssertionError("it was loaded")
    assert value_of(model) == -1


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Files of this process cannot grow beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fails_on_a_full_disk(backend: Any, path: str, sharded: bool, worker: int) -> None:
    """One worker alone has no room."""
    model = filled(2, BIG)
    layers.gather_state(model, 0)  # shared memory is a file, too
    size = BIG if backend.worker == worker else resource.RLIM_INFINITY
    with full_disk(size):
        said = ""
        try:
            layers.save(model, path, sharded=sharded)
        except LinopError as error:
            said = str(error)
    assert f"on worker {worker}" in said, said
    assert len(set(agreement_of(backend).gather_objects(said))) == 1


def dies(backend: Any, path: str, value: float, sharded: bool, worker: int, at: int) -> None:
    """One rank is killed in a save."""
    model = filled(value)
    if backend.worker == worker:
        die_at(at, os.path.dirname(path))
    layers.save(model, path, sharded=sharded)


# Killed

_TOUCHES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")


def die_at(event: int, folder: str) -> None:
    """From now on, be killed before that file of a folder is touched, counted from 0."""
    count = 0

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if name in _TOUCHES and str(arguments[0]).startswith(folder):
            if count == event:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    sys.addaudithook(hook)


def begun(work: Callable[[], Any]) -> int:
    """A child that does something."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return child


def ended(child: int) -> int:
    """How a child ended."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def forked(work: Callable[[], Any], kill_after: float | None = None) -> int:
    """Do something in a child; how that ended."""
    child = begun(work)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return ended(child)


_FOUND = 2
"""Added to a value that is an exit status, where 1 is an error."""


def survives(sharded: bool, columns: int, kills: int | None) -> int:
    """Kill saves: before each time that they touch a file, or so many at random times. The old
    checkpoint or the new one is there, whole, each time. How many were killed."""
    noise = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/checkpoint"
        begun = time.monotonic()
        assert forked(lambda: save_value(path, 0, sharded, columns)) == 0
        usual = time.monotonic() - begun
        killed, old, trial = 0, 0, 0
        while kills is None or killed < kills:
            new = 1 + trial % 100  # exit statuses are below 256

            def save(at: int = trial, value: float = new) -> None:
                if kills is None:
                    die_at(at, folder)
                save_value(path, value, sharded, columns)

            status = forked(save, None if kills is None else noise.uniform(0, usual))
            assert status in (0, -signal.SIGKILL)
            found = forked(lambda: os._exit(_FOUND + int(value_in(path, columns)))) - _FOUND
            expected = (old, new) if status else (new,)
            assert found in expected, f"save {trial}: {found}, {expected} expected"
            killed += status != 0
            usual *= 1.2 if status else 0.6  # one slow save would make most kills come too late
            trial, old = trial + 1, found
            if kills is None and status == 0:
                break
        assert forked(lambda: save_value(path, -2, sharded, columns)) == 0
        # What killed saves have left is gone.
        left = sorted(os.listdir(path if sharded else folder))
        assert len(left) == (3 if sharded else 1), left
    return killed


if __name__ == "__main__":
    # Once, in place of seconds in each child that saves.
    import torch._dynamo
    import torch.distributed.checkpoint

    torch.set_num_threads(1)

    columns, kills = (None if text == "all" else int(text) for text in sys.argv[1:])
    assert columns is not None
    for sharded in (False, True):
        print(survives(sharded, columns, kills))
