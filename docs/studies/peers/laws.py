"""The laws that are tried on each library, and the disagreements of ranks."""

from __future__ import annotations

from typing import Final

from arraycomm.testing.conformance import GroupLaws, MovementLaws, ReductionLaws

OF_ARRAYCOMM: Final = (
    *("allreduce_is_the_fold_in_rank_order", "reduce_is_the_fold_on_the_root_alone"),
    *("allreduce_is_reduce_then_bcast", "size_does_not_matter", "every_dtype_has_its_ops"),
    *("min_and_max_commute", "extremes_are_where_they_are_said_to_be"),
    *("functions_are_folded_in_rank_order", "mean_of_equal_values_is_that_value"),
    *("numbers_come_back_as_their_type", "layout_and_framework_do_not_matter"),
    *("byte_order_does_not_matter", "out_gets_the_result_and_its_neighbours_nothing"),
    *("out_may_be_the_input", "moved_data_fills_any_out", "bcast_needs_nothing_of_the_others"),
)

# Of calls and options that are arraycomm's own, of one rank, and of several calls in rank order.
_LEFT_OUT: Final = (
    *("check_does_not_matter", "rows_move_along_the_axes_of_a_grid"),
    *("one_rank_alone_gets_what_it_gave", "exact_sums_commute"),
    "turns_add_up_to_the_fold_of_all_parts",
)

ANY_LIBRARY: Final = tuple(
    law
    for laws in (MovementLaws, ReductionLaws, GroupLaws)
    for law in (name.removeprefix("test_") for name in vars(laws) if name.startswith("test_"))
    if law not in (*OF_ARRAYCOMM, *_LEFT_OUT)
)

# By the name in the conformance suite: what one rank does, while the others do something else.
DISAGREEMENTS: Final = {
    "op": "`max`; the others: `sum`",
    "dtype": "float64; the others: float32",
    "length": "an element less",
    "root": "`reduce` to another root",
    "operation": "`allgather`; the others: `allreduce`",
    "order": "`barrier` and `allreduce` in the other order",
    "one call more": "one `barrier` more",
    "leaves": "no call, and ends its program",
    "raises": "an argument that its library refuses",
}
