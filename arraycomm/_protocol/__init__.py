"""What ranks tell one another besides data.

header      what a rank is about to call, shown in its slot; its digest is compared first
agreement   the headers of all ranks in one step: they agree, all raise the same error, or leave
details     what ranks say in further steps, once headers differ
engine      drives the generators of one group, in order
task        one program that goes on beside its caller
waits       waiting for other ranks, and what ends that
group       the state of one communicator on this rank
"""
