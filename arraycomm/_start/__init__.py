"""How processes become ranks of one group: from `init` or `from_mpi` to the first common step.

launch      what started this process, as its environment and its ancestors say (`_launch`)
numbered    told by variables which of how many processes it is, without an MPI launcher
to meet     to wait until every rank is there, before a call in which one could only wait
opened      the ranks agree on version, arguments and memory, and have made their first step

what the environment says       choice         then
nothing                         self           `opened.open_alone`
an MPI launcher, or MPI runs    mpi, nccl      `before_mpi` -> MPI begins -> `meeting` -+
numbers of processes            processes      `joining` -> texts by process 0 ---------+
torch.distributed has a store   (its group)    texts by the store ----------------------+
a contradiction, or children    error                                                   |
                                                                                        |
                  versions are the same (`arguments.refuse_different`) <----------------+
                    -> every rank's arguments are right (`arguments.agree`)
                      -> a transport: memory of the node, and messages to other nodes
                        -> `init`, the first step, in which ranks compare what must be the same

A rank on which something fails raises it; the others raise `PeerError`, or say who has not come.
"""
