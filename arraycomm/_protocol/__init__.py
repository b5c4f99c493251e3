"""What ranks tell one another besides data.

header      what a rank is about to call, shown in its slot; its digest is compared first
agreement   the headers of all ranks in one step: they agree, or all raise the same error
details     what ranks say in further steps, once headers differ
engine      drives the generators of one group, in order
waits       waiting for other ranks, and what ends that
leaving     the last step of a group, in which ranks tell that they leave
group       the state of one communicator on this rank
"""
