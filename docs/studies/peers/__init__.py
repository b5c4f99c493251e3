"""Which laws of the conformance suite other libraries keep, seen through thin wrappers."""
