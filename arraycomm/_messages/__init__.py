"""Messages from rank to rank: `send`, `recv`, and their requests.

message    one rank's part in it: its steps, and what an error says of the wait for them
envelope   what a message says of the array, with the elements of a small one
matching   which message a receive takes, if it may be from any rank or have any tag
delivery   takes messages to their ends: in the caller's thread, or beside it
"""
