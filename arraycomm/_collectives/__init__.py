"""The collectives: one class for each, over any link; and the fast path of a repeated reduction."""
