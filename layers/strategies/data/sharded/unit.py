"""Units: parameters that are gathered together for a module's forward, and again in backward.

The parameters of a unit are G θ, copies that an all-gather makes of shards; the gradients on the
shards are G.H of those on the copies, a reduce-scatter. Both are applications of one operator in
torch's graph; there is no code for backward.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from math import prod
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from linop.backends.autograd.bridge import Bridge, bridge_of
from linop.backends.autograd.dtypes import torch_dtype
from linop.backends.autograd.functions import applied, begun, ended
from linop.backends.autograd.real_calls import broken
from linop.backends.autograd.recompute import in_checkpoint, unrecorded
from linop.errors import ArgumentError
from linop.layers.parameters.blocks import enlist
from linop.operators.algebra import direct_sum
from linop.strategies.data.mean_losses import Hint
from linop.strategies.data.notes import PLACES, Facts, Steps, are_equal, different, gathered_digest
from linop.strategies.data.replicas import agree
from linop.strategies.data.shapes_only import only_shapes
from linop.strategies.data.sharded.calls import Call
from linop.strategies.data.sharded.held import Held
from linop.strategies.data.sharded.members import (
    Member,
    are_given,
    converted,
    gathering,
    others_there,
    shard_marked,
)
from linop.strategies.data.sharded.precision import dtypes_of, paired
from linop.strategies.data.sharded.prefetch import passes_of
from linop.strategies.data.sharded.transforms import untransformed
from linop.strategies.data.sharded.usage import Gathering, use_space
from linop.strategies.memory.moving import Aside
from linop.strategies.mesh import Axis

_CURE = (
    "Freeze the same parameters, and call the optimizer's step as often, on every worker; a step "
    "left out for one worker's sake has to be left out on all"
)

_AS_IT_IS = nullcontext()
_NO_GRAPH = (
    "linop: fully_shard gathers parameters before a module's forward, outside of graphs: leave "
    "fullgraph=True out, and torch compiles what is between"
)


class Unit:
    """Parameters that are gathered together. Constructed by all workers of the axis.

    It is to `linop.layers.parameters.blocks` the holder of its shards.

    Args:
        memory: the kind that the shards are in.
        dtypes: torch's, of whole parameters, and of the sums of their gradients; None for those of
            the shards, and for sums at least float32.
    """

    shards_blocks = True

    def __init__(
        self,
        name: str,
        members: Sequence[Member],
        axis: Axis,
        memory: str,
        dtypes: tuple[Any, Any] = (None, None),
    ) -> None:
        self.name = self.kind = name
        self._dtypes = dtypes
        self.axis, self._memory = axis, memory
        self._is_alone = axis.size == 1
        self.backend = axis.backend
        self.worker = axis.index
        self.reshards = False
        """True: whole parameters are given up after forward."""
        self.alike = 1
        """Number of workers, of those that parameters are sharded over, which compute the same
        gradients of whole parameters: the copies are one replicated tensor, the mean of them."""
        self.terms = 1
        """Number that gradients of shards are divided by."""
        self.hint: Hint | None = None
        """Of a loss that is a mean."""
        self.prefetch = 0
        """Number of units that are gathered ahead while this one computes."""
        self.passes = passes_of(axis.backend)
        self._have(members)
        self.shards: list[Tensor] = []
        self._open: list[tuple[Call, Sequence[Tensor], Any] | None] = []
        """Forwards that run; None for those with tensors that the user gives."""
        self._calls: list[ref[Call]] = []
        """Calls that a graph may have."""
        self._ahead: list[int] | None = None
        """Versions of the shards that are gathered ahead; None if none are."""
        self._token: Any = None
        """Of that, in torch's graph."""
        self._held: Held | None = None
        self._seen: list[int] | None = None
        """Versions of the shards when they were gathered last."""
        self._steps = Steps([])
        self._facts: Facts = {}
        """Of the last gathering, and `_digest` is theirs."""
        self._digest: tuple[int, ...] = ()

    def _have(self, members: Sequence[Member]) -> None:
        self.members = members
        self.spaces = {member.name: member.space for member in members}
        spaces = [*self.spaces.values()]
        every = [*spaces, use_space(spaces, PLACES)]
        kind = self._kind = torch_dtype(spaces[0].dtype)
        self.dtype, sums = dtypes_of(kind, *self._dtypes)

        def bridge(dtype: Any) -> Bridge:
            parts = [gathering(converted(space, dtype), self._memory) for space in every]
            return bridge_of(direct_sum(*parts), self.backend)

        low = bridge(self.dtype)
        high = low if sums == self.dtype else bridge(sums)
        exact = low if self.dtype == kind else high if sums == kind else bridge(kind)
        both: Any = low
        if self.dtype != kind or sums != kind:
            both = paired(low, high, kind, self.dtype)
        self._bridge: Any = Gathering(both, len(spaces), PLACES)
        self._exact = self._bridge if exact is both else Gathering(exact, len(spaces), PLACES)
        """Gathers the values of shards, in their dtype."""
        if self._memory != "default":
            aside = Aside(self.backend.arrays)
            for one in (low, low.adjoint, high.adjoint):
                one.queue = aside
        size = torch.empty((), dtype=self.dtype).element_size()
        self._size = sum(prod(m.space.global_shape) for m in members) * size

    def _tell(self, bridge: Gathering) -> None:
        """Let the next run of a bridge send, with the shards, a digest of what all workers have to
        have done alike."""
        if self._is_alone:
            return
        bridge.terms = self.alike * self.terms
        versions, named = self.versions(), zip(self.spaces, self.shards, strict=True)
        with torch._C.DisableTorchFunctionSubclass():
            frozen = [name for name, p in named if not p.requires_grad]
        facts = {
            **self._steps.told("parameters were gathered last"),
            "parameters changed since they were gathered last": self._seen not in (None, versions),
            "parameters without requires_grad": frozen,
        }
        if facts != self._facts:
            self._facts, self._digest = facts, gathered_digest(facts)
        self._seen, bridge.note = versions, self._digest

    def _arrived(self, bridge: Gathering, wholes: Sequence[Tensor]) -> Sequence[Tensor]:
        """The whole parameters that were gathered.

        Raises:
            BackendError: a worker has not done what the others have; on every worker.
        """
        if not (self._is_alone or are_equal(bridge.notes)):
            raise different(f"fully_shard, {self.name}", self._facts, self.backend, _CURE)
        return wholes

    def _convert(self) -> None:
        """Have the dtype of the shards, which ``double()`` or the like may have changed.
        Collective then."""
        with torch._C.DisableTorchFunctionSubclass():
            dtype = self.shards[0].dtype
        if dtype == self._kind:
            return
        if self._ahead is not None:
            self.drop()
        agree(self.backend, "fully_shard", lambda: (None, str(dtype)))
        self._have([one._replace(space=converted(one.space, dtype)) for one in self.members])

    @property
    def is_of_one_dtype(self) -> bool:
        """True if whole parameters, and sums of their gradients, have the dtype of the shards."""
        return self._exact is self._bridge

    @property
    def _parameters(self) -> dict[str, Tensor]:
        return dict(zip(self.spaces, self.shards, strict=False))  # none yet while it is made

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        """A unit of copied modules, with shards of their own and the same plans; it gathers nothing
        ahead, since a plan is started by one of them."""
        if self._open or self._held is not None:
            raise ArgumentError(
                f"fully_shard: {self.name} is copied while it computes with whole parameters; copy "
                f"it outside of its forward and of unsharded(…)"
            )
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__, prefetch=0, _open=[], _calls=[], _ahead=None)
        made.__dict__.update(_token=None, _seen=None, _facts={})
        made.members = [
            member._replace(places=[(copy.deepcopy(m, memo), name) for m, name in member.places])
            for member in self.members
        ]
        shards = [copy.deepcopy(shard, memo) for shard in self.shards]
        for shard, member in zip(shards, made.members, strict=True):
            shard_marked(shard, member.name, self.backend)
        made.have_shards(shards)
        made._there = made.shards  # modules get them when they are copied
        enlist(made)
        return made

    def __reduce__(self) -> Any:
        raise ArgumentError(
            f"fully_shard: {self.name} is sharded, and cannot be pickled: a file of shards would "
            f"look like the model's; pickle linop.strategies.full_module(net), which all workers "
            f"call, or save its state by linop.layers.save(net, path)"
        )

    @property
    def bytes_here(self) -> int:
        """Bytes of whole parameters that are here, or on their way."""
        opened = (one[0] for one in self._open if one is not None)
        known = [*(known() for known in self._calls), *opened]
        here = {id(call) for call in known if call is not None and call.whole is not None}
        return (len(here) + (self._ahead is not None)) * self._size

    @property
    def bytes_leaving(self) -> int:
        """Bytes of whole parameters' gradients that are on their way to the shards."""
        return self._size * bool(self._bridge.adjoint.is_started)

    def have_shards(self, shards: list[Tensor]) -> None:
        """Take the blocks of the parameters, whose optimizers' steps count from here on."""
        self.shards, self._steps = shards, Steps(shards)

    def versions(self) -> list[int]:
        """Numbers that change when a shard does."""
        with torch._C.DisableTorchFunctionSubclass():  # shards tell it in microseconds otherwise
            return [shard._version for shard in self.shards]

    def start(self, again: bool = False) -> bool:
        """Start to gather; False if that was done. Collective.

        Args:
            again: True: they were gathered in this step already.
        """
        self._convert()
        if self._ahead is not None:
            return False
        if not again:
            self._tell(self._bridge)
        with torch._C.DisableTorchFunctionSubclass():
            self._token = begun(self._bridge, self.shards, self.name)
        self._ahead = self.versions()
        return True

    def drop(self) -> None:
        """Finish what `start` began, without a use for it. Collective."""
        self._ahead = self._token = None
        self.passes.taken(self)
        self._bridge.finish()

    def copies(self) -> Sequence[Tensor]:
        """G of the shards. Collective; recorded in torch's graph."""
        if not torch.is_grad_enabled():
            return self.gathered()
        token = self._take()
        # A checkpoint that keeps results of operators would keep the whole parameters.
        with unrecorded() if in_checkpoint() else _AS_IT_IS:
            if token is not None:
                return self._arrived(self._bridge, ended(self._bridge, token, self.name))
            self._tell(self._bridge)
            with torch._C.DisableTorchFunctionSubclass():
                return self._arrived(self._bridge, applied(self._bridge, self.shards, self.name))

    def gathered(self, again: bool = False) -> Sequence[Tensor]:
        """The whole parameters, without a graph. Collective.

        Args:
            again: True: they were gathered in this step already.
        """
        self._take()
        return self._run(self._bridge, again)

    def _run(self, bridge: Gathering, again: bool = False) -> Sequence[Tensor]:
        """The results of a bridge, without a graph. What was started is not sent again."""
        if not (again or bridge.is_started):
            self._tell(bridge)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return self._arrived(bridge, bridge.run(self.shards))

    def values(self) -> Sequence[Tensor]:
        """The whole parameters in the dtype of the shards, without a graph. Collective."""
        self._convert()
        if self.is_of_one_dtype:
            return self.gathered()
        if self._ahead is not None:  # by the bridge that this may be, too
            self.drop()
        return self._run(self._exact)

    def _take(self) -> Any:
        """Let the next run be that which `start` began, unless shards have changed.

        Returns:
            Its token in torch's graph, if it has one.
        """
        self._convert()
        if self._ahead is not None and self._ahead != self.versions():
            self.drop()
        elif self._ahead is not None:
            self._ahead = None
            self.passes.taken(self)
        token, self._token = self._token, None
        return token

    def enter(self, *unused: Any) -> None:
        """Before forward: put the whole parameters in place.

        Raises:
            ArgumentError: modules have other parameters than were put there last.
        """
        del unused
        if torch.compiler.is_dynamo_compiling():
            return broken(_NO_GRAPH, self.enter)  # type: ignore[no-any-return]
        if others := others_there(self.members, self._there):
            if are_given(self.members, self._there):
                self._open.append(None)
                return
            raise self._replaced(others)
        call, transformed = self._computed_again(), False
        if call is not None:
            whole: Sequence[Tensor] = call.leaves()
        else:
            transformed = torch._C._are_functorch_transforms_active()
            with untransformed() if transformed else _AS_IT_IS:
                call = self.held or self._called()
            assert call.whole is not None
            whole = call.whole
        context = None
        if (self.reshards or self.held) and torch.is_grad_enabled() and not transformed:
            context = call.hooks()
            context.__enter__()
        self._open.append((call, whole, context))
        self.put(whole)

    def _replaced(self, others: Sequence[str]) -> ArgumentError:
        return ArgumentError(
            f"fully_shard: parameters {[*dict.fromkeys(others)]} of {self.name} are not the shards "
            f"that were put there, as after load_state_dict(assign=True) or an assignment: copy "
            f"values into the shards, or replace parameters before fully_shard; or as in "
            f"torch.func.functional_call: give it whole tensors, of all parameters of "
            f"{self.name}, as full_state_dict(net) has them, or shards as they are"
        )

    def _called(self) -> Call:
        if only_shapes():
            pairs = zip(self.members, self.shards, strict=True)
            return Call(self, [shard.new_zeros(one.space.global_shape) for one, shard in pairs])
        if self.prefetch:
            self.passes.enter(self)
        call = Call(self, self.copies())
        if self.prefetch:
            self.passes.entered(self, call)
        if torch.is_grad_enabled():
            self._note(call)
        return call

    def _note(self, call: Call) -> None:
        self._calls = [*(known for known in self._calls if known() is not None), ref(call)]

    def _computed_again(self) -> Call | None:
        """The call whose forward is computed again in backward, as by checkpoints. Of several with
        the same parameters any will do."""
        if torch._C._current_graph_task_id() == -1 or not torch.is_grad_enabled():
            return None
        versions, found = self.versions(), None
        for call in (known() for known in self._calls):
            if call is not None and call.versions == versions:
                found = call if found is None or found.whole is None else found
        return found

    def leave(self, module: Any, arguments: Any, result: Any) -> None:
        """After forward: put the shards in place."""
        if torch.compiler.is_dynamo_compiling():
            return broken(_NO_GRAPH, self.leave, module, arguments, result)  # type: ignore[no-any-return]
        del module, arguments
        if not self._open:
            return  # forward's collective failed
        entered = self._open.pop()
        if entered is None:
            return
        call, whole, context = entered
        if context is not None:
            context.__exit__(None, None, None)
        if whole is call.whole and call is not self.held:
            call.whole = None  # the graph has what it needs
        if self.hint is not None:
            self.hint.expect(result)
        self.put(self._open[-1][1] if self._open and self._open[-1] else self._resting)

    def opened(self, module: Any) -> int:
        """The number of forwards of the module that run."""
        del module
        return len(self._open)

    def interrupt(self, module: Any) -> None:
        """`leave` a forward that was interrupted."""
        self.leave(module, (), None)

    def used(self, *unused: Any) -> None:
        """Before the forward of a module inside the unit's.

        Raises:
            ArgumentError: it is called by itself, where its parameters are shards.
        """
        del unused
        if torch.compiler.is_dynamo_compiling():
            return broken(_NO_GRAPH, self.used)  # type: ignore[no-any-return]
        if self._open or self.held:
            return
        call = self._computed_again()
        if call is None:
            raise ArgumentError(
                f"fully_shard: a module whose parameters are sharded as part of {self.name} is "
                f"called outside of that module's forward, where it has shards alone; call that, "
                f"or shard this one by a call of its own before; of torch's checkpoints inside of "
                f"it, take those with use_reentrant=False"
            )
        self.put(call.leaves())

    def rest(self) -> None:
        """After what `used` allowed: put the shards in place."""
        if not self._open:
            self.put(self._resting)

    @property
    def _resting(self) -> Sequence[Tensor]:
        """Parameters outside of forwards."""
        return self.shards if self._held is None else self._held.parameters

    @property
    def held(self) -> Call | None:
        """The forwards between `hold` and `release`; None at other times."""
        held = self._held
        return held.call if held is not None and held.call.whole is not None else None

    def hold(self) -> None:
        """Gather the whole parameters until `release`, for all forwards and backwards before it:
        their gradients are kept until `reduce`. Collective."""
        if self._held is None:
            self._held = Held(self)
            self._note(self._held.call)
        else:
            self._held.gather()
        self.put(self._held.leaves)

    def release(self) -> None:
        """Give up what `hold` gathered."""
        if self._held is not None:
            self._held.release()
        self.put(self.shards)

    def reduce(self) -> None:
        """Add G.H of the gradients since the last time to those of the shards. Collective."""
        if self._held is not None:
            self._held.reduce()

    def forget(self) -> None:
        """End what `hold` began, and drop gradients that were not reduced."""
        self._held = None
        self.put(self.shards)

    def fail(self, error: BaseException) -> None:
        """End the other workers' waits for this one, which failed, and what `hold` began."""
        self.forget()
        for bridge in (self._bridge, self._bridge.adjoint):
            bridge.plan.fail(error)

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Put tensors where the modules have their parameters."""
        self._there = tensors
        for member, tensor in zip(self.members, tensors, strict=True):
            for module, name in member.places:
                module._parameters[name] = tensor
