"""Ranks as threads of one process, which take turns as a schedule says.

run, threads                          a function on every rank
schedule, scheduled_transport         in which order ranks go on, and messages come
rank_groups, rank_links               the ranks of a test: threads, or the processes of a job
lockstep                              tests that every process of a job runs in step
transfer                              drawn values on their way to the ranks
plain_worlds                          tests of code that communicates by mpi4py itself
stacks, interrupt                     where ranks are, and how they are stopped
"""
