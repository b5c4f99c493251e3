"""Which items of a data set each rank takes, batch by batch.

data    the container that users iterate over, and its state
order   the order of an epoch, shuffled alike on every rank
items   what is taken from a data set of any kind
"""
