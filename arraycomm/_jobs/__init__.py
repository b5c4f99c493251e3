"""What starts ranks: `arraycomm run` by an MPI's launcher, `launch` as processes of this node.

job         a program on several ranks, from its start to its last status
launcher    what starts a job's ranks: an mpiexec, or without MPI `starter.py`
relay       hears what each rank prints, and how it ends; `output` keeps the lines whole

`arraycomm run`     the launcher starts `rank.py` once a rank, which starts the program, and sends
                    what it prints and its status to the relay, by a connection of its own
`launch`            starts `process.py` once a rank, which calls the function, and leaves what that
                    returned or raised in a file of memory

`rank.py`, `starter.py` and `tied.py` are programs that import the standard library alone: all of
the package would take longer to start than many programs run.
"""
