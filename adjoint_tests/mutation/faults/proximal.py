"""Faults of proximal maps, and of the solvers that use them or are nonlinear."""

from __future__ import annotations

from mutation.fault import Fault

MAPS = "test_proximal_maps.py::"
METHODS = "test_splitting.py::"
WORKERS = "test_optimization_on_workers.py::"

PROXIMAL = (
    Fault(
        "step without sigma",
        "soft thresholding ignores the weight of the norm",
        "coefficient",
        "linop.solvers.prox.elementwise:_L1._prox",
        "self._sigma * step",
        "step",
        (f"{MAPS}test_it_is_the_minimizer",),
    ),
    Fault(
        "infinity left out",
        "points outside of a box on one side have value zero",
        "omission",
        "linop.solvers.prox.elementwise:_Box.partial",
        "np.logical_and(above, below)",
        "np.logical_or(above, below)",
        (f"{MAPS}test_values",),
    ),
    Fault(
        "values of replicas",
        "the value of a map counts a replicated region for each of its holders",
        "replication",
        "linop.solvers.prox.maps:counted",
        "float(f(array, name))",
        "float(f(array, name)) * len(v.space[name].workers)",
        (f"{MAPS}test_replicated_regions_count_once",),
    ),
    Fault(
        "groups are cut",
        "groups along a dimension that is cut over workers are accepted",
        "blind",
        "linop.solvers.prox.norms:_Lines.check",
        "len(space.bounds[self._dim]) > 1",
        "len(space.bounds[self._dim]) > 9",
        (f"{MAPS}test_refused",),
    ),
    Fault(
        "gradient around the corner",
        "blocks of the gradient get no halo",
        "boundary",
        "linop.solvers.prox.total_variation:_wider",
        "b + 1",
        "b",
        (f"{MAPS}test_the_gradient",),
    ),
    Fault(
        "gap unlike a distance",
        "total variation ends when the duality gap is rtol, not its square",
        "precision",
        "linop.solvers.prox.total_variation:_TotalVariation._prox",
        "self._rtol ** 2",
        "self._rtol",
        (f"{MAPS}test_a_looser_tolerance_is_kept",),
    ),
    Fault(
        "residual without momentum",
        "fista extrapolates x, and not its residual",
        "omission",
        "linop.solvers.splitting.proximal_gradient:_ProximalGradient._go_on",
        "beyond(self.r, momentum, r, image)",
        "self.r",
        (f"{METHODS}test_iterates_are_those_of_pylops",),
    ),
    Fault(
        "long steps are kept",
        "a step longer than the operator allows is not shortened",
        "blind",
        "linop.solvers.splitting.proximal_gradient:_ProximalGradient.step",
        "moved * (1 + 1e-6)",
        "moved * 1e6",
        (f"{METHODS}test_a_step_that_is_too_long_is_shortened",),
    ),
    Fault(
        "cold starts",
        "the primal-dual method begins the iteration of a map anew at each call",
        "omission",
        "linop.solvers.splitting.primal_dual:_PrimalDual.step",
        "self._g.prox(v, self.tau, self.x)",
        "self._g.prox(v, self.tau)",
        (f"{METHODS}test_solvers_begin_maps_at_their_last_variables",),
    ),
    Fault(
        "dual step of the primal",
        "the primal-dual method takes tau for the dual variable",
        "coefficient",
        "linop.solvers.splitting.primal_dual:_PrimalDual.step",
        "plus(self.y, self.mu, self.bar)",
        "plus(self.y, self.tau, self.bar)",
        (f"{METHODS}test_iterates_of_chambolle_and_pock",),
    ),
    Fault(
        "value of one worker",
        "lbfgs takes each worker's own value of the function",
        "agreement",
        "linop.solvers.values:differs",
        "count * squares != codes ** 2",
        "False",
        (f"{WORKERS}test_values_that_differ_between_workers",),
    ),
    Fault(
        "tables out of step",
        "lbfgs drops the oldest vector, and keeps its products",
        "order",
        "linop.solvers.nonlinear.lbfgs:_Lbfgs._keep",
        "sg[first:], yg[first:]",
        "sg[: len(self.s)], yg[: len(self.s)]",
        ("test_nonlinear.py::test_directions_are_those_of_the_two_loops",),
    ),
    Fault(
        "curvature of the wrong sign",
        "line searches end at slopes that are too steep",
        "boundary",
        "linop.solvers.nonlinear.wolfe:search",
        "abs(at.slope)",
        "at.slope",
        ("test_nonlinear.py::test_line_searches",),
    ),
)
