"""Waiting for ranks: until they come, until it is certain that they do not, or time is up.

waiting         looks, and gives the core up in between
watchdog        ends a wait that can no longer succeed
deadlock        finds ranks that wait for one another
progress        a thread that goes on with requests while the program does something else
still_waiting   the warning that a rank has waited for long
outcomes        requests that failed and that nobody has waited for
clock           seconds, which tests can set
"""
