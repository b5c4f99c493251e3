"""Faults in headers, errors and groups, and in what only processes have."""

from __future__ import annotations

from typing import Final

from tests.planted.fault import Fault

_HEADER: Final = "arraycomm/_protocol/header.py"
_AGREEMENT: Final = "arraycomm/_protocol/agreement.py"
_GROUPS: Final = "arraycomm/_collectives/groups.py"
_MPI: Final = "arraycomm/_transports/mpi/transport.py"

_PROGRAMS: Final = ("programs_are_right_or_end_in_an_error_in_time",)
_DISAGREEMENT: Final = ("disagreement_is_an_error_on_every_rank",)
_WRONG: Final = ("wrong_argument_is_an_error_on_every_rank",)

HEADERS: Final = (
    Fault(
        "header off for one operation: what ranks pass to `allgatherv` is not compared",
        _AGREEMENT,
        "    if agreement.agree():",
        '    if signature.operation == "allgatherv" or agreement.agree():',
        _DISAGREEMENT,
    ),
    Fault(
        "op not compared: headers are alike if ops differ",
        _HEADER,
        "    return digest(signature.operation, signature.op, signature.root)",
        "    return digest(signature.operation, signature.root)",
        _DISAGREEMENT,
    ),
    Fault(
        "header ahead: a prepared call on devices does not look at the header of the call before",
        "arraycomm/_prepared/on_device.py",
        "                return bool(exchange.finish(None))",
        "                return True",
        _PROGRAMS,
        run="properties/test_device_laws.py",
        compiled=True,
    ),
    Fault(
        "number of a call given up: a prepared call on devices does not spoil its result",
        "arraycomm/_cuda/prepared.py",
        "                few.given_up, few.shown = given_up, Shown.of(digests)",
        "                few.shown = Shown.of(digests)",
        _PROGRAMS,
        run="properties/test_device_laws.py",
        compiled=True,
    ),
    Fault(
        "digests of a call ahead: one on devices does not spoil what differs on other ranks",
        "arraycomm/_cuda/links/nccl_link.py",
        "            call, self.shown = self._showing",
        "            call, _ = self._showing",
        _PROGRAMS,
        run="properties/test_device_laws.py",
        compiled=True,
    ),
    Fault(
        "digests of a prepared call: one on devices does not spoil what differs on other ranks",
        "arraycomm/_cuda/prepared.py",
        "                few.given_up, few.shown = given_up, Shown.of(digests)",
        "                few.given_up = given_up",
        _PROGRAMS,
        run="properties/test_device_laws.py",
        compiled=True,
    ),
    Fault(
        "headers of the root: a prepared broadcast on devices does not compare what ranks show",
        "arraycomm/_prepared/on_device.py",
        "        return bool(exchange.meet())",
        "        return exchange.meet() is not None",
        _PROGRAMS,
        run="properties/test_device_laws.py",
        compiled=True,
    ),
    Fault(
        "array of an earlier call: a prepared call on devices reads the array of the first one",
        "arraycomm/_cuda/prepared.py",
        "        return self._standing(super().view(x, name), _SCRATCH + self._viewed)",
        "        return super().view(x, name)",
        _PROGRAMS,
        run="properties/test_device_laws.py",
        compiled=True,
    ),
    Fault(
        "NCCL at work: a prepared call on devices ends before NCCL has put all of it there",
        "arraycomm/_cuda/devices.py",
        "        while not done:",
        "        while False:",
        _PROGRAMS,
        run="properties/test_device_laws.py",
        compiled=True,
    ),
    Fault(
        "gradients of a rank alone: a recorded bucket on devices does not see that a rank lacks one",
        "arraycomm/_trees/reduce.py",
        "        if self._found is not None and agreement.calls is None:\n            self._reduced",
        "        if self._found is not None:\n            self._reduced",
        _PROGRAMS,
        run="properties/test_device_laws.py",
        compiled=True,
    ),
    Fault(
        "root not compared: headers are alike if roots differ",
        _HEADER,
        "    return digest(signature.operation, signature.op, signature.root)",
        "    return digest(signature.operation, signature.op)",
        _DISAGREEMENT,
    ),
    Fault(
        "shape not compared: headers are alike if shapes differ in axes of length 1",
        _HEADER,
        "        array = digest(name_of(signature.dtype), signature.shape)",
        "        array = digest(name_of(signature.dtype), sorted(n for n in signature.shape if n != 1))",
        _DISAGREEMENT,
    ),
    Fault(
        "ties compared: trees differ if leaves are one object on some ranks only",
        "arraycomm/_trees/pytrees.py",
        "            return ((STRUCTURE, self.structure),)",
        '            return (STRUCTURE, self.structure), ("ties", len(set(map(id, self.leaves))))',
        ("ties_are_each_ranks_own_matter",),
    ),
    Fault(
        "open after a mismatch: "
        "a rank may go on calling after the ranks have called different things",
        "arraycomm/_protocol/group.py",
        "            if deferred or not (isinstance(error, PeerError) and error.in_step):",
        "            if not (isinstance(error, MismatchError) or getattr(error, 'in_step', False)):",
        _DISAGREEMENT,
    ),
    Fault(
        "wrong rank blamed: the error for another rank's wrong argument names the rank after it",
        "arraycomm/_protocol/mismatch.py",
        "    rank, failure = failures[0]",
        "    rank, failure = failures[0]\n    rank = (rank + 1) % len(details)",
        _WRONG,
    ),
    Fault(
        "out of step after an error: a rank that passed a wrong argument takes no further part",
        _AGREEMENT,
        "    in_step = verdict is _Verdict.RAISING\n",
        "    in_step = False\n",
        _WRONG,
    ),
    Fault(
        "step stays posted: others complete a step that a rank gives up",
        "arraycomm/_transports/control.py",
        "        if not taken and own[0] != _WITHDRAWN:",
        "        if own[0] == _WITHDRAWN:",
        ("a_step_that_one_rank_gives_up_ends_alike_on_all",),
    ),
    Fault(
        "interrupted step stays posted: others complete a step in which a rank is interrupted",
        "arraycomm/_protocol/group.py",
        "        self.control.withdraw()\n",
        "",
        ("a_call_that_begins_after_another_rank_gave_up_raises",),
    ),
    Fault(
        "interrupted before its header: a rank's next call meets the one in which it was interrupted",
        "arraycomm/_calls/runner.py",
        "            self.group.close(error)\n        trim(error)",
        "            pass\n        trim(error)",
        ("an_interrupt_at_any_moment_leaves_nobody_a_wrong_result",),
    ),
    Fault(
        "large number wraps: a Python integer beyond 64 bits is taken modulo 2^64",
        "arraycomm/_arrays/frameworks/python.py",
        "        array: Array = np.array(x, dtype)",
        "        array: Array = np.array(x % 2**63 if type(x) is int and x >= 2**63 else x, dtype)",
        _WRONG,
    ),
    Fault(
        "read-only out: a result is written to an `out` that is read-only",
        "arraycomm/_arrays/results.py",
        '        raise BufferError("out is read-only; pass memory that can be written")',
        "        found.array = found.array.copy()",
        _WRONG,
    ),
    Fault(
        "rank that left: the error for a rank that has ended names the rank after it",
        "arraycomm/_protocol/waits/watchdog.py",
        "            rank=rank,\n            traceback=notice.text,",
        "            rank=(rank + 1) % self._control.size,\n            traceback=notice.text,",
        ("rank_that_leaves_is_an_error_on_the_others",),
    ),
    Fault(
        "traceback lost: the error for a rank that failed lacks its traceback",
        "arraycomm/_protocol/group.py",
        '        return "" if followed else describe_raise(error)',
        '        return "" if followed else type(error).__name__',
        ("exception_before_a_call_is_an_error_on_the_others",),
    ),
)

