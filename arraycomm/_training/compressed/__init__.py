"""Gradients that travel in fewer bytes.

compression   the interface, and the casts that it has
compressor    the compression of one optimizer, with its states
states        what a compression keeps of each parameter
feedback      what compression has left out is added to the next gradient
"""
