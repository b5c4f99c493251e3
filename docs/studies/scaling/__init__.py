"""The cost of an allreduce on up to 131,072 ranks, by a model that is checked on up to 8."""
