"""Ranks that are processes of this node, started from a script or a notebook."""
