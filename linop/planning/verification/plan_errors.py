"""The ways in which plans can be wrong, one error class each. `linop.verify_plans` raises them."""

from __future__ import annotations

from linop.errors import PlanError

# One worker's plan


class UnfinishedError(PlanError):
    """Steps after the last `Advance` of a plan."""


class StageError(PlanError):
    """Stages out of order, other stages than the operator's, or a step of another stage."""


class StepOrderError(PlanError):
    """A receive after its stage's wait, or with no wait; a second wait in a stage."""


class UnknownRegionError(PlanError):
    """A step uses a region, or a message, that its worker does not have at that time."""


class OutOfBoundsError(PlanError):
    """A box that is not inside its region, or a piece that is not inside its message."""


class SizeMismatchError(PlanError):
    """A message longer or shorter than its receiver expects, or two parts of different shapes."""


class MemoryMismatchError(PlanError):
    """A region kept, without a copy, as one in another kind of memory."""


class CallMismatchError(PlanError):
    """A local map applied to other arguments, or giving other results, than it has."""


class TwoWritersError(PlanError):
    """An element set after it was set, or added to, in the same stage."""


class UnwrittenError(PlanError):
    """An element of a new region never set, or added to before it is."""


# All plans together


class WorkerError(PlanError):
    """A worker with two plans, without one, or with a region of another worker."""


class MissingSendError(PlanError):
    """A message that is received, and never sent."""


class MissingReceiveError(PlanError):
    """A message that is sent, and never received."""


class DuplicateMessageError(PlanError):
    """Two messages between the same workers, in one direction, in one stage."""


class DTypeMismatchError(PlanError):
    """Two workers that exchange a message, or a plan and its operator, disagree about the dtype."""


class CollectiveMismatchError(PlanError):
    """Members of a group that begin different collectives, or disagree about their sizes."""


class CycleError(PlanError):
    """Workers that wait for each other in a circle."""


class MisreadError(PlanError):
    """A piece of a message that does not consist of parts as they were sent."""


# Plans and their operator


class WrongRegionError(PlanError):
    """A plan takes, makes or gives other regions than its operator."""


class WrongTransferError(PlanError):
    """A stage of the plans moves something else than that stage of the operator."""


class WrongCallError(PlanError):
    """A stage of the plans applies other local maps than that stage of the operator."""


class SumOrderError(PlanError):
    """A sum whose terms are added in another order than by worker."""


class FactorError(PlanError):
    """The stages that are lowered are not the operator's stages."""
