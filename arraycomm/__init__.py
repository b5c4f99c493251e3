"""The communication layer under data-parallel Python."""

from arraycomm._communicator import Communicator, Request, waitall
from arraycomm._data import DistributedDataContainer
from arraycomm._errors import (
    ArrayCommError,
    BackendUnavailableError,
    CommTimeoutError,
    CommunicatorClosedError,
    ConcurrentUseError,
    MismatchError,
    NotInitializedError,
    PeerError,
    TransportError,
)
from arraycomm._exchange import exchange
from arraycomm._explain import explain
from arraycomm._join import Join, join
from arraycomm._metrics import mean_metrics
from arraycomm._ops import op
from arraycomm._optimizers import DistributedOptimizer
from arraycomm._plans import Plan
from arraycomm._println import println
from arraycomm._runtime import finalize, init, is_initialized, world
from arraycomm._synchronize import synchronize
from arraycomm._together import raise_together
from arraycomm._trees import allreduce_gradients, allreduce_tree

__all__ = [
    "ArrayCommError",
    "BackendUnavailableError",
    "CommTimeoutError",
    "Communicator",
    "CommunicatorClosedError",
    "ConcurrentUseError",
    "DistributedDataContainer",
    "DistributedOptimizer",
    "Join",
    "MismatchError",
    "NotInitializedError",
    "PeerError",
    "Plan",
    "Request",
    "TransportError",
    "allreduce_gradients",
    "allreduce_tree",
    "exchange",
    "explain",
    "finalize",
    "init",
    "is_initialized",
    "join",
    "mean_metrics",
    "op",
    "println",
    "raise_together",
    "synchronize",
    "waitall",
    "world",
]
