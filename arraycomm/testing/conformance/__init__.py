"""The laws of collectives, as a suite of tests that anyone can point at a communicator.

Subclass `Conformance` in a test module and choose the communicator; pytest, alone or under
`mpiexec`, does the rest. Every law is a Hypothesis test. Its number of examples is that of the
Hypothesis profile that is loaded when this module is imported.
"""

from arraycomm.testing import _extra  # noqa: F401
from arraycomm.testing.conformance._failures import FailureLaws
from arraycomm.testing.conformance._groups import GroupLaws
from arraycomm.testing.conformance._movements import MovementLaws
from arraycomm.testing.conformance._reductions import ReductionLaws
from arraycomm.testing.conformance._suite import Conformance
from arraycomm.testing.conformance._trees import TreeLaws

__all__ = ["Conformance", "FailureLaws", "GroupLaws", "MovementLaws", "ReductionLaws", "TreeLaws"]
