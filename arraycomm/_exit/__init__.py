"""How a process comes to its end without leaving other ranks behind.

meeting         the ranks of a node meet before MPI begins
exit            what a process does at its end, in whichever way it ends
ending          waits for the ends of others
leaving         a rank says in a step that it makes no further call
launcher        what launched this process
process_watch   processes of this node that are gone

the end                        is seen by                          and told as   then
the program is over            `atexit`                            ENDED         waits for others
an exception leaves it         `sys.excepthook`, `sys.last_value`  GONE          no end of MPI
Ctrl-C                         the same                            GONE          status 130
it calls `MPI.Finalize`        attribute of MPI_COMM_SELF          FINALIZED     groups are closed
it is a forked child           `os.register_at_fork`               -             no end of MPI
launcher dies, MPI is stuck    process_watch                       -             SIGTERM
a signal, `os._exit`           launcher, other ranks               -             -

Once all ranks have ended well, MPI ends. Daemon threads might still call it, and the status of the
process is not known yet: so it ends after Python, in a handler of the C library, `ending.c`. If a
rank has failed, that handler leaves the process without MPI's end.
"""
