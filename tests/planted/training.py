"""Faults in training: data, metrics, `join`, optimizers and adapters."""

from __future__ import annotations

from typing import Final

from tests.planted.fault import Fault

_ORDER: Final = "arraycomm/_training/batches/order.py"
_DATA: Final = "arraycomm/_training/batches/data.py"
_METRICS: Final = "arraycomm/_training/metrics.py"
_WEIGHTED: Final = "arraycomm/_training/weighted.py"
_JOIN: Final = "arraycomm/_training/join.py"
_SHARDS: Final = "arraycomm/_training/shards.py"
_GRADIENTS: Final = "arraycomm/_training/gradients.py"
_SUMS: Final = "arraycomm/_training/sums.py"
_VERIFICATION: Final = "arraycomm/_training/comparison/verification.py"
_ADAPTERS: Final = "arraycomm/adapters"
_JAX: Final = "tests/adapters/test_jax_collectives.py"

_RESUMED: Final = ("epoch_resumed_anywhere_by_any_number_of_ranks",)
_OPTIMIZERS: Final = ("ranks_update_as_one_process_does",)
_STATES: Final = ("a_state_is_resumed_by_any_number_of_ranks",)
_TORCH: Final = ("drawn_loops_give_what_one_process_gives",)
_TRANSPOSES: Final = ("gradients_of_collectives_are_their_transposes",)
_VIRTUAL: Final = (
    "virtual_ranks_update_as_ranks_do",
    "programs_give_the_same_on_every_number_of_ranks",
)
_WRONG_LOOPS: Final = ("wrong_loops_are_the_same_error_on_every_number_of_ranks",)
_TOTALS: Final = ("a_total_goes_on_from_call_to_call",)
_BATCH_NORM: Final = ("batch_norm_of_ranks_is_that_of_the_whole_batch",)

DATA: Final = (
    Fault(
        "item seen twice after resume: "
        "a batch counts as consumed when the loop asks for the next one",
        _DATA,
        "            if not self._is_within:\n"
        "                self._taken = min(start + n, self._share.rounds)\n"
        "            own = self._held(start, turn, n)\n",
        "            if number:\n"
        "                self._taken = min(start, self._share.rounds)\n"
        "            own = self._held(start, turn, n)\n",
        _RESUMED,
    ),
    Fault(
        "items lost at resume: after a resume ranks take turns as if nothing had been consumed",
        _ORDER,
        "        return np.arange(self.start + self.rank, stop, self.size, dtype=np.int64)",
        "        first = self.start - self.start % self.size\n"
        "        return np.arange(first + self.rank, stop, self.size, dtype=np.int64)",
        _RESUMED,
    ),
    Fault(
        "consumed beyond the end: a state counts padding as items",
        _ORDER,
        "        return min(self.start + rounds * self.size, self.stop)",
        "        return self.start + rounds * self.size",
        _RESUMED,
    ),
    Fault(
        "shuffled alike: every rank count shuffles in an order of its own",
        _ORDER,
        "        index = order_of(count, seed, epoch)[index]",
        "        index = order_of(count, seed + size - 1, epoch)[index]",
        ("container_holds_every_item_exactly_once",),
    ),
    Fault(
        'padding counts: the items repeated by "pad" have weight 1',
        _ORDER,
        "    return Part(epoch, shares[0], index, (positions < count).astype(np.float32), bounds)",
        "    return Part(epoch, shares[0], index, np.ones(len(index), np.float32), bounds)",
        ("weighted_mean_is_exact",),
    ),
    Fault(
        "other rows of a tree: a batch of a tree of NumPy arrays has its rows in order of the data",
        "arraycomm/_training/batches/items.py",
        "        return array[index]",
        "        return array[np.sort(index)]",
        ("batches_of_a_tree_are_those_of_its_arrays",),
    ),
)

WEIGHTS: Final = (
    Fault(
        "NaN of weight 0: what a rank of weight 0 has measured is multiplied by 0",
        _METRICS,
        "    if weight:\n        with np.errstate",
        "    if weight is not None:\n        with np.errstate",
        ("metrics_are_means_by_weight",),
    ),
    Fault(
        "mean over ranks: metrics are divided by the number of ranks with a weight",
        _METRICS,
        "        total = sums[-1][0]",
        "        total = sums[-1][0] and self.group.size",
        ("metrics_are_means_by_weight",),
    ),
    Fault(
        "weight forgotten: inside `join` every batch has weight 1",
        _WEIGHTED,
        '        return weight if self._op == "mean" else float(weight > 0)',
        "        return float(weight > 0)",
        ("join_is_the_mean_over_the_batches_of_each_step",),
    ),
    Fault(
        "last rank of a join: after `join` everyone gets the values of the rank that ended first",
        _JOIN,
        "        self._last = steps.index(max(steps))",
        "        self._last = steps.index(min(steps))",
        ("join_is_the_mean_over_the_batches_of_each_step",),
    ),
)

