"""Glue between arraycomm and the frameworks; each module is imported only with its framework."""
