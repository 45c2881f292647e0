"""Faults to plant in copies of the tree, as data; `mutate` plants them and says who notices.

Each is a mistake that somebody could make. Which tests are to notice it is part of the data: they
are tests of the suite, none was written for a fault.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A change of one place in one file."""

    name: str
    says: str
    """What is wrong, in words."""
    file: str
    """From the tree's root."""
    before: str
    """The text that is replaced; the file has it once."""
    after: str
    tests: tuple[str, ...]
    """What is to notice it: files of adjoint_tests, or tests in them, in the order in which they
    run."""

    def planted(self, text: str) -> str:
        """The file's text with the fault in it.

        Raises:
            ValueError: the text that is replaced is not there, or there more than once.
        """
        count = text.count(self.before)
        if count != 1:
            raise ValueError(
                f"{self.name}: {self.file} has the text {self.before!r} {count} times; once "
                f"expected: mend the fault in adjoint_tests/mutations_*.py"
            )
        return text.replace(self.before, self.after)


def every() -> tuple[Fault, ...]:
    """All faults, from the ground floor to the top.

    Raises:
        ValueError: two have one name.
    """
    from mutations_algebra import ALGEBRA
    from mutations_device import DEVICE
    from mutations_layers import LAYERS
    from mutations_memories import MEMORIES
    from mutations_running import RUNNING
    from mutations_tensors import TENSORS
    from mutations_testing import TESTING

    faults = (*ALGEBRA, *MEMORIES, *TENSORS, *RUNNING, *DEVICE, *LAYERS, *TESTING)
    names = [fault.name for fault in faults]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two faults of one name: {', '.join(twice)}")
    return faults