OPTIMIZERS: Final = (
    Fault(
        "order of rounds: the total of the rounds before goes with the last rank's gradients",
        "arraycomm/_trees/reduce.py",
        "onto.join(leaves, self.group.rank)",
        "onto.join(leaves, self.group.size - 1 - self.group.rank)",
        _TOTALS,
    ),
    Fault(
        "rounded between rounds: a total of floats of 16 bits is rounded after each round",
        "arraycomm/_trees/leaves.py",
        "        return view(_added(before, leaf.array))",
        "        return view(_added(before, leaf.array).astype(leaf.dtype).astype(wide))",
        _TOTALS,
    ),
    Fault(
        "a virtual rank left out: the last round has none of the first rank",
        "arraycomm/_training/virtual.py",
        "        return self._rank + number * self._size < self.count",
        "        return self._rank + number * self._size < self.count - (number > 1)",
        _VIRTUAL,
    ),
    Fault(
        "divided in each round: the mean of virtual ranks is divided twice",
        "arraycomm/_training/virtual.py",
        "        fold_on(self._op, dtype, before, self.count - 1, [row], made.reshape(-1), more=False)",
        "        fold_on(self._op, dtype, before, self.count - 1, [row], made.reshape(-1), more=False)\n"
        '        made = made / made.dtype.type(self.rounds) if self._op == "mean" else made',
        _VIRTUAL,
    ),
    Fault(
        "whose gradients: the first rank's, which may be clipped for another virtual rank, are applied",
        "arraycomm/_training/virtual.py",
        "        root = (self.count - 1) % self._size",
        "        root = worked[0] if worked else 0",
        _WRONG_LOOPS,
    ),
    Fault(
        "other trees in other rounds: a round adds the leaves of any tree to the total",
        _GRADIENTS,
        "            self._virtual.check_tree(flat)\n",
        "",
        ("other_trees_are_the_same_error_on_every_number_of_ranks",),
    ),
    Fault(
        "zeros for none: zeros of a parameter that no virtual rank uses are taken away in each round",
        "arraycomm/adapters/torch/_parameters.py",
        "                if virtual.has(number):\n",
        "                if True:\n",
        ("parameters_without_gradients_move_as_on_ranks",),
        frameworks=True,
    ),
    Fault(
        "nobody's gradients: a rank adds what it has in a round without a virtual rank of its own",
        "arraycomm/_training/virtual.py",
        "        return Onto(totals, counts=self.plays(self.round))",
        "        return Onto(totals)",
        _VIRTUAL,
    ),
    Fault(
        "batches of virtual ranks: the rounds go through one virtual rank's batches after another's",
        _DATA,
        "        number = turn if turn < len(self._ranks) else 0\n"
        "        first, stop = self._bounds[number], self._bounds[number + 1]\n"
        "        return range(",
        "        number = (turn + start // n) % len(self._ranks)\n"
        "        first, stop = self._bounds[number], self._bounds[number + 1]\n"
        "        return range(",
        ("programs_give_the_same_on_every_number_of_ranks",),
    ),
    Fault(
        "metrics of turns: each rank adds the total to what it has measured",
        _METRICS,
        "        if not self.group.rank:\n            for total, part",
        "        if True:\n            for total, part",
        ("metrics_go_on_from_call_to_call",),
    ),
    Fault(
        "steps added narrow: gradients of 16 and 8 bits that are accumulated are rounded at every step",
        "arraycomm/_training/arithmetic.py",
        "x.xp.float32 if narrow else x.own",
        "x.own",
        ("accumulated_gradients_are_folds_of_means",),
        frameworks=True,
    ),
    Fault(
        "mean of accumulated steps: accumulated gradients are summed, not averaged",
        _SUMS,
        "        return restored(divided(self.array, self.last, steps), self.last)",
        "        return restored(divided(self.array, self.last, min(steps, 1)), self.last)",
        _OPTIMIZERS,
    ),
    Fault(
        "accumulated step forgotten: the gradients of a step that is only accumulated are dropped",
        _SUMS,
        "            self._sums = self._added(tree)\n",
        "            self._sums = []\n",
        _OPTIMIZERS,
    ),
    Fault(
        "op of an optimizer: gradients that are reduced by a mean are summed",
        _GRADIENTS,
        "        super().__init__(context, memory, sent, gradients.op_of_ranks, *counted, **options)",
        '        super().__init__(context, memory, sent, "sum", *counted, **options)',
        _OPTIMIZERS,
    ),
    Fault(
        "offset of a shard: a rank reads the second parameter of another one where the first is",
        _SHARDS,
        "        end = self.offsets[index] + nbytes_of(spec)\n"
        "        return memory[self.offsets[index] : end]",
        "        first = self.offsets[max(index - (index > 1), 0)]\n"
        "        end = first + nbytes_of(spec)\n"
        "        return memory[first : end]",
        _OPTIMIZERS,
    ),
    Fault(
        "other messages of shards: "
        "of several messages of updated parameters only the first is used",
        _SHARDS,
        "        for number, request in enumerate(requests):\n"
        "            yield from _wait(request, requests[number + 1 :]).items()",
        "        for number, request in enumerate(requests):\n"
        "            found = _wait(request, requests[number + 1 :])\n"
        "            yield from (found if number < 1 else {}).items()",
        _OPTIMIZERS,
    ),
    Fault(
        "owner of a shard: the first parameters do not count when parameters are divided",
        _SHARDS,
        "        loads[owner] += sizes[number]\n    return [owners",
        "        loads[owner] += sizes[number] * (number > 1)\n    return [owners",
        ("shards_are_even",),
    ),
    Fault(
        "state of other shards: "
        "a state that is loaded gives each rank the state of the parameters after its own",
        f"{_ADAPTERS}/numpy/_shards.py",
        "            return [item for item, owner in pairs if owner == rank]",
        "            return [item for item, owner in pairs if owner == rank][::-1]",
        _STATES,
    ),
    Fault(
        "state gathered in another order: "
        "a whole state has the parameters of each rank from the last one on",
        f"{_ADAPTERS}/numpy/_shards.py",
        "            for number, item in zip(own, part, strict=True):\n                whole[number] = item",
        "            for number, item in zip(own[::-1], part, strict=True):\n                whole[number] = item",
        _STATES,
    ),
    Fault(
        "moment of Adam: Adam takes the mean of gradients without the correction for its start",
        f"{_ADAPTERS}/numpy/_optimizers.py",
        "        change = mean / (1 - beta1**count) / (root + self.epsilon)",
        "        change = mean / (root + self.epsilon)",
        ("adam_takes_a_first_step_of_its_rate",),
    ),
    Fault(
        "compared late: parameters are compared two steps later than promised",
        _VERIFICATION,
        "self.age_of(reduced) >= self.every",
        "self.age_of(reduced) >= self.every + 2",
        ("any_change_on_one_rank_is_caught_within_verify_every_steps",),
    ),
    Fault(
        "false alarm: ranks also compare what each has for itself",
        _VERIFICATION,
        "hash((self._last[1], *numbers))",
        "hash((self._last[1], id(self), *numbers))",
        ("no_correct_program_raises",),
    ),
)

