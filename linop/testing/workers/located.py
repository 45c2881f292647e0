"""Pickling of test functions (by file and name) and of their arguments, for other processes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from linop import backends
from linop.backends.engine.base import Backend
from linop.errors import ArgumentError

OWN = ("backend", "comm")
"""Parameters of a test whose arguments each rank supplies itself."""
MARK = "linop_spmd"
"""Attribute of a decorated function with its `linop.testing.workers.spmd.Property`; also the name
of pytest's marker."""


class Located:
    """A picklable reference to a function at the top level of a module.

    pytest's import mode `importlib` gives modules names by which other processes cannot import
    them, and the module's attribute is the decorated function. So this pickles as file, module and
    name, and unpickling imports the module.

    Raises:
        ArgumentError: the function is local, a lambda, or a method.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = function.__name__
        if "." in function.__qualname__ or self.name == "<lambda>":
            raise ArgumentError(
                f"spmd: ranks find a test by its file and name, so it is a function of a module's "
                f"top level; given {function.__qualname__} of {function.__module__}"
            )
        parameters = inspect.signature(function).parameters
        self.own = [name for name in OWN if name in parameters]

    def __reduce__(self) -> tuple[Any, ...]:
        module = self.function.__module__
        return _located, (sys.modules[module].__file__, module, self.name)

    def __call__(self, comm: Any, arguments: Mapping[str, Any]) -> None:
        """Run the function on the backend "mpi" of a communicator."""
        self.on(backends.get("mpi", comm=comm), comm, arguments)

    def on(self, backend: Backend, comm: Any, arguments: Mapping[str, Any]) -> None:
        """Run the function with a backend, which is the current one meanwhile.

        Args:
            comm: the communicator; None on threads.
        """
        own = {"backend": backend, "comm": comm}
        with backends.use(backend):
            self.function(**arguments, **{name: own[name] for name in self.own})


def _located(file: str, module: str, name: str) -> Located:
    located: Located = getattr(getattr(_module(file, module), name), MARK).located
    return located


def _module(file: str, name: str) -> ModuleType:
    """The module of that name: already loaded, imported, or loaded from the file under the name."""
    loaded = sys.modules.get(name)
    if loaded is None:
        try:
            spec = importlib.util.find_spec(name)
        except ImportError:
            spec = None
        if spec is not None and spec.origin and Path(spec.origin).samefile(file):
            return importlib.import_module(name)
        loaded = _from_file(file, name)
    return loaded


def _from_file(file: str, name: str) -> ModuleType:
    for k in range(name.count(".")):
        parent = name.rsplit(".", k + 1)[0]
        sys.modules.setdefault(parent, ModuleType(parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def pickled(test: str, arguments: Mapping[str, Any]) -> bytes:
    """Arguments of a test, pickled for other processes.

    Raises:
        ArgumentError: one cannot be pickled; the message names it.
    """
    wrong = {name: why for name, value in arguments.items() if (why := _unpicklable(value))}
    if wrong:
        raise ArgumentError(
            f"{test}: no rank can be sent what cannot be pickled: "
            f"{'; '.join(f'the argument {name!r} ({why})' for name, why in wrong.items())}. "
            f"Draw a small description, and build the rest from it on every rank."
        )
    return pickle.dumps(dict(arguments))


def _unpicklable(value: Any) -> str:
    try:
        pickle.dumps(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
