"""Parameters of a pipeline's stages, and the state of all of the model: read, written, saved and
loaded in the form of the sequential model."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from linop.backends import Backend
from linop.layers.agreement.input_agreement import InputAgreement
from linop.strategies.pipelines.model import stage_states
from linop.strategies.pipelines.model.checkpoints import Checkpoints
from linop.strategies.pipelines.side_by_side import SideBySide

Own = TypeVar("Own", bound="Stored")


class Stored:
    """Base of `linop.strategies.Pipeline`.

    Attributes:
        stages: this worker's modules, by index.
        optimizer: this worker's, or None.
    """

    backend: Backend
    stages: dict[int, Any]
    optimizer: Any
    _agreement: InputAgreement
    _across: SideBySide
    _own: Mapping[int, stage_states.Own]
    _ties: Sequence[Sequence[str]]

    def parameters(self) -> Iterator[Tensor]:
        """This worker's parameters."""
        for module in self.stages.values():
            yield from module.parameters()

    def train(self: Own, mode: bool = True) -> Own:
        """Set the mode of this worker's modules."""
        for module in self.stages.values():
            module.train(mode)
        return self

    def eval(self: Own) -> Own:
        """As ``train(False)``."""
        return self.train(False)

    def state_dict(self) -> OrderedDict[str, Tensor]:
        """The state of the sequential model, on every worker, in new tensors. Collective. Its keys
        are those of the module that `linop.strategies.split` cut, or of a Sequential of the stages.

        Raises:
            ArgumentError: a value is no tensor. BackendError: workers of a stage differ in what
                each holds whole. On every worker.
        """
        with self._across.agreed("state_dict"):
            pass
        return stage_states.gathered(self.backend, self._agreement, self._own)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the state of the sequential model, which every worker has. Collective.

        Raises:
            ArgumentError, ShapeError: names or shapes differ; on every worker, and nothing is
                loaded.
        """
        with self._across.agreed("load_state_dict"):
            stage_states.check(self._agreement, self._own, state)
        stage_states.load(self._agreement, self._own, state)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the state of the sequential model, and of its optimizer if there is one, in a file
        that `linop.layers.load` and pipelines on other workers load. Collective.

        Raises:
            LinopError: the file cannot be written, or the optimizer keeps what could not be loaded;
                on every worker. An earlier file stays.
        """
        self._checkpoints().save(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load what `save`, or `linop.layers.save` of the sequential model, has saved; worker 0
        reads the file. Collective.

        Raises:
            ArgumentError, ShapeError: it is not this model's, or has no optimizer's state.
                BackendError: it cannot be read, or is damaged. On every worker, and nothing is
                loaded.
        """
        self._checkpoints().load(path)

    def _checkpoints(self) -> Checkpoints:
        copies = {key: group[0] for group in self._ties for key in group[1:]}
        return Checkpoints(
            self.backend, self._agreement, self._own, self.optimizer, copies, self._across
        )

    def zero_grad(self) -> None:
        """Forget this worker's gradients."""
        for p in self.parameters():
            p.grad = None
