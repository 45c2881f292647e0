"""Time loops as operators: n applications of one step, whose adjoint is the loop of the step's
adjoint, run backwards. `linop.loops.linear` has the functions that build them."""

from __future__ import annotations

from typing import Any

import numpy as np

from linop.loops.over_time import Series, beside, renaming
from linop.normal_form.stages import Stages
from linop.operators.algebra import direct_sum, restricted, within
from linop.operators.expressions import Identity, compose
from linop.operators.notation import subscripted
from linop.operators.operator import Arrays, LinearOperator
from linop.operators.simplification import in_order
from linop.spaces.direct_sums import joined_space
from linop.spaces.space import Space


class Loop(LinearOperator[Any, Any]):
    """n applications of a step (x, s_k) -> (x, r_k), each to the state that the last one made.

    The normal form is that of the steps written out, so its size grows with n; plans run the plan
    of the step n times (`linop.backends.engine.looping`).

    Args:
        body: the step, from the state and what comes in to the state and what goes out.
        state: the space of x.
        n: number of steps.
        coming, going: s and r over time; their regions differ from the state's.
        initial: True if the initial state is a part of the domain; else it is zero.
        final: True if the final state is a part of the codomain.
        backwards: True if the steps run from n - 1 to 0.
    """

    loops = True

    def __init__(
        self,
        body: LinearOperator,
        state: Space,
        n: int,
        coming: Series,
        going: Series,
        initial: bool,
        final: bool,
        backwards: bool = False,
    ) -> None:
        self.body, self.state, self.n = body, state, n
        self.coming, self.going = coming, going
        self.initial, self.final, self.backwards = initial, final, backwards
        super().__init__(side_of(state, initial, coming), side_of(state, final, going))

    def _adjoint(self) -> LinearOperator:
        ends = self.going, self.coming, self.final, self.initial
        return Loop(self.body.euclidean_adjoint, self.state, self.n, *ends, not self.backwards)

    def _conj(self) -> LinearOperator:
        ends = self.coming, self.going, self.initial, self.final
        return Loop(self.body.conj(), self.state, self.n, *ends, self.backwards)

    def _form(self) -> LinearOperator:
        ends = self.coming.over_reals(), self.going.over_reals(), self.initial, self.final
        return Loop(self.body.over_reals(), self.state.over_reals(), self.n, *ends, self.backwards)

    @property
    def times(self) -> range:
        """The numbers of the steps, in the order in which they run."""
        return range(self.n - 1, -1, -1) if self.backwards else range(self.n)

    def _interpret(self, arrays: Arrays) -> Arrays:
        state = arrays if self.initial else self.state.zeros().arrays
        now = {region.name: state[region.name] for region in self.state}
        made = {r.name: np.zeros(r.shape, self.dtype) for r in self.going.space}
        taken = list(zip(self.coming.space, self.coming.names, strict=True))
        given = list(zip(self.going.space, self.going.names, strict=True))
        for k in self.times:
            now.update({name: arrays[region.name][k].copy() for region, name in taken})
            now = self.body._interpret(now)
            for region, name in given:
                made[region.name][k] = now.pop(name)
        return now | made if self.final else made

    def _stages(self) -> Stages:
        return self.written_out().stages

    def written_out(self) -> LinearOperator:
        """The same map as a product of n steps, in the algebra of all other operators."""
        whole = self._entered(self.coming, self.initial)
        for k in self.times:
            whole = compose(within(self._step(k), whole.codomain), whole)
        leaving = self._entered(self.going, self.final).euclidean_adjoint
        whole = compose(leaving, in_order(whole, whole.domain, leaving.domain))
        return in_order(whole, self.domain, self.codomain)

    def _entered(self, ends: Series, whole: bool) -> LinearOperator:
        """The operator from one side of the loop to the state and the regions of single steps."""
        if not ends.names:
            return Identity(self.state)
        apart = ends.apart(self.n)
        if whole:
            return direct_sum(Identity(self.state), apart)
        return compose(
            restricted(
                joined_space([self.state, apart.codomain]), apart.codomain
            ).euclidean_adjoint,
            apart,
        )

    def _step(self, k: int) -> LinearOperator:
        """Step k, whose regions that are no state's have its number."""
        step = in_order(self.body, self.body.domain, _at_once(self.state, self.going))
        if self.coming.names:
            back = direct_sum(Identity(self.state), renaming(self.coming.at(k), self.coming.names))
            step = compose(step, in_order(back, back.domain, step.domain))
        if self.going.names:
            marked = [region.name for region in self.going.at(k)]
            there = direct_sum(Identity(self.state), renaming(self.going.at(), marked))
            step = compose(there, step)
        return step

    def symbol(self, latex: bool = False) -> str:
        base = subscripted("Loop", str(self.n), latex)
        inner = self.body.symbol(latex)
        return rf"{base}\left({inner}\right)" if latex else f"{base}({inner})"


def _at_once(state: Space, other: Series) -> Space:
    """The direct sum of the state and of one step's part of a series."""
    return joined_space([state, other.at()]) if other.names else state


def side_of(state: Space, whole: bool, other: Series) -> Space:
    """The space of one side of a loop."""
    if not whole:
        return other.space
    return beside("timeloop", [state, other.space]) if other.names else state
