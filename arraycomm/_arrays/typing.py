"""Type variables of public signatures: what is passed is what comes back.

`ArrayT` is an array of any framework or a Python number, `TreeT` a pytree of them, `ReceivedT` an
array whose framework the caller may choose, `DataT` a data set whose batches are of its own type,
`T` anything. Their defaults are for calls that pass
nothing to tell the type by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVarTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Protocol, TypeVar

    class _Array(Protocol):
        @property
        def shape(self) -> Any: ...

    ArrayT = TypeVar("ArrayT", default=Any)
    TreeT = TypeVar("TreeT", default=Any)
    ReceivedT = TypeVar("ReceivedT", default=NDArray[Any])
    DTypeT = TypeVar("DTypeT", bound=np.dtype[Any], default=np.dtype[Any])
    T = TypeVar("T", default=Any)
    DataT = TypeVar("DataT", bound=_Array | Mapping[Any, Any] | list[Any], default=Any)
    # A result that comes later.
    T_co = TypeVar("T_co", default=Any, covariant=True)
else:
    from typing import TypeVar

    names = ("ArrayT", "TreeT", "ReceivedT", "DataT", "T")
    ArrayT, TreeT, ReceivedT, DataT, T = (TypeVar(name) for name in names)
    DTypeT = TypeVar("DTypeT", bound=np.dtype)
    T_co = TypeVar("T_co", covariant=True)

# What a function takes beside the communicator.
Ts = TypeVarTuple("Ts")

# NumPy's types know the number of dimensions, which some calls change.
Rows: TypeAlias = "np.ndarray[Any, DTypeT] | complex"
NewShape: TypeAlias = "np.ndarray[tuple[Any, ...], DTypeT]"
