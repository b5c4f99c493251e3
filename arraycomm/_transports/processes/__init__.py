"""Ranks as processes of one node that no MPI connects: they share one file in memory.

ring   bytes on their way from one process to another
"""
