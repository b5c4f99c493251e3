"""Ranks as MPI processes: everything that knows mpi4py.

On one node the ranks share memory, and MPI moves what is large. Between nodes, one rank of each
sends what its node shows in a step (`nodes`), and long messages go in pieces (`pieces`).
"""
