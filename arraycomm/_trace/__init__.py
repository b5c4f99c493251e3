"""Traces: one timeline of all ranks' calls; what `Communicator.trace` and `ARRAYCOMM_TRACE` do."""
