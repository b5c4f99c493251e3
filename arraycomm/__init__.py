"""The communication layer under data-parallel Python."""

from arraycomm._arrays.exchange import exchange
from arraycomm._collectives.custom_ops import op
from arraycomm._communicator import Communicator, Request, waitall
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
from arraycomm._explain import explain
from arraycomm._println import println
from arraycomm._session import finalize, init, is_initialized, world
from arraycomm._together import raise_together
from arraycomm._training.data import DistributedDataContainer
from arraycomm._training.join import Join, join
from arraycomm._training.metrics import mean_metrics
from arraycomm._training.optimizer import DistributedOptimizer
from arraycomm._trees.plan import Plan
from arraycomm._trees.reduce import allreduce_gradients, allreduce_tree
from arraycomm._trees.synchronize import synchronize

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
