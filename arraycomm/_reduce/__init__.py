"""How the elements of a reduction move, and in which order they are folded.

rows      the elements of all ranks, one rank's after the other
slices    each rank folds one part of the array, of all ranks, and gives its result to all
segment   memory that the ranks of a node share, in which they do so chunk by chunk
chain     nodes one after the other, each of which folds onto the total of those before
chunk     as much of a large array as stays in the caches

`selection` decides, for the call and for `explain`. All ways fold in rank order, so that they give
the same bits.
"""
