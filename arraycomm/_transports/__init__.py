"""Bytes between ranks.

link              the movements between the ranks, and the folds of what they move
transport         a link over host memory, with a control channel
control channel   a slot for each rank that all ranks can read, for small steps
note              what a rank tells the others beside its steps: that it fails, waits or leaves
"""
