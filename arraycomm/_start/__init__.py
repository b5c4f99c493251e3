"""How processes become ranks of one group: from `init` or `from_mpi` to the first common step."""
