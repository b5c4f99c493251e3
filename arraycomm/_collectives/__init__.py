"""The collectives: one operation a call, over any link."""
