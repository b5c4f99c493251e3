# ruff: noqa: RUF001 - formulas have Greek letters
"""The prose of docs/scaling.md, with places for the numbers."""

from __future__ import annotations

from typing import Final

INTRODUCTION: Final = """\
<!-- Written by docs/studies/scaling; change that program, not this page. -->

# Scaling to many ranks

What do an `allreduce` and its header cost on up to {largest:,} ranks? Nobody has run arraycomm on so many:
this page is arithmetic. It writes down a model of each algorithm. It simulates the algorithms message by message,
to check that the formulas are right. It runs the library's own code on simulated ranks, to check that the formulas are those of the code. It compares the model with measurements on 2, 4 and 8 ranks. Then it
applies the model to large numbers of ranks.

`python -m docs.studies.scaling` writes this page and its figure from `docs/studies/scaling/measured.json`.
With `--measure` it takes the measurements first, and with `--simulate` it repeats the simulation of the library's own code.
"""

MODEL: Final = """\
## The model

A message of *n* bytes takes α + n β (Hockney 1994). Adding *n* bytes to others takes n γ. All ranks
send at the same time; each sends one message at a time, and can receive one meanwhile. The model also counts what Python does
for each rank, since it grows with the number of ranks: σ to read a slot of the control channel, φ to
fold a row that came with the header, ψ to lay out, move and fold one rank's part of a chunk; τ, υ and ω in a turn of a chain, in it for each rank of the node, and for each further share of a chunk; ε and η over a grid, for each rank of the row and
the column, and for each row that the native part folds. κ is the time to copy a byte. λ is the cost of the call itself. p is the number of ranks, and log p is ⌈log₂ p⌉.

| step | time |
| --- | --- |
| header, control channel in shared memory | λ + p σ |
| header, control channel over messages between N nodes | λ + log N (α + 128 β) |
| "header": the array is sent with the header | p φ + (p − 1) n γ, and (N − 1) p / N n β over messages |
| "steps": one slot of shared memory after another | ⌈n / slot⌉ p (σ + φ) + (p − 1) n γ |
| "slices", for each chunk: all-to-all, fold | (p − 1) α + n β (p − 1) / p + p ψ + n γ (p − 1) / p |
| … and allgather, by a ring or by a message to each | (p − 1) α + n β (p − 1) / p |
| "grid" of R rows and C columns, p = R C: two all-to-alls, sorting, fold, two allgathers | 2 (R + C − 2) α + n β (3 + 1 / C) + n κ + (R + C) ε + p η + n γ |
| slices of the whole array, both exchanges in few rounds (**not built**) | 2 log p α + n β (log p / 2 + 1) + p ψ + n γ |
| "exchange" of two ranks, in K chunks of c bytes | K (α + c β) + c γ if messages take longer than folds, and 2 n κ |
| "chain" of N nodes with m ranks each, in K chunks of c bytes | K + N + h turns of all nodes, if results take h hops; in those in which a node acts, τ + m υ, 2 c κ, c γ, (S − 1) ω of S shares, and messages of each rank, which overlap with those of other ranks: S (α + c β / (S m)) of totals, and α + c β / m |
| broadcast of k pieces by a chain | (p + k − 2) (α + n β / k) |
| … by a binary tree | (2 k − 2 + about 2 log p) (α + n β / k) |
| broadcast as MPI libraries do it: parts by a tree, then a ring | (log p + p − 1) α + 2 n β (p − 1) / p |
| recursive doubling | log p (α + n β + n γ) |
| Rabenseifner | 2 log p α + 2 n β (p − 1) / p + n γ (p − 1) / p |

- What ranks show goes by Bruck's algorithm, from the first rank of each node to those of other nodes. Ranks that agree
  have one header in common, of 128 bytes, and everyone's elements follow it. So a node that has heard from half of the others sends no more than
  at first, apart from elements. If ranks disagree, each has a header of its own. The ranks of a node share one copy of all.
- In shared memory, chunks have 4 MiB and come one after another. Between nodes a chunk has √(2 p n α / γ) bytes, with 2 α / γ taken
  as 32 KiB: then the latencies of all chunks and the fold of the one chunk that hides behind no message are least together. It has at least a quarter of the array or 4 MiB, whichever is less, at least 1 MiB,
  and at most 256 MiB; and chunks are about equally long. There chunks overlap: the elements of the next chunk are on their way while a chunk is folded.
  In the model, messages of a rank still go one by one; only folds hide behind them. What Python does is added in full.
- Two ranks between nodes send one another everything, in messages of up to 64,000 bytes of which four are under way, and each folds all of it.
- Between nodes, more ranks, up to 128, send the slices of a chunk as a message to each rank. A folded slice goes once to each other
  node, and is passed on there.
- More than 128 ranks, one a node or in any other placement, reduce over a grid unless slices take less time, since their arrays are large for so many ranks. A rank sends to its row the slices that each column folds, and to its column the slices of all
  its row, so that they arrive in rank order; results go back so. Large arrays go in pairs of chunks, of up to 128 MiB each: one moves while the other one is sorted or folded. The model plays their steps one by one.
- A rank of a chain folds and sends its part of a chunk in S shares, 16 at most, if nodes are many: then a total goes from node to node in an S-th of the time.
- Results on a chain go back from node to node, h = N − 1, or down a binary tree, h = log N, if that saves more turns than it sends bytes.
- Along a chain of nodes, the ranks of a node wait for one another in each turn, and share the node's link. The formula plays the turns one by one, with a clock for every rank (`docs/studies/scaling/chained.py`). It lets the ranks of a node send in
  their order; in the simulation they send as soon as they can, which changes the time by up to 4 %.
- With more ranks, slices go by collectives of the MPI, and so do the rows and columns of a grid. It chooses the algorithm of the allgather.
  MPICH 5.0.2 doubles (by Bruck's algorithm if p is no power of two) while the bytes of all ranks together are below
  512 KiB (80 KiB), and then uses a ring, as for chunks of 4 MiB. Open MPI's nonblocking allgather sends to each rank
  separately, which costs (p − 1) α on any number of ranks.
- `MPI_Ialltoallv` sends to each rank separately in both. The term (p − 1) α assumes that one message ends before
  the next begins. MPICH overlaps several messages: in the terms of LogGP (Alexandrov et al. 1995)
  they then take (p − 1) g + α, with a gap g between messages that is smaller than α.
- "In few rounds" sends slices through other ranks (Bruck et al. 1997): half of the array in each of log p
  rounds. One rank still folds each slice, in rank order. Below, "the fastest by slices or by gathering" is
  the fastest of two kinds: slices of the whole array, with either all-to-all and either allgather; and gathering
  everything in few rounds.
- MPI libraries use recursive doubling and Rabenseifner's algorithm inside `MPI_Allreduce` (Thakur,
  Rabenseifner, Gropp 2005; Chan et al. 2007 derive their costs and lower bounds). Both fold in the order of a tree. That gives the same
  integers and bits, but rounds floats differently.
- A broadcast goes to one rank of each node, and on from there within the node, while further pieces come. It has up to 4 log p pieces of at least 512 KiB, for p nodes.
- Over TCP, messages of more than 64,000 bytes go in [pieces](architecture.md#algorithms) of about so many. The model and the simulation count each message as one: the latency of a piece hides behind the pieces before it.
- `gather` and `scatter` send each rank's block straight to the root, or from it, whatever node the rank is on. The bytes
  on the root's link are the same if one rank of each node sends for the others, and these wait for one another: so gathered, on
  4 network namespaces of one machine with 2 and 6 ranks each, 1 KiB to 1 MiB a rank took 0.9 to 4 times as long, and most sizes about twice.
- With several ranks a node, the ranks that send to other nodes at the same time share the node's link.
  The messages of the others stay within the node, with an α and β of their own.
"""

