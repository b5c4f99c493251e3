"""Pytrees: fused, reduced and synchronized in few messages."""
