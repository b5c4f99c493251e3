"""The links between devices: by NCCL, by MPI, over copies on the hosts."""