TORCH: Final = (
    Fault(
        "failed gradients of a join: those of a reduction that failed are reduced with the next",
        f"{_ADAPTERS}/torch/_rounds.py",
        "            self._has_reduced = True\n        finally:\n            parameters.forget_sent()",
        "            self._has_reduced = True\n        finally:\n            pass",
        ("inside_join_ranks_take_the_steps_of_the_others",),
    ),
    Fault(
        "changed under way: a gradient may be written to while it is reduced",
        f"{_ADAPTERS}/torch/_parameters.py",
        "                    self.gradients.fail(_changed_inside(number))",
        "                    pass",
        ("what_one_rank_does_alone_is_an_error_on_all",),
    ),
    Fault(
        "reduced in the form that is sent: a compression's own form is not undone",
        f"{_ADAPTERS}/torch/_rounds.py",
        "            leaves = dict(zip(leaves, received, strict=True))",
        "            leaves = dict(zip(leaves, reduced, strict=True))",
        _TORCH,
    ),
    Fault(
        "calls anywhere in a program: ranks do not compare at which place of a program a call is",
        "arraycomm/_training/programs.py",
        "        runner_of(self.comm).set_guard(self._guard)\n",
        "",
        ("calls_of_programs_meet_at_one_place",),
    ),
    Fault(
        "order of buckets: each rank divides its parameters in the order of its own gradients",
        f"{_ADAPTERS}/torch/_buckets.py",
        "            order, indices = rows[int(rows[:, 0, 0].argmax()), :, 1:]",
        "            order, indices = rows[self._gradients.comm.rank, :, 1:]",
        _TORCH,
    ),
    Fault(
        "bucket not filled: a prepared reduction has the gradients that an earlier one has left",
        "arraycomm/_training/rounds.py",
        "            self._bucket.fill(prepared.slots, gradients)\n            return self.packed.buffer",
        "            return self.packed.buffer",
        _TORCH,
    ),
    Fault(
        "bucket reduced too early: a bucket is reduced when all but one of its gradients are there",
        f"{_ADAPTERS}/torch/_backward.py",
        "        return not self.waiting[following]",
        "        return self.waiting[following] < 2",
        _TORCH,
    ),
    Fault(
        "other buckets of a backward pass: "
        "of several buckets only the first one's gradients are used",
        f"{_ADAPTERS}/torch/_rounds.py",
        "        for reduced in every:",
        "        for reduced in every[:1]:",
        _TORCH,
    ),
    Fault(
        "parameter of another shard: "
        "a sharded step leaves the first parameter as it was on ranks that do not own it",
        f"{_ADAPTERS}/torch/_shards.py",
        "        for number, values in self._shards.exchange(shards):\n"
        "            updated[number].copy_(values)",
        "        for number, values in self._shards.exchange(shards):\n"
        "            updated[number].copy_(values if number else updated[number])",
        _TORCH,
    ),
    Fault(
        "gradients not given back: "
        "after a sharded step the gradients of other ranks' parameters are lost",
        f"{_ADAPTERS}/torch/__init__.py",
        "            parameter.grad = gradient",
        "            parameter.grad = None",
        _TORCH,
    ),
    Fault(
        "gradient of a mean: the gradient of a mean is that of a sum",
        f"{_ADAPTERS}/torch/_collectives.py",
        '        lambda: gathering(mean=op == "mean"),',
        "        lambda: gathering(),",
        _TRANSPOSES,
    ),
    Fault(
        "gradient of bcast: the gradient of `bcast` is the root's alone",
        f"{_ADAPTERS}/torch/_collectives.py",
        '        total: torch.Tensor | None = comm.reduce(x, "sum", root)',
        '        total: torch.Tensor | None = comm.reduce(x, "max", root)',
        _TRANSPOSES,
    ),
    Fault(
        "variance of ranks: the variance of a batch leaves out that between ranks",
        f"{_ADAPTERS}/torch/_batchnorm.py",
        "    variance = (parts * (variances + (means - mean).square())).sum(0)",
        "    variance = (parts * variances).sum(0)",
        _BATCH_NORM,
    ),
    Fault(
        "mean of means: batch norm weighs ranks alike, however many samples they have",
        f"{_ADAPTERS}/torch/_batchnorm.py",
        "    parts = torch.tensor(counts, dtype=wide.dtype, device=x.device)[:, None] / count",
        "    parts = (torch.tensor(counts, dtype=wide.dtype, device=x.device)[:, None] > 0) / len(counts)",
        _BATCH_NORM,
    ),
)

