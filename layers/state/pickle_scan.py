"""Pickles of checkpoints, looked through before anybody loads them: no object is made.

An abstract machine follows a pickle's instructions with *nodes* instead of objects: each knows how
many objects it would have, counted as often as they occur in it, and how deep they are nested. So a
pickle is refused that is small, and takes for ever to hash, to look up, to print or to copy; that
has a cycle; that refers to a class or function outside of an allow-list; or that is nested too
deeply.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Sequence
from typing import IO, Any

from linop.errors import BackendError
from linop.layers.state.limits import Limits

_EXPANDED = 16
"""Objects, counted as often as they occur, for each instruction of a pickle: the most."""
_FEW = 10_000
"""Objects that any pickle may have."""
_HASHED = 4096
"""Objects in a tuple, which may be hashed: the most."""
_KEYS = 1024
"""Keys of dicts, and elements of sets, whose hashes the pickle's author could choose: the most. If
all are one, each is compared with all before it."""
_LONG = 2**60
"""Numbers from this on may have the hash of another."""
_HASHING = ("collections ", "builtins set", "__builtin__ set")
"""Begins of the names of classes whose arguments are keys, or pairs of a key and a value."""
_LARGEST = 2**62
_OFTEN = 4096
"""Instructions between looks at the time, and at the memory that nodes take."""
_NODE = 32
"""Bytes that count for each instruction, as if they were read."""
_BY_NUMBER = (
    "builtins bytearray",
    "__builtin__ bytearray",
    "torch Tensor",
    "torch.nn.parameter Parameter",
)
"""Classes that make as much as a number says; and storages."""


class Node:
    """An object that a pickle would make.

    Attributes:
        name: of a class or function, as ``module name``; empty for another object.
        hashed: objects in it that its hash visits, counted as often as they occur.
    """

    __slots__ = ("hashed", "inner", "name", "value")

    def __init__(self, inner: Sequence[Node] = (), name: str = "", value: Any = None) -> None:
        self.inner = inner
        self.name = name
        self.value = value
        self.hashed = 1

    def take(self, more: list[Node]) -> None:
        """Put other objects into it."""
        if not isinstance(self.inner, list):
            self.inner = [*self.inner]
        self.inner.extend(more)


_MARK = Node()


class Scan:
    """One pickle, of which the root is scanned.

    Args:
        file: read from its position to the pickle's end.
        allowed: True for a class or function, by module and name, that it may refer to.
        limits: of all that is read.

    Attributes:
        root: of the objects.
        stored: arguments of persistent identifiers: the tensors' storages.

    Raises:
        BackendError: the pickle is refused.
    """

    def __init__(
        self, file: IO[bytes], allowed: Callable[[str, str], bool], limits: Limits
    ) -> None:
        self._allowed = allowed
        self._limits = limits
        self._stack: list[Node] = []
        self._memo: dict[int, Node] = {}
        self.stored: list[Node] = []
        self._count = 0
        self._keys = 0
        for opcode, argument, _ in pickletools.genops(file):
            self._count += 1
            if self._count % _OFTEN == 0:
                limits.check_time()
                limits.take(_NODE * _OFTEN, "a look through its objects")
            self._step(opcode, argument)
        self.root = self._pop()
        self._check_whole()

    def _step(self, opcode: Any, argument: Any) -> None:
        name = opcode.name
        if name in _CONSTANTS:
            self._push(Node(value=argument))
        elif name in _IGNORED:
            pass
        elif (work := _STEPS.get(name)) is not None:
            work(self, argument)
        else:
            raise BackendError(f"its instruction {name} is refused")

    # The stack

    def _push(self, node: Node) -> None:
        self._stack.append(node)

    def _pop(self) -> Node:
        if not self._stack:
            raise BackendError("its instructions take what is not there")
        return self._stack.pop()

    def _top(self) -> Node:
        if not self._stack or self._stack[-1] is _MARK:
            raise BackendError("its instructions take what is not there")
        return self._stack[-1]

    def _marked(self) -> list[Node]:
        """All from the last mark on."""
        found: list[Node] = []
        while (node := self._pop()) is not _MARK:
            found.append(node)
        return found[::-1]

    def _several(self, count: int) -> list[Node]:
        return [self._pop() for _ in range(count)][::-1]

    def _drop(self, nodes: list[Node]) -> None:
        """Nothing to do: they are off the stack."""

    # Instructions

    def _tuple(self, inner: list[Node]) -> None:
        node = Node(inner)
        node.hashed = 1 + sum(one.hashed for one in inner)
        if node.hashed > _HASHED:
            raise BackendError(
                f"it has a tuple of more than {_HASHED} objects within each other, which could "
                f"take for ever to hash"
            )
        self._push(node)

    def _container(self) -> None:
        self._push(Node([]))

    def _put_in(self, inner: list[Node]) -> None:
        self._top().take(inner)

    def _keyed(self, pairs: list[Node]) -> list[Node]:
        self._hash(pairs[::2])
        return pairs

    def _hash(self, keys: Sequence[Node]) -> Sequence[Node]:
        """Count keys whose hashes the author of the pickle could choose: those of a text, drawn by
        each process, and of a short number, itself, are none.

        Raises:
            BackendError: together with those before they are too many.
        """
        self._keys += sum(
            bool(key.inner or key.name) or (isinstance(key.value, int) and abs(key.value) >= _LONG)
            for key in keys
        )
        if self._keys > _KEYS:
            raise BackendError(
                f"it has more than {_KEYS} keys that are neither texts nor numbers below 2**60, "
                f"which could take for ever to look up"
            )
        return keys

    def _global(self, module: str, name: str) -> None:
        if not self._allowed(module, name):
            raise BackendError(f"it refers to {module}.{name}, which is refused: it could be code")
        self._push(Node(name=f"{module} {name}"))

    def _stack_global(self) -> None:
        module, name = self._several(2)
        self._global(str(module.value), str(name.value))

    def _call(self) -> None:
        function, arguments = self._several(2)
        made = Node([arguments])
        made.hashed = arguments.hashed  # as of torch.Size, or a frozen data class
        _check_call(function.name, arguments)
        if function.name.startswith(_HASHING):
            for one in arguments.inner:
                pairs = function.name.endswith("Dict")
                self._hash(
                    [pair.inner[0] for pair in one.inner if pair.inner] if pairs else one.inner
                )
        self._push(made)

    def _build(self) -> None:
        state = self._pop()
        self._top().take([state])

    def _persistent(self) -> None:
        identifier = self._pop()
        self.stored.append(identifier)
        self._push(Node([identifier]))

    def _remember(self, number: int | None) -> None:
        self._memo[len(self._memo) if number is None else number] = self._top()

    def _recall(self, number: int) -> None:
        if number not in self._memo:
            raise BackendError("its instructions take what is not there")
        self._push(self._memo[number])

    # All together

    def _check_whole(self) -> None:
        """Check depth and expanded size, without recursion."""
        most = _EXPANDED * self._count + _FEW
        sizes: dict[int, tuple[int, int]] = {}
        open_: set[int] = set()
        stack = [self.root]
        while stack:
            node = stack[-1]
            if id(node) in sizes:
                stack.pop()
                continue
            open_.add(id(node))
            left = [one for one in node.inner if id(one) not in sizes]
            if any(id(one) in open_ for one in left):
                raise BackendError("an object in it contains itself")
            if left:
                stack += left
                continue
            stack.pop()
            open_.discard(id(node))
            known = [sizes[id(one)] for one in node.inner]
            size = min(1 + sum(size for size, _ in known), _LARGEST)
            depth = 1 + max((depth for _, depth in known), default=0)
            if depth > self._limits.depth:
                raise BackendError(
                    f"its objects are nested more than {self._limits.depth} levels deep "
                    f"({self._limits.depth_from})"
                )
            sizes[id(node)] = size, depth
        if sizes[id(self.root)][0] > most:
            raise BackendError(
                "its objects occur in each other so often that they could not be printed or copied"
            )


def _check_call(name: str, arguments: Node) -> None:
    """Refuse calls whose results are larger than their arguments."""
    inner = arguments.inner
    if (name in _BY_NUMBER or name.endswith("Storage")) and any(
        isinstance(one.value, int) for one in inner
    ):
        raise BackendError(f"it makes a {name.split()[1]} of a number, which is refused")
    if name == "torch._tensor _rebuild_from_type_v2" and len(inner) > 2:
        _check_call(inner[0].name, inner[2])  # which it calls
    if name == "_codecs encode" and not (len(inner) == 2 and inner[1].value == "latin1"):
        raise BackendError("it encodes a text otherwise than as latin1, which is refused")


_CONSTANTS = frozenset(
    "NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING "
    "BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES "
    "SHORT_BINBYTES BINBYTES8".split()
)
_IGNORED = frozenset(("PROTO", "FRAME", "STOP"))
_STEPS: dict[str, Callable[[Scan, Any], None]] = {
    "MARK": lambda scan, _: scan._push(_MARK),
    "POP": lambda scan, _: scan._drop(scan._several(1)),
    "POP_MARK": lambda scan, _: scan._drop(scan._marked()),
    "DUP": lambda scan, _: scan._push(scan._top()),
    "EMPTY_TUPLE": lambda scan, _: scan._tuple([]),
    "TUPLE1": lambda scan, _: scan._tuple(scan._several(1)),
    "TUPLE2": lambda scan, _: scan._tuple(scan._several(2)),
    "TUPLE3": lambda scan, _: scan._tuple(scan._several(3)),
    "TUPLE": lambda scan, _: scan._tuple(scan._marked()),
    "FROZENSET": lambda scan, _: scan._tuple([*scan._hash(scan._marked())]),
    "LIST": lambda scan, _: scan._push(Node(scan._marked())),
    "DICT": lambda scan, _: scan._push(Node(scan._keyed(scan._marked()))),
    "EMPTY_LIST": lambda scan, _: scan._container(),
    "EMPTY_DICT": lambda scan, _: scan._container(),
    "EMPTY_SET": lambda scan, _: scan._container(),
    "APPEND": lambda scan, _: scan._put_in(scan._several(1)),
    "APPENDS": lambda scan, _: scan._put_in(scan._marked()),
    "ADDITEMS": lambda scan, _: scan._put_in([*scan._hash(scan._marked())]),
    "SETITEM": lambda scan, _: scan._put_in(scan._keyed(scan._several(2))),
    "SETITEMS": lambda scan, _: scan._put_in(scan._keyed(scan._marked())),
    "GLOBAL": lambda scan, names: scan._global(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda scan, _: scan._stack_global(),
    "REDUCE": lambda scan, _: scan._call(),
    "NEWOBJ": lambda scan, _: scan._call(),
    "BUILD": lambda scan, _: scan._build(),
    "BINPERSID": lambda scan, _: scan._persistent(),
    "PUT": lambda scan, number: scan._remember(number),
    "BINPUT": lambda scan, number: scan._remember(number),
    "LONG_BINPUT": lambda scan, number: scan._remember(number),
    "MEMOIZE": lambda scan, _: scan._remember(None),
    "GET": lambda scan, number: scan._recall(number),
    "BINGET": lambda scan, number: scan._recall(number),
    "LONG_BINGET": lambda scan, number: scan._recall(number),
}
