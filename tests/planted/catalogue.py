"""All faults."""

from __future__ import annotations

from typing import Final

from tests.planted import arguments, collectives, histories, protocol, training, trees
from tests.planted.fault import Fault

# The headings of the table, and what comes under each.
CATALOGUE: Final[dict[str, tuple[Fault, ...]]] = {
    "Folds": collectives.FOLDS,
    "Histories": histories.HISTORIES,
    "Algorithms": collectives.ALGORITHMS,
    "Arrays and results": collectives.ARRAYS,
    "Messages, requests and objects": collectives.MESSAGES,
    "Arguments": arguments.ARGUMENTS,
    "Headers and errors": protocol.HEADERS,
    "Groups": protocol.GROUPS,
    "Trees": trees.TREES,
    "Data": training.DATA,
    "Weights": training.WEIGHTS,
    "Optimizers": training.OPTIMIZERS,
    "PyTorch": training.TORCH,
    "JAX": training.JAX,
    "C": arguments.NATIVE,
    "MPI": protocol.PROCESSES,
}
FAULTS: Final = tuple(fault for faults in CATALOGUE.values() for fault in faults)
