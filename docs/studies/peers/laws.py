"""The laws that are tried on each library, and the disagreements of ranks."""

from __future__ import annotations

from typing import Final

ANY_LIBRARY: Final = (
    "allgather_stacks",
    "bcast_copies",
    "gather_is_allgather_on_the_root_alone",
    "scatter_hands_out_rows",
    "alltoall_transposes",
    "uneven_forms_join_rows",
    "messages_arrive_as_they_were_sent",
    "objects_arrive_equal",
    "integers_commute",
    "integers_associate",
    "every_rank_gets_the_same_bits",
    "scan_is_the_fold_of_the_ranks_so_far",
    "reduce_scatter_is_a_row_of_allreduce",
    "reduce_scatter_with_counts_is_a_share_of_allreduce",
    "repeated_calls_reduce_what_they_are_given",
    "requests_give_what_blocking_calls_give",
    "every_request_gives_what_its_blocking_call_gives",
    "finished_requests_are_finished",
    "arguments_may_change_after_a_call",
    "input_is_not_modified",
    "results_are_nobody_elses",
    "split_partitions",
    "splits_nest",
    "groups_go_their_own_ways",
    "dup_is_independent",
)

OF_ARRAYCOMM: Final = (
    "allreduce_is_the_fold_in_rank_order",
    "reduce_is_the_fold_on_the_root_alone",
    "allreduce_is_reduce_then_bcast",
    "size_does_not_matter",
    "every_dtype_has_its_ops",
    "min_and_max_commute",
    "functions_are_folded_in_rank_order",
    "mean_of_equal_values_is_that_value",
    "numbers_come_back_as_their_type",
    "layout_and_framework_do_not_matter",
    "out_gets_the_result_and_its_neighbours_nothing",
    "out_may_be_the_input",
    "moved_data_fills_any_out",
    "bcast_needs_nothing_of_the_others",
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

LIBRARIES: Final = ("arraycomm", "mpi4py", "gloo", "mlx")
