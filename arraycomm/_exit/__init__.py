"""How a process comes to its end without leaving other ranks behind.

to leave        to make no further call, and to have told the other ranks so, with a state
well            by the end of the program, without an error that nobody has seen
family          a group, and all groups made from it: they end together

exit            what a process does at its end, in whichever way it ends
ending          waits for the ends of others
process_watch   ends this process if nothing else would

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