SIMULATION: Final = """\
## The messages, simulated one by one

`docs/studies/scaling/rounds.py` simulates each schedule with a clock for every rank: who sends how many bytes to whom in
which round. A rank continues when its message is sent and the message to it has arrived. The table shows the time by the closed formula divided by the
simulated time, for {mebibytes} MiB on the machine assumed below:

{table}
"""

REAL: Final = """\
## The real code, simulated

Here the library's own code makes the calls: up to {largest:,} ranks have a communicator each, and call `iallreduce` as coroutines of one process. Only
the transport is simulated (`docs/studies/scaling/network.py`): every rank has a clock, and each message takes α + n β of the machine assumed below. What is counted are the messages and
the bytes that a rank sends, header included, from the rank that sends most; and the time until the last rank is done. ÷ is what the formula says, divided by that.

{table}

- The library decides how arrays move. What a movement (an all-to-all, an allgather, …) takes is the MPI's choice, and is a schedule here: an all-to-all goes from one partner to the next, an allgather doubles or
  is a ring as in MPICH, and `gather` and `scatter` go rank by rank. Between nodes, the library itself sends the messages of an allgather on up to 128 ranks, those of a `bcast`, and those of a step of the control channel: these are schedules here,
  with the library's messages. A step takes no message in shared memory.
- "Messages" are counted on the rank that sends most: of a header, this is the first rank of a node. Chunks overlap here as in the library: a rank begins the movements of the next chunk before it folds.
- Folds take γ for each byte. What Python does takes no time, nor does the fold of what came with the header.
- Where all ranks together have at most 64 MiB, the elements do move, and every rank's result is the sum in rank order, to the bit. Above, the ranks share one array that stays as it is.
- Slices are whole elements, so that some ranks send a few bytes more than n (p − 1) / p. With several ranks a node, the time of a round is an average over them in the formula.

The same for the other collectives, for {kibibytes} KiB a rank (`scatter`, `alltoall`, `reduce_scatter`: for all ranks together), with one rank a node. Again these are the messages of the rank that sends most, header included:

{others}
"""