GROUPS: Final = (
    Fault(
        "key ignored: `split` orders the ranks of a group as before, whatever their keys",
        _GROUPS,
        "    members.sort(key=lambda rank: (replies[rank][2], rank))",
        "    members.sort()",
        ("split_partitions",),
    ),
    Fault(
        "color of none: a rank without a color joins the group of color 0",
        _GROUPS,
        "        return _COLOR_AND_KEY.pack(color is not None, *given)",
        "        return _COLOR_AND_KEY.pack(True, *given)",
        ("split_partitions", "integers_associate"),
    ),
    Fault(
        "ties of keys: ranks of equal keys come in a group in reverse order",
        _GROUPS,
        "    members.sort(key=lambda rank: (replies[rank][2], rank))",
        "    members.sort(key=lambda rank: (replies[rank][2], -rank))",
        ("split_partitions", "splits_nest"),
    ),
    Fault(
        "groups of one size: groups of as many ranks that come from one split share their memory",
        "arraycomm/_transports/threads.py",
        "            group, waited_for = self._children.pop((split, color), (None, size))\n"
        "            group = group or Group(size)\n"
        "            if waited_for > 1:\n"
        "                self._children[split, color] = (group, waited_for - 1)",
        "            group, waited_for = self._children.pop((split, -size), (None, size))\n"
        "            group = group or Group(size)\n"
        "            if waited_for > 1:\n"
        "                self._children[split, -size] = (group, waited_for - 1)",
        ("groups_go_their_own_ways", "splits_nest"),
    ),
    Fault(
        "freed but open: a communicator that was freed takes further calls",
        _GROUPS,
        '    group.end(CommunicatorClosedError("it was freed"))\n',
        "",
        ("dup_is_independent",),
    ),
    Fault(
        "check=False folds backwards: without headers ranks are folded in another order",
        "arraycomm/_collectives/reductions.py",
        "        return algorithms.allreduce(self.placement.link, self.flat, self.into, op)",
        "        flat = self.flat if self.group.options.check else self.flat[::-1].copy()\n"
        "        return algorithms.allreduce(self.placement.link, flat, self.into, op)",
        ("check_does_not_matter",),
    ),
)

PROCESSES: Final = (
    Fault(
        "end of a ring: what goes on at the beginning of a ring is read from its second byte on",
        "arraycomm/_transports/processes/rings.py",
        "into[first:count] = self._data[: count - first]",
        "into[first:count] = self._data[1 : count - first + 1]",
        ("a_ring_gives_what_it_was_given",),
    ),
    Fault(
        "MPI's root: a long array is broadcast by MPI's rank 0",
        _MPI,
        "Movement(self.mpi_comm.Ibcast, [buffer, MPI.BYTE], root)",
        "Movement(self.mpi_comm.Ibcast, [buffer, MPI.BYTE], 0)",
        ("bcast_copies",),
        run="mpi",
    ),
    Fault(
        "MPI's tag: messages of one rank to another all have tag 0 in MPI",
        _MPI,
        "Movement(start, [buffer, MPI.BYTE], dest, tag)",
        "Movement(start, [buffer, MPI.BYTE], dest, min(tag, 1))",
        ("messages_arrive_as_they_were_sent",),
        run="mpi",
    ),
    Fault(
        "MPI's key: MPI orders the ranks of a group as before",
        _MPI,
        "        made = self.mpi_comm.Split(MPI.UNDEFINED if color is None else color, key)",
        "        made = self.mpi_comm.Split(MPI.UNDEFINED if color is None else color, 0)",
        ("split_partitions",),
        run="mpi",
    ),
)
