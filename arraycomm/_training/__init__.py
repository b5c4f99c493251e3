"""Data-parallel training: gradients, optimizers, metrics and data.

optimizer     `DistributedOptimizer`: finds the adapter; `gradients` is how its steps reduce
rounds        buckets of gradients in backward passes, at one place of the training on every rank
sums          gradients that are accumulated over steps before they are reduced
numbered      gradients of numbered updates, as in JAX; `programs` has the calls of compiled ones
shards        parameters divided over the ranks
weighted      gradients inside `join`, where ranks without data take the others' steps
batches       which items a rank takes; `compressed`: fewer bytes; `comparison`: equal ranks
"""
