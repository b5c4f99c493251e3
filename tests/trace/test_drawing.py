from __future__ import annotations

import numpy as np
import pytest

from arraycomm.cli.trace.drawing import shares

COLUMNS = np.linspace(0, 10, 11)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([], [0] * 10),
        ([(2, 4)], [0, 0, 1, 1, *[0] * 6]),
        ([(5.5, 7.25), (0.25, 0.5), (0.75, 1)], [0.5, 0, 0, 0, 0, 0.5, 1, 0.25, 0, 0]),
        # Outside, and too short to be seen in its true height.
        ([(-5, 0.5), (3.5, 3.501), (9, 30), (4, 4)], [0.5, 0, 0, 0.06, 0, 0, 0, 0, 0, 1]),
    ],
)
def test_share_of_each_column_is_what_pieces_cover(pieces, expected) -> None:
    np.testing.assert_allclose(shares(pieces, COLUMNS), expected, atol=1e-12)