CHECK: Final = """\
## Comparison with 2, 4 and 8 ranks

{machine}. **Two cores**: 4 and 8 ranks take turns, so that all their work costs 2 and 4 times as
much, and each wait costs a change of turns. The comparison shows whether the model has the right growth with the number of ranks; it says
nothing about a network. {load}

These parameters are fitted to one process that pretends to have up to 1,024 ranks (λ, σ, φ, ψ, γ), to two ranks on one core
(turns), and, for the rows marked "fitted" below, to two ranks on two cores (α, β):

{parameters}

The other rows are predicted. The jobs ran {runs} times, and the run with the lowest medians of each is kept. The times are
the least of all repetitions, since other programs can only add to a time; the medians stand beside them.
In shared memory, arrays that would go through the segment go by the ways of ranks without one. The tables for many ranks below take neither α nor β from these rows.

{comparison}

{verdict}
The model lets ranks take turns in a fixed order and knows no caches. With more ranks than cores, small arrays depend
on the system's scheduler, and the slices of large arrays are smaller and stay in the cache more often.

The work of a single rank does not have to be extrapolated: one process pretends that all others have
answered, and runs the library's own code on {pretended:,} slots. Its chunks have 4 MiB and do not overlap. Calls of that process are made in Python, and λ is larger there.

{alone}
"""

LARGE: Final = """\
## Up to {largest:,} ranks

![Time of an allreduce by ranks, for three sizes, with one and with 64 ranks a node](studies/scaling/figure.svg){{ .figure }}

Assumptions: α = {alpha} µs and 1/β = {bandwidth:.0f} GB/s between nodes, {near_alpha} µs and {near_bandwidth:.0f} GB/s within one, folds of {fold:.0f} GB/s, no
contention in the network, and p a power of two. 200 Gb/s are 25 GB/s. For such a network a latency of 1.2 µs is published
([Azure HBv3](https://docs.azure.cn/en-us/virtual-machines/hbv3-performance)); the
rest is for the distances in a large machine. What Python and the native part take is what was measured above, and κ is 1 ÷ 10 GB/s.
The control channel uses messages between nodes, and shared memory within each.
"""

SOURCES: Final = """\
## Sources

- A. Alexandrov, M. Ionescu, K. Schauser, C. Scheiman: *LogGP: Incorporating Long Messages into the LogP
  Model*, SPAA 1995.
- J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby: *Efficient Algorithms for All-to-All Communications in
  Multiport Message-Passing Systems*, IEEE TPDS 8(11), 1997.
- E. Chan, M. Heimlich, A. Purkayastha, R. van de Geijn: *Collective Communication: Theory, Practice, and
  Experience*, Concurrency and Computation 19(13), 2007.
- R. Hockney: *The Communication Challenge for MPP: Intel Paragon and Meiko CS-2*, Parallel Computing 20(3), 1994.
- R. Rabenseifner: *Optimization of Collective Reduction Operations*, ICCS 2004.
- R. Thakur, R. Rabenseifner, W. Gropp: *Optimization of Collective Communication Operations in MPICH*, IJHPCA 19(1), 2005.
- The selection tables inside its library say which algorithm MPICH uses; for Open MPI it is the code in
  `ompi/mca/coll/libnbc`.
"""
