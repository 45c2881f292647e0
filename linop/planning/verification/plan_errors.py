"""Error classes of `linop.verify_plans`: one for each way in which plans can be wrong."""

from __future__ import annotations

from linop.errors import PlanError

# One worker's plan


class UnfinishedError(PlanError):
    """Steps follow the last `Advance` of a plan."""


class StageError(PlanError):
    """Stages are out of order or not the operator's, or a step belongs to another stage."""


class StepOrderError(PlanError):
    """A receive or collective after its stage's wait, a receive without wait, a message read before
    the wait, or a second wait in a stage."""


class UnknownRegionError(PlanError):
    """A step uses a region or message that its worker does not have at that step."""


class OutOfBoundsError(PlanError):
    """A box exceeds its region, or a put reads beyond the end of its message."""


class SizeMismatchError(PlanError):
    """Sizes of a message differ at its two ends, or source and target of a step differ in shape."""


class MemoryMismatchError(PlanError):
    """A region aliases a region in another kind of memory."""


class CallMismatchError(PlanError):
    """The arguments or results of a call do not match its local map in shape, memory or name."""


class TwoWritersError(PlanError):
    """An element is set after it was set or accumulated into; or a region is made twice."""


class UnwrittenError(PlanError):
    """An element of a new region is never set, or accumulated into before it is set."""


class FusedSumError(PlanError):
    """A sum in one pass is not a copy followed by an addition to the same subset."""


class StorageError(PlanError):
    """A region lies within another one that the next stage does not fill from it as it is."""


# All plans together


class WorkerError(PlanError):
    """A worker has two plans or none, uses another worker's region, or sends to itself."""


class MissingSendError(PlanError):
    """A message is received and never sent."""


class MissingReceiveError(PlanError):
    """A message is sent and never received."""


class DuplicateMessageError(PlanError):
    """Two messages between the same workers in one direction, or two collectives, in one stage."""


class DTypeMismatchError(PlanError):
    """Two plans, or a plan and its operator, differ in dtype; or a coefficient is not of it."""


class CollectiveMismatchError(PlanError):
    """Members of a group begin different collectives, or with inconsistent sizes or roots."""


class CycleError(PlanError):
    """Deadlock: workers wait for each other in a cycle."""


class MisreadError(PlanError):
    """A put reads elements of a message that are not whole subsets in their shape, as sent."""


# Plans and their operator


class WrongRegionError(PlanError):
    """The arguments, results or regions between stages of a plan are not the operator's."""


class WrongTransferError(PlanError):
    """The transfers of a stage of the plans are not those of the operator's stage."""


class WrongCallError(PlanError):
    """The local maps of a stage of the plans are not those of the operator's stage."""


class SumOrderError(PlanError):
    """The terms of a sum are not accumulated in order of worker."""


class FactorError(PlanError):
    """The stages after a pass are not equal to those before it."""
