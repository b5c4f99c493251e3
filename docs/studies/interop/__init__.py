"""Which pairs of frameworks share memory, and which copy."""