JAX: Final = (
    Fault(
        "place of a call: every call of a compiled program says that it is the first",
        f"{_ADAPTERS}/jax/_primitive.py",
        "    place = 1 + sum(",
        "    place = 1 + 0 * sum(",
        ("compiled_programs",),
        run=_JAX,
        frameworks=True,
    ),
    Fault(
        "gradient of a JAX mean: the gradient of `reduce_scatter` by a mean is that of a sum",
        f"{_ADAPTERS}/jax/_linear.py",
        '        return rows / comm.size if self.op == "mean" else rows',
        "        return rows",
        ("eager_derivatives_are_those_of_the_sum_of_all_losses",),
        run=_JAX,
        frameworks=True,
    ),
    Fault(
        "batch axis: under `vmap` the result of `allgather` has the batch in front of the ranks",
        f"{_ADAPTERS}/jax/_linear.py",
        '    name = "allgather"\n    result_axis = 1',
        '    name = "allgather"\n    result_axis = 0',
        ("eager_calls_under_vmap_are_those_of_each_row",),
        run=_JAX,
        frameworks=True,
    ),
    Fault(
        "gradients set aside: an ended pass of torch leaves what had been reduced where it has set it",
        f"{_ADAPTERS}/torch/_hooks.py",
        "            self._parameters.slots[number].show_whole(parameter, at_once=at_once)",
        "            pass",
        ("gradients_and_training_are_those_of_torch_alone",),
        frameworks=True,
    ),
    Fault(
        "order of arrival: a bucket keeps its parameters in the order in which gradients came",
        "arraycomm/_training/rounds.py",
        "self.index, self.numbers = index, sorted(numbers)",
        "self.index, self.numbers = index, list(numbers)",
        ("ranks_may_lack_a_pass_in_any_step",),
        frameworks=True,
    ),
    Fault(
        "places as dtypes: what a round says of its place is taken for dtypes that a rank refuses",
        "arraycomm/_training/rounds.py",
        "dtypes; words say no dtypes.\n        pass\n",
        "dtypes; words say no dtypes.\n        super().check_taken(calls, agreed)\n",
        ("ranks_may_lack_a_gradient_in_any_pass_of_a_step",),
        frameworks=True,
    ),
    Fault(
        "prepared step: hyperparameters of a step that has nothing to reduce are not compared",
        "arraycomm/_training/rounds.py",
        "        self._look = part.look_at()\n",
        "        self._look = None if place.has_nothing else part.look_at()\n",
        ("any_change_on_one_rank_is_caught_within_verify_every_steps",),
        frameworks=True,
    ),
)
