"""`arraycomm doctor`: what there is on this machine, and what is wrong with it."""
