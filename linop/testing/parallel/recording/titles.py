"""Names of `autograd.Function`s, as a program's author knows them."""

from __future__ import annotations

OF_DTENSOR = {
    "_FromTorchTensor": "DTensor.from_local",
    "_ToTorchTensor": "DTensor.to_local",
    "Redistribute": "DTensor.redistribute",
}
"""Functions of DTensor by their classes."""
OF_TORCH = {
    "BackwardHookFunction", "RegisterPostBackwardFunction", "_DDPSink", "CheckpointFunction",
    "_NoopSaveInputs", "NestedRedistribute", *OF_DTENSOR.values(),
}  # fmt: skip
"""Functions of torch's own strategies."""
_GENERATED = "GeneratedBackwardFor_"
_FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd")


def title(name: str) -> str:
    """The name of a class, of a method of DTensor or of a functional collective that has it."""
    if name.startswith(_GENERATED):
        kept = name.removeprefix(_GENERATED).removesuffix("_default")
        for space in reversed(_FUNCTIONAL):
            if kept.startswith(f"{space}_"):
                return f"functional {kept.removeprefix(f'{space}_')}"
        return kept
    return OF_DTENSOR.get(name, name)


def is_of_torch(called: str) -> bool:
    """True if a title is that of a function of torch."""
    return called in OF_TORCH or called.startswith("functional ")
