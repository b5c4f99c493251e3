"""How a process comes to its end without leaving other ranks behind.

meeting         the ranks of a node meet before MPI begins
exit            what a process does at its end, in whichever way it ends
ending          waits for the ends of others
leaving         a rank says in a step that it makes no further call
launcher        what launched this process
process_watch   processes of this node that are gone
"""
