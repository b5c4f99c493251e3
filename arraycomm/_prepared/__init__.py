"""Prepared calls: what a call keeps so that the next one like it is quick.

fast path    a prepared call; it hands over to the full call if anything is unusual
key          what must be alike: the operation, the array's type, dtype and shape, and the arguments
form         small (one call of the native part, header and elements together), large (the header
             is prepared, the elements move after it), ahead (work on a device, before the check)

`fast_paths` keeps those of a communicator, of every kind, and gives them up together. `exchanged`
has what they share; `fast_path` those of arrays, `on_device` those of arrays on devices,
`small_trees` those of trees, and `packed_calls` those of objects and of blocks for neighbors, which
travel as bytes. Messages have theirs in `_messages/fast_messages.py`, and what is put on a device
is in `_cuda/prepared.py`. A call is prepared after it has been made in full twice.
"""
