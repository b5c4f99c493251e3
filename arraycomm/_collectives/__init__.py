"""The collectives: one class for each, over any link."""
