"""What ranks tell one another besides data.

header      what a rank is about to call, shown in its slot; its digest is compared first
agreement   the headers of all ranks in one step: they agree, or all raise the same error
details     what ranks say in further steps, once headers differ
engine      drives the generators of one group, in order
waits       waiting for other ranks, and what ends that
ends        how a process comes to its end
group       the state of one communicator on this rank
"""
