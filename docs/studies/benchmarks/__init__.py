"""The times of allreduce beside those of mpi4py and gloo."""
