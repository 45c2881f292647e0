"""Recording of one step of a torch program that communicates by mpi4py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from linop.testing.parallel.mpi.buffers import Area, address_of
from linop.testing.parallel.mpi.check import OVERWRITES
from linop.testing.parallel.mpi.interception import Event, listened
from linop.testing.parallel.mpi.tensor_shadows import TensorShadows, tracking_tensors
from linop.testing.parallel.recording.recorder import Recorder
from linop.testing.parallel.recording.records import Collective
from linop.testing.parallel.recording.tensors import LARGEST, local, users_line


class MPIRecorder(Recorder):
    """A recorder that hears of calls of mpi4py, too, and follows elements through arrays."""

    shadows = TensorShadows

    @contextmanager
    def recording(self, model: torch.nn.Module, plain: Callable[[str], str]) -> Iterator[None]:
        with (
            super().recording(model, plain),
            tracking_tensors(lambda: () if self.is_aside else self._shadows),
            listened(self.heard),
        ):
            yield

    def finished(self) -> None:
        for one in self.lifted:
            if one.overwritten and one.moved:
                call = self.calls[one.call]
                side = "backward" if one.backward else "forward"
                self.notes.append(
                    f"{call.line}: the {side} of {call.name} {OVERWRITES}, unknown to torch"
                )
        super().finished()

    def heard(self, event: Event) -> None:
        """A call of mpi4py, before it is made."""
        if self.is_aside:
            return
        line, text = users_line()
        number = len(self.collectives)
        kept = sum(len(one.positions) for one in event.given) <= LARGEST
        with self.aside():
            values = [one.values for one in event.given] if kept else []
            about: dict[str, Any] = {
                "phase": self._phase(),
                "inside": self._functions[-1] if self._functions else -1,
                "backward_of": self._backward_of(),
                "parameter": self._parameter_at(event),
            }
            for one in event.made:
                self._changed_at(one)
            for shadows in self._shadows:
                if isinstance(shadows, TensorShadows):
                    shadows.moved(number, event.given, event.made)
        self.collectives.append(
            Collective(
                number=number,
                name=event.name,
                ranks=event.ranks,
                reduction=event.reduction,
                peer=event.peer,
                sent=[one.shape for one in event.given],
                received=[one.shape for one in event.made],
                splits=event.splits,
                value=np.concatenate(values) if values else None,
                line=line,
                text=text,
                dtype=event.dtype,
                group="",
                tag=event.tag,
                **about,
            )
        )

    def _parameter_at(self, event: Event) -> str:
        """The name of the parameter whose gradient the buffers are."""
        for one in (*event.made, *event.given):
            name = self.gradients.at.get((one.address, one.memory.size))
            if name:
                return name
        return ""

    def _changed_at(self, one: Area) -> None:
        """The tensors that have elements in these places are others from now on."""
        first = address_of(one.memory)
        last = first + one.memory.nbytes
        for tensor in self._kept:
            if not isinstance(tensor, torch.Tensor):
                continue
            own = local(tensor)
            if own.layout != torch.strided or own.is_meta or not own.numel():
                continue
            start = own.untyped_storage().data_ptr()
            if start < last and first < start + own.untyped_storage().nbytes():
                self._changed(tensor)
