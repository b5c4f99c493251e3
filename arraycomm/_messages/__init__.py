"""Messages from rank to rank: `send`, `recv`, and their requests.

envelope   what a message says of the array, with the elements of a small one
matching   which message a receive takes, if it may be from any rank or have any tag
"""
